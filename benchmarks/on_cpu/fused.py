"""Attentions that each tool fuses of the bundled models: those whose Softmax is gone when ONNX Runtime has loaded the result."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import functools
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import onnx
import onnxruntime
from torch import nn

from benchmarks.harness import Benchmark, Cells, Row, Setting, tried
from benchmarks.whole.spec import Whole
from benchmarks.whole.variants import write

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"
TOOLS = ("plain", "onnxruntime", "onnxscript", "transformers", "ours")
OPTIMIZER_TYPES = {"llama_past": "gpt2", "whisper_decoder": "bart"}
"""Model types of ONNX Runtime's optimizer for families that it does not know by their names."""


def unfused(model: pathlib.Path) -> int:
    """How many Softmax nodes a model has."""
    return sum(node.op_type == "Softmax" for node in onnx.load(model, load_external_data=False).graph.node)


@functools.cache
def fused(source: pathlib.Path, tool: str) -> int:
    """How many attentions a tool fuses."""
    family = source.name.partition("__")[0]
    made = write(Whole(family, (), (), (), nn.Identity, OPTIMIZER_TYPES.get(family, family)), tool, source, "cpu", "")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(loaded := made.path.with_suffix(".loaded.onnx"))
    onnxruntime.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])
    return unfused(source) - unfused(loaded)


def counts(sources: Sequence[pathlib.Path], setting: Setting) -> Cells:
    """Attentions of some models, and how many of them each tool fuses; one that fails says why."""
    del setting
    made = {tool: tried(lambda tool=tool: sum(fused(source, tool) for source in sources)) for tool in TOOLS}
    return {"attentions": str(sum(map(unfused, sources))), **made}


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each model, and one for all; left out are those that have an operator of attention."""
    found = [pathlib.Path(shutil.copy(path, setting.folder)) for path in sorted(BUNDLED.glob("*.onnx")) if unfused(path)]
    found = setting.some(found)
    for source in found:
        yield Row(source.stem, functools.partial(counts, [source]))
    yield Row("all", functools.partial(counts, found))


BENCHMARK = Benchmark(
    "Attentions fused in the bundled models",
    rows,
    "Models are given to every tool as they are; an attention is fused where its Softmax is gone when it is loaded.",
)
