"""Attentions fused, and a BERT-base on the CPU, by ONNX Runtime and by each tool that fuses for it.

    python -m benchmarks.compared [--rounds 15] [--to benchmarks/results/compared_cpu.md]

The bundled models are given to every tool as they are. BERT-base has random weights and is exported by dynamo. Each round
runs every variant once, in turns. The table has medians of CPU time on one thread, since the machine may do other work.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
import transformers
from onnxruntime.transformers.optimizer import optimize_model
from onnxscript.rewriter.ort_fusions import optimize_for_ort
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime

import onnx_attnfuse

BUNDLED = pathlib.Path(__file__).parents[1] / "models" / "bundled"
OPTIMIZER_TYPES = {"llama_past": "gpt2", "whisper_decoder": "bart"}
"""Model types of ONNX Runtime's optimizer for families that it does not know by their names."""
ALREADY_FUSED = "dyn23"  # that export has the attention operator of opset 23
SIZES = ((1, 128), (8, 128))
PACKAGES = ("onnxruntime", "onnxscript", "transformers", "torch", "onnx-attnfuse")


def with_runtime(source: pathlib.Path, target: pathlib.Path) -> None:
    """The model as ONNX Runtime optimizes it when it is loaded."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def with_optimizer(source: pathlib.Path, target: pathlib.Path) -> None:
    """onnxruntime.transformers.optimizer, given the model type."""
    family = source.name.partition("__")[0]
    model = optimize_model(str(source), model_type=OPTIMIZER_TYPES.get(family, family), opt_level=0)
    model.save_model_to_file(str(target))


def with_onnxscript(source: pathlib.Path, target: pathlib.Path) -> None:
    """onnxscript's fusions for ONNX Runtime."""
    ir.save(optimize_for_ort(ir.load(source))[0], target)


def with_transformers(source: pathlib.Path, target: pathlib.Path) -> None:
    """The pass that transformers runs for OnnxConfig(ort_fusions="cpu")."""
    model = ir.load(source)
    fuse_for_onnxruntime(model, "cpu")
    ir.save(model, target)


def with_ours(source: pathlib.Path, target: pathlib.Path) -> None:
    """attnfuse optimize, without an option."""
    onnx_attnfuse.optimize(source, ep="cpu").save(target)


TOOLS: dict[str, Callable[[pathlib.Path, pathlib.Path], None]] = {
    "ONNX Runtime alone": with_runtime,
    "its optimizer": with_optimizer,
    "onnxscript": with_onnxscript,
    "transformers `ort_fusions`": with_transformers,
    "attnfuse": with_ours,
}


def unfused(model: pathlib.Path) -> int:
    """How many Softmax nodes a model has."""
    return sum(node.op_type == "Softmax" for node in onnx.load(model, load_external_data=False).graph.node)


def attempt(tool: Callable[[pathlib.Path, pathlib.Path], None], source: pathlib.Path, target: pathlib.Path) -> str:
    """Runs a tool; an error's first line, or nothing."""
    try:
        tool(source, target)
        onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - a tool may fail in any way
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    return ""


def counts(folder: pathlib.Path) -> list[str]:
    """A row for each bundled model, and their sum."""
    rows, totals, whole, notes = [], dict.fromkeys(TOOLS, 0), 0, []
    for source in sorted(BUNDLED.glob("*.onnx")):
        if ALREADY_FUSED in source.name:
            continue
        sites, cells = unfused(source), []
        whole += sites
        for name, tool in TOOLS.items():
            target = folder / f"{len(name)}_{source.name}"
            failure = attempt(tool, source, target)
            fused = 0 if failure else sites - unfused(target)
            totals[name] += fused
            cells.append("failed" if failure else str(fused))
            notes += [f"- {source.stem}, {name}: {failure}"] if failure else []
        rows.append(f"| {source.stem} | {sites} | {' | '.join(cells)} |")
    total = f"| **all** | {whole} | {' | '.join(str(count) for count in totals.values())} |"
    return [f"| model | attentions | {' | '.join(TOOLS)} |", "|---" * (len(TOOLS) + 2) + "|", *rows, total, "", *notes]


def exported(folder: pathlib.Path) -> pathlib.Path:
    """BERT-base with random weights, by dynamo at opset 18."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval()
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("seq", min=2)
    tokens = torch.ones(2, 16, dtype=torch.int64)
    shapes = {name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")}
    path = folder / "bert__base.onnx"
    program = torch.onnx.export(
        model, (), kwargs={"input_ids": tokens, "attention_mask": tokens}, dynamic_shapes=shapes, dynamo=True, opset_version=18
    )
    assert program is not None
    program.save(path)
    return path


def times(source: pathlib.Path, rounds: int) -> list[str]:
    """A row for each variant of BERT-base: attentions fused, and milliseconds for each size."""
    sites, sessions, rows = unfused(source), {}, []
    targets = {name: source.with_name(f"{len(name)}_{source.name}") for name in TOOLS}
    for name, tool in TOOLS.items():
        failure = attempt(tool, source, targets[name])
        assert not failure, failure
        path = source if tool is with_runtime else targets[name]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        sessions[name] = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    taken: dict[tuple[str, tuple[int, int]], list[float]] = {}
    wanted: dict[tuple[int, int], np.ndarray] = {}
    apart = dict.fromkeys(TOOLS, 0.0)
    random = np.random.default_rng(0)
    for turn in range(rounds + 2):
        for size in SIZES:
            mask = np.ones(size, np.int64)
            mask[1:, size[1] // 2 :] = 0
            feeds = {"input_ids": random.integers(0, 30000, size), "attention_mask": mask}
            for name, session in sessions.items():
                start = time.process_time()
                found = session.run(None, feeds)[0]
                if turn >= 2:
                    taken.setdefault((name, size), []).append(1000 * (time.process_time() - start))
                reference = wanted[size] = found if name == "ONNX Runtime alone" else wanted[size]
                apart[name] = max(apart[name], float(np.abs(found - reference)[mask == 1].max()))
    for name in TOOLS:
        numbers = " | ".join(f"{statistics.median(taken[name, size]):.0f}" for size in SIZES)
        rows.append(f"| {name} | {sites - unfused(targets[name])} of {sites} | {numbers} | {apart[name]:.0e} |")
    sizes = " | ".join(f"{batch} x {length}, ms" for batch, length in SIZES)
    return [f"| tool | attentions fused | {sizes} | max. difference |", "|---" * (len(SIZES) + 3) + "|", *rows]


def main() -> None:
    """Writes both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--to", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results" / "compared_cpu.md")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fused = counts(folder)
        measured = times(exported(folder), chosen.rounds)
    lines = [
        "# Compared on the CPU",
        "",
        f"Written by `python -m benchmarks.compared`. {versions}. float32.",
        "",
        "## Attentions fused in the bundled models",
        "",
        "An attention counts as fused where its Softmax is gone and ONNX Runtime loads the result.",
        "The pass of transformers is meant for graphs of its own exporter, and gets these as they are.",
        "",
        *fused,
        "## BERT-base",
        "",
        "Random weights, exported by dynamo at opset 18. Of eight entries seven are half padding.",
        "CPU time on one thread, medians of rounds in turns.",
        "",
        *measured,
        "",
    ]
    chosen.to.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
