"""Every fact is true: what is inferred without running a graph is compared with what a run of it gives."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.known import Content, Scalar
from onnx_attnfuse.graph.sizes import Dim, Size
from tests.recorded import BUNDLED, Array, cases, name_of, run, with_outputs


class Recorded:
    """One run of a model, and what each symbol was in it."""

    def __init__(self, model: ir.Model, facts: Facts, arrays: dict[str, Array]) -> None:
        self.facts = facts
        self.arrays = arrays
        self.values = [value for value in model.graph.inputs if value.name in arrays]
        self.values += [value for node in model.graph for value in node.outputs if value.name in arrays]
        self.symbols = {
            name: arrays[value.name].shape[axis] for name, (value, axis) in facts.origins.items() if value.name in arrays
        }

    def number(self, item: Dim | Scalar) -> float:
        """What an inferred size or number was in this run."""
        return sizes.evaluate(item, self.symbols) if isinstance(item, Size) else float(item or 0)

    def wrong_dims(self) -> list[str]:
        """Values whose shape is not the inferred one."""
        wrong: list[str] = []
        for value in self.values:
            dims = self.facts.dims(value)
            array = self.arrays[value.name or ""]
            if dims is not None and tuple(map(self.number, dims)) != array.shape:
                wrong.append(f"{value.name}: inferred {dims}, got {array.shape}")
        return wrong

    def wrong_types(self) -> list[str]:
        """Values whose element type is not the inferred one."""
        wrong: list[str] = []
        for value in self.values:
            dtype, array = self.facts.dtype(value), self.arrays[value.name or ""]
            if dtype is not None and dtype.numpy() != array.dtype:
                wrong.append(f"{value.name}: inferred {dtype}, got {array.dtype}")
        return wrong

    def wrong_contents(self) -> list[str]:
        """Values whose elements are not the inferred ones."""
        wrong: list[str] = []
        for value in self.values:
            content, array = self.facts.content(value), self.arrays[value.name or ""]
            if content is not None and not self._is(content, array):
                wrong.append(f"{value.name}: inferred {content}, got {array}")
        return wrong

    def _is(self, content: Content, array: Array) -> bool:
        items = content if isinstance(content, tuple) else (content,)
        if array.ndim != isinstance(content, tuple) or array.size != len(items):
            return False
        known = [(self.number(item), element) for item, element in zip(items, array.flat, strict=True) if item is not None]
        return all(np.isclose(number, element) for number, element in known)


def recorded(path: pathlib.Path, case: str) -> Recorded:
    proto = onnx.load(path)
    names = [name for node in proto.graph.node for name in node.output if name]
    feeds = cases(path)[case]
    arrays = run(with_outputs(proto, names), feeds) | feeds
    model = ir.from_proto(proto)
    return Recorded(model, Facts(model.graph), arrays)


EVERY_CASE = [
    pytest.param(path, case, id=f"{name_of(path)}-{case}")
    for path in BUNDLED
    for case in cases(path)
    if case in {"example", "resized", "step"}
]


@pytest.mark.parametrize(("path", "case"), EVERY_CASE)
def test_every_fact_about_a_bundled_model_is_true(path: pathlib.Path, case: str) -> None:
    found = recorded(path, case)
    assert not found.wrong_dims()
    assert not found.wrong_types()
    assert not found.wrong_contents()
