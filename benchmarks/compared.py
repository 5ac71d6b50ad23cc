"""Attentions fused, and a BERT-base on the CPU, by ONNX Runtime and by each tool that fuses for it.

    python -m benchmarks.compared [--rounds 15] [--to benchmarks/results/compared_cpu.md]

The bundled models are given to every tool as they are. BERT-base has random weights and is exported by dynamo. Each round
runs every variant once, in turns. The table has medians of CPU time on one thread, since the machine may do other work.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
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
from benchmarks.harness import in_turns, one_line, table

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
        return one_line(error)
    return ""


def counts(folder: pathlib.Path) -> list[str]:
    """A row for each bundled model, and their sum."""
    rows, totals, whole, notes = [], dict.fromkeys(TOOLS, 0), 0, []
    for source in sorted(path for path in BUNDLED.glob("*.onnx") if ALREADY_FUSED not in path.name):
        sites, cells = unfused(source), []
        whole += sites
        for name, tool in TOOLS.items():
            target = folder / f"{len(name)}_{source.name}"
            failure = attempt(tool, source, target)
            fused = 0 if failure else sites - unfused(target)
            totals[name] += fused
            cells.append("failed" if failure else fused)
            notes += [f"- {source.stem}, {name}: {failure}"] if failure else []
        rows.append([source.stem, sites, *cells])
    return [table(["model", "attentions", *TOOLS], [*rows, ["**all**", whole, *totals.values()]]), "", *notes]


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


class Session:
    """A model on one thread of the CPU, which is fed with random tokens of a size; of eight entries seven are half padding."""

    def __init__(self, path: pathlib.Path, size: tuple[int, int]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._mask = np.ones(size, np.int64)
        self._mask[1:, size[1] // 2 :] = 0
        self._feeds = {"input_ids": np.random.default_rng(0).integers(0, 30000, size), "attention_mask": self._mask}

    def __call__(self) -> None:
        self.result = np.asarray(self._session.run(None, self._feeds)[0])

    def output(self) -> np.ndarray:
        """The result of tokens that are no padding."""
        self()
        return self.result[self._mask == 1]


def times(source: pathlib.Path, rounds: int) -> list[str]:
    """A row for each variant of BERT-base: attentions fused, and milliseconds for each size."""
    sites, paths = unfused(source), {name: source.with_name(f"{len(name)}_{source.name}") for name in TOOLS}
    for name, tool in TOOLS.items():
        if failure := attempt(tool, source, paths[name]):
            raise RuntimeError(f"{name}: {failure}")
    rows = {name: [name, f"{sites - unfused(path)} of {sites}"] for name, path in paths.items()}
    far = dict.fromkeys(TOOLS, 0.0)
    for size in SIZES:
        sessions = {name: Session(source if TOOLS[name] is with_runtime else path, size) for name, path in paths.items()}
        results = {name: session.output() for name, session in sessions.items()}
        wanted = next(iter(results.values()))
        for name, found in in_turns(sessions, rounds, clock=time.process_time).items():
            rows[name].append(f"{found.ms:.0f}")
            far[name] = max(far[name], float(np.abs(results[name] - wanted).max()))
    head = ["tool", "attentions fused", *(f"{batch} x {length}, ms" for batch, length in SIZES), "max. difference"]
    return [table(head, [[*row, f"{far[name]:.0e}"] for name, row in rows.items()])]


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
        f"# Compared on the CPU\n\nWritten by `python -m benchmarks.compared`. {versions}. float32.",
        "\n## Attentions fused in the bundled models\n",
        "An attention counts as fused where its Softmax is gone and ONNX Runtime loads the result.",
        "The pass of transformers is meant for graphs of its own exporter, and gets these as they are.\n",
        *fused,
        "\n## BERT-base\n",
        "Random weights, exported by dynamo at opset 18. Of eight entries seven are half padding.",
        "CPU time on one thread, medians of rounds in turns.\n",
        *measured,
        "",
    ]
    chosen.to.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
