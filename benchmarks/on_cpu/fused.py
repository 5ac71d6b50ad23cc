"""Attentions that each tool fuses of the bundled models: those whose Softmax is gone when ONNX Runtime has loaded the result."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import functools
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import onnx
import onnxruntime
from torch import nn

from benchmarks.exports import quiet
from benchmarks.harness import Benchmark, Race, Setting, one_line
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
    if made.error:
        raise RuntimeError(made.error)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(loaded := made.path.with_suffix(".loaded.onnx"))
    onnxruntime.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])
    return unfused(source) - unfused(loaded)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model, and one for all; left out are those that have an operator of attention."""
    quiet()
    sources = [pathlib.Path(shutil.copy(path, setting.folder)) for path in sorted(BUNDLED.glob("*.onnx")) if unfused(path)]
    sources = setting.some(sources)
    for source in sources:
        counts = {tool: functools.partial(fused, source, tool) for tool in TOOLS}
        yield Race(source.stem, {"attentions": functools.partial(unfused, source), **counts})
    sums = {tool: lambda tool=tool: sum(fused(source, tool) for source in sources) for tool in TOOLS}
    yield Race("all", {"attentions": lambda: sum(map(unfused, sources)), **sums})


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """The counts; a tool that fails fuses nothing."""
    del setting
    return {name: str(_counted(make)) for name, make in race.variants.items()}


def _counted(make: Any) -> int | str:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - a tool may fail in any way
        return one_line(error)


BENCHMARK = Benchmark(
    "Attentions fused in the bundled models",
    races,
    "Models are given to every tool as they are; an attention is fused where its Softmax is gone when it is loaded.",
    measure,
)
