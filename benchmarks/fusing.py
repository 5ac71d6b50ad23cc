"""Speed and memory of fusing, beside the other tools: `python -m benchmarks.fusing [--sizes 12,24] [--only small] [--to PAGE]`.

Whole commands are measured, start of the interpreter and imports included, one at a time and taking turns. Their outputs are
examined, too: a tool that does nothing would be the fastest. The decoder is a Llama of transformers with random weights: rotary
embedding, grouped keys and values, causal and padding mask. `small` is narrow, so that its file holds mostly graph. `large` has
the width of a 1.1 B model; its weights are never made: they are a hole in a data file, which takes no room on the disk and reads
as zeros.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from benchmarks.harness import Benchmark, Cells, Row, Setting, command, printed, tried
from benchmarks.sessions import Bound
from benchmarks.whole.exports import module_of, strip
from models.adapters import Flat, logits
from models.exporters import export_module
from models.recipe import Recipe
from models.recipes_text import GROUPED, IDS, MASK, model

_ROOT = str(pathlib.Path(__file__).parents[1])
EXPORTERS = {"ts17": ("TorchScript, opset 17", "eager"), "dyn18": ("dynamo, opset 18", "sdpa")}
LAYERS = ((12,), (24,), (48,), (96,), (2,))
PEER_REPEATS, SLOW = 2, 20.0
"""Runs of other tools, and the seconds after which another is not run a second time."""
_OPTIMIZER = "-m onnxruntime.transformers.optimizer --input MODEL --output OUTPUT --model_type"
TOOLS = {
    "attnfuse": "-m onnx_attnfuse_cli optimize MODEL -o OUTPUT --verify none",
    "onnxscript": "-m benchmarks.by_onnxscript MODEL OUTPUT",
    "onnxruntime qwen3": f"{_OPTIMIZER} qwen3 SHAPE",
    "onnxruntime gpt2": f"{_OPTIMIZER} gpt2 SHAPE",
}
"""What follows the interpreter; ours first."""
SHAPES = {
    "small": "--num_heads 4 --hidden_size 64",
    "large": "--num_heads 32 --hidden_size 2048 --use_external_data_format",
}
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1000},
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model that every tool is given."""

    exporter: str
    layers: int
    size: str

    def __str__(self) -> str:
        return f"{self.layers} layers, {EXPORTERS[self.exporter][0]}, {self.size}"

    def module(self) -> Any:
        """A Llama whose logits are a function of ids and mask; parameters of the large one are memory that is not written."""
        more = {"num_hidden_layers": self.layers, "max_position_embeddings": 128}
        source = "LlamaForCausalLM", "LlamaConfig", GROUPED | SIZES[self.size] | more, EXPORTERS[self.exporter][1]
        torch.manual_seed(0)
        build = functools.partial(Flat, names=("input_ids", "attention_mask"), select=logits, use_cache=False)
        return build(model(*source)).eval() if self.size == "small" else module_of(lambda: build(model(*source)), "float32")

    def built(self, folder: pathlib.Path) -> pathlib.Path:
        """The model, exported once with dynamic batch and length, and kept in a folder of its own."""
        path = folder.absolute() / f"decoder_{self.size}_{self.layers}_{self.exporter}" / "model.onnx"
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        module, part = self.module(), path.with_suffix(".part")
        example = {"input_ids": torch.arange(20).reshape(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
        with contextlib.redirect_stdout(io.StringIO()):
            self._export(module, example, part)
        return part.replace(path)

    def _export(self, module: Any, example: dict[str, torch.Tensor], part: pathlib.Path) -> None:
        if self.size == "small":
            recipe = Recipe("llama", lambda attention: module, (IDS, MASK), ("logits",))
            export_module(recipe, module, example, self.exporter, part, dynamic=frozenset(["batch", "seq"]))
            return
        shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
        options: dict[str, Any] = {"input_names": list(example), "dynamic_shapes": ((shape, shape),)}
        program: Any = torch.onnx.export(module, tuple(example.values()), dynamo=True, opset_version=18, **options)
        size = strip(program.model, "model", {name for name, _ in module.named_parameters(remove_duplicate=False)})
        with part.with_name("model.onnx.data").open("wb") as file:
            file.truncate(size)
        ir.save(program.model, part)


def outcome(case: Case, path: pathlib.Path, output: pathlib.Path) -> Cells:
    """What a tool fused, whether the file loads, and how far results are from the model's."""
    counts = collections.Counter(node.op_type for node in onnx.load(output, load_external_data=False).graph.node)
    fused = {name: count for name, count in sorted(counts.items()) if name.endswith("Attention")}
    words = ", ".join(f"{count} {name}" for name, count in fused.items())
    found = {"sites fused": f"{sum(fused.values())} of {case.layers} ({words})"}
    if case.size == "large":
        return {**found, "loads": tried(lambda: "yes" if plain_session(output) else "no")}
    mask = np.ones((2, 12), np.int64)
    mask[1, 9:] = 0  # the second of two sequences is padded at its end
    feeds = {"input_ids": np.random.default_rng(0).integers(0, 1000, mask.shape), "attention_mask": mask}
    ours, theirs = (Bound(item, Setting("cpu"), feeds).output() for item in (output, path))
    return {**found, "loads": "yes", "max. difference": f"{np.abs(ours - theirs).max():.1e}"}


def plain_session(path: pathlib.Path) -> onnxruntime.InferenceSession:
    """A session that leaves graph and weights as they are in the file, as a large model would be copied otherwise."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def ran(case: Case, tool: str, setting: Setting, output: pathlib.Path) -> dict[str, Any]:
    """What a run of a tool took; outputs are beside the model, where its weights are."""
    path = case.built(setting.folder)
    given = {"MODEL": [str(path)], "OUTPUT": [str(output)], "SHAPE": SHAPES[case.size].split()}
    words = [item for word in TOOLS[tool].split() for item in given.get(word, [word])]
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, [_ROOT, *sys.path[1:]]))}
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        return json.loads(printed("benchmarks.metered", scratch, setting.seconds, sys.executable, *words, environment=paths))


@functools.cache
def measured(case: Case, setting: Setting) -> dict[str, Cells]:
    """The cells of all tools, taking turns on one model."""
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in TOOLS}
    path, ours = case.built(setting.folder), next(iter(TOOLS))
    outputs = {tool: path.with_name(f"output_{place}.onnx") for place, tool in enumerate(TOOLS)}
    for turn in range(1 if setting.quick else setting.rounds):
        for tool, before in runs.items():
            if tool == ours or (turn < PEER_REPEATS and all(item["status"] == "ok" and item["wall"] < SLOW for item in before)):
                before.append(ran(case, tool, setting, outputs[tool]))
    found: dict[str, Cells] = {}
    middle = {
        tool: {key: statistics.median_low(item[key] for item in took) for key in ("wall", "cpu", "mb")}
        for tool, took in runs.items()
    }
    for tool, took in middle.items():
        status, more = runs[tool][0]["status"], "> " * (runs[tool][0]["status"] == "stopped")
        ratios = {key: f"{more}{took[key] / middle[ours][key]:.1f}" * (tool != ours) for key in ("wall", "cpu")}
        figures = {
            "wall s": f"{more}{took['wall']:.2f}",
            "CPU s": f"{more}{took['cpu']:.2f}",
            "× wall": ratios["wall"],
            "× CPU": ratios["cpu"],
        }
        figures["peak MB"] = f"{took['mb']:.0f}"
        lost = {"sites fused": "–", "loads": runs[tool][0]["note"].replace("|", "/")}
        try:
            found[tool] = figures | (outcome(case, path, outputs[tool]) if status == "ok" else lost)
        except Exception as error:  # noqa: BLE001 - the runtime's error is the result
            found[tool] = figures | {"loads": f"no: {str(error).strip().splitlines()[0][:120]}"}
        for file in path.parent.glob(f"{outputs[tool].name}*"):
            file.unlink()
    return found


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each model and tool."""
    layers = [number for (number,) in setting.sizes_or(LAYERS)]
    cases = [Case(exporter, number, "small") for number in layers for exporter in EXPORTERS]
    with tempfile.TemporaryDirectory() as scratch:  # once unmeasured, so that none pays for compiling its modules
        for tool in TOOLS:
            ran(cases[0], tool, setting, pathlib.Path(scratch, "warm.onnx"))
    for case in (*cases, *(() if setting.quick else (Case("dyn18", 12, "large"),))):
        for tool in TOOLS:
            yield Row((str(case), tool), lambda setting, case=case, tool=tool: measured(case, setting)[tool])


NOTE = """\
`×` is how many times as long as the first tool, medians of runs in turns; others are stopped after `--seconds`, by default 400.

""" + "\n".join(f"- {tool}: `python {words}`" for tool, words in TOOLS.items())
BENCHMARK = Benchmark("Fusing: speed and memory", rows, NOTE, ("model", "tool"))
main = command("fusing", BENCHMARK, provider="cpu", rounds=3, seconds=400.0)

if __name__ == "__main__":
    main()
