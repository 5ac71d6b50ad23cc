"""Attention of models in training: how much plain ORTModule and ours fuse, and how exact ours is.

    PYTHONPATH=. .venv-training/bin/python benchmarks/training_models.py

Plain ORTModule fuses on CUDA only; its two patterns are run on the same gradient graphs here and counted.
"""

from __future__ import annotations

import os

os.environ |= {"ORTMODULE_USE_EFFICIENT_ATTENTION": "1", "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE", "ATTNFUSE_DEBUG": "0"}

import dataclasses
import pathlib
import warnings

import onnx
import torch
from onnxruntime.training.ortmodule import register_graph_optimizer
from onnxruntime.training.ortmodule.graph_optimizers._aten_attn import optimize_graph_for_aten_efficient_attention

from onnx_attnfuse.training import ORTModule, Policy
from onnx_attnfuse.training.kernels.kernel import TrainingDevice
from onnx_attnfuse.training.pipeline import fuse_graph
from onnx_attnfuse.training.serializing import read_graph
from tests.training.models import PADDINGS, SPELLINGS, inputs, model
from tests.training.modules import CASES
from tests.training.ortmodule.steps import apart, step

RESULTS = pathlib.Path(__file__).parent / "results" / "training_models.md"
_OPSET = 17
_GPU = TrainingDevice("cuda", 90)


class Graphs:
    """Keeps the gradient graph that was built last, as it was."""

    def __init__(self) -> None:
        self.last = onnx.GraphProto()
        register_graph_optimizer(priority=9)(self)

    def __call__(self, graph: onnx.GraphProto) -> None:
        self.last = onnx.GraphProto()
        self.last.CopyFrom(graph)

    def by_onnx_runtime(self) -> int:
        """How many sites onnxruntime's own patterns take."""
        graph = onnx.GraphProto()
        graph.CopyFrom(self.last)
        optimize_graph_for_aten_efficient_attention(graph)
        called = [onnx.helper.get_node_attr_value(node, "operator") for node in graph.node if node.op_type == "ATen"]
        return called.count(b"_efficient_attention_forward")

    def on_a_gpu(self) -> tuple[int, int]:
        """How many sites there are, and how many ours takes on a GPU in float32."""
        report = fuse_graph(read_graph(self.last, _OPSET), _GPU, Policy(), check_masks=False)
        return len(report.sites), report.fused


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, padded in one way or in all."""

    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def row(graphs: Graphs, name: str, spelling: str, dropout: float, masked: bool) -> Row:
    """What is fused, and without dropout how far result and gradients are from PyTorch's at worst."""
    module = ORTModule(model(name, spelling, dropout))
    worst = [0.0, 0.0]
    paddings = [item for item in PADDINGS if item != "none"] if masked else ["none"]
    given = "attention_mask" if masked else ""
    for padding in paddings if not dropout else paddings[:1]:
        named = inputs(name, padding)
        try:
            found = step(module, named)
        except RuntimeError:
            return Row((name, spelling, given, f"{dropout:g}", "ORTModule cannot train it", "", "", "", "", ""))
        if not dropout:
            worst = [max(*pair) for pair in zip(worst, apart(found, step(model(name, spelling), named)), strict=True)]
    sites, on_gpu = graphs.on_a_gpu()
    errors = ["", ""] if dropout else [f"{item:.0e}" for item in worst]
    fused = [f"{graphs.by_onnx_runtime()}", f"{on_gpu}", f"{module.attention_reports[0].fused}"]
    return Row((name, spelling, given, f"{dropout:g}", f"{sites}", *fused, *errors))


def behaviours() -> list[str]:
    """What becomes of modules that are not trained as a whole, or not trained."""
    lines: list[str] = []
    nothing = ORTModule(torch.nn.Linear(4, 4))
    nothing(torch.ones(2, 4)).sum().backward()
    lines.append(f"* nothing to fuse: {len(nothing.attention_reports[0].sites)} sites, the graph is handed back as it came")
    case = CASES["frozen_queries_and_keys"]
    frozen = ORTModule(case.module())
    errors = apart(step(frozen, case.inputs()), step(case.module(), case.inputs()))
    lines.append(
        f"* queries and keys frozen: {frozen.attention_reports[0].fused} of 1 fused, the rest's gradients {errors[1]:.0e} off"
    )
    case = CASES["plain"]
    evaluated = ORTModule(case.module()).eval()
    with torch.no_grad():
        off = float((evaluated(**case.inputs()) - case.module()(**case.inputs())).abs().max())
    lines.append(
        f"* eval mode: {len(evaluated.attention_reports)} training graphs, so nothing is fused; the result is {off:.0e} off"
    )
    shapes = ORTModule(model("bert", "eager"))
    step(shapes, inputs("bert", "right"))
    named = inputs("bert", "left", 5, 19)
    errors = apart(step(shapes, named), step(model("bert", "eager"), named))
    count = len(shapes.attention_reports)
    lines.append(f"* a second forward of other batch and length: {count} training graph for both, gradients {errors[1]:.0e} off")
    return lines


def main() -> None:
    warnings.filterwarnings("ignore")
    graphs = Graphs()
    head = "model | attention | given | dropout | sites | plain ORTModule | ours, H100 | ours, CPU | result off | gradients off"
    lines = [f"| {head} |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, spelling in SPELLINGS:
        for masked in (True, False) if name != "vit" else (False,):
            lines += [str(row(graphs, name, spelling, dropout, masked)) for dropout in (0.0, 0.1)]
    text = [
        "# Attention of models in ORTModule",
        "",
        "onnxruntime-training 1.19.2, torch 2.4.1, transformers 4.48.3, two layers each, float32; fused means forward and",
        "backward together. `plain ORTModule` has `ORTMODULE_USE_EFFICIENT_ATTENTION=1`, on CUDA; on the CPU it fuses",
        "nothing. Errors are those on the CPU, where all of it ran, relative to the largest value, at worst over padding",
        "on the right, on the left, holes, none, and one entry of nothing but padding. The CPU's kernel has no dropout",
        "and gives no gradient of a bias; GPT-2's eager spelling replaces some scores and adds a mask to others.",
        "ORTModule cannot differentiate `scaled_dot_product_attention` with dropout.",
        "",
        *lines,
        "",
        *behaviours(),
    ]
    RESULTS.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
