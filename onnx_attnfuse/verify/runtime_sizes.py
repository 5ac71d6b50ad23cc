"""Lengths that no rule finds, found by running their nodes.

Where a shape hangs on content that cannot be read (padding up to a multiple, say), `Facts` only have a fresh symbol for it, which
may not be chosen freely: it follows from the sizes that may. So the light operators above the value that the symbol is an axis of
are cut out and run, which costs a session per symbol and model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.crash_guard import is_dangerous
from onnx_attnfuse.verify.inputs import InputCase, feeds
from onnx_attnfuse.verify.runtime import PieceSession, RuntimeRefusal
from onnx_attnfuse.verify.shape_solver import Values
from onnx_attnfuse.verify.subgraph import Subgraph, extract, is_fresh
from onnx_attnfuse.verify.submodel import Submodel
from onnx_attnfuse.verify.subprocess_runner import ProcessDied

_MAX_TRACED_ELEMENTS = 1 << 22
"""Elements of the largest tensor that is made to find a length."""
_MILD = InputCase("full", "normal", 1.0)


class _Traced:
    """A session that computes the shape of one value whose lengths are wanted."""

    def __init__(self, subgraph: Subgraph, opsets: Mapping[str, int], *, widened: bool) -> None:
        self.subgraph = subgraph
        self._model = Submodel(subgraph, opsets, {}, widened=widened, shapes=True)
        self._session = PieceSession(self._model.proto.SerializeToString())
        self._found: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}

    def shape(self, shapes: tuple[tuple[int, ...], ...], *, apart: bool) -> tuple[int, ...]:
        if shapes not in self._found:
            self._session.apart = apart
            result = self._session.run(self._model.results, feeds(self._model.slots, shapes, _MILD))[0]
            self._found[shapes] = tuple(int(length) for length in result)
        return self._found[shapes]


class Tracer:
    """Finds lengths in one graph; runs each value's part once per sizes."""

    def __init__(self, facts: Facts, opsets: Mapping[str, int]) -> None:
        self._facts = facts
        self._opsets = opsets
        self._traced: dict[ir.Value, _Traced | None] = {}

    def complete(self, values: Values, shapes: Sequence[Dims]) -> None:
        """Replaces the numbers of fresh symbols in `shapes` by those that follow from the others."""
        self._complete(values, shapes, set())

    def _complete(self, values: Values, shapes: Sequence[Dims], done: set[str]) -> None:
        for name in sorted({values.root(name) for shape in shapes for dim in shape for name in sizes.symbols(dim)} - done):
            origin = self._facts.origins.get(name)
            done.add(name)
            if origin is None or not is_fresh(name, self._facts):
                continue
            traced = self._part(origin[0])
            if traced is None:
                continue
            dims = [item.dims for item in traced.subgraph.inputs]
            self._complete(values, dims, done)
            self._take(values, name, origin[1], traced, dims)

    def _take(self, values: Values, name: str, axis: int, traced: _Traced, dims: Sequence[Dims]) -> None:
        lengths = tuple(tuple(sizes.evaluate(dim, values) for dim in shape) for shape in dims)
        negative = any(length < 0 for shape in lengths for length in shape)
        if negative or largest(traced.subgraph, self._facts, values) > _MAX_TRACED_ELEMENTS:
            return
        try:
            shape = traced.shape(lengths, apart=is_dangerous(traced.subgraph.nodes, self._facts, values))
        except (RuntimeRefusal, ProcessDied):
            return  # sizes that do not fit here are found out when the original refuses them
        if axis < len(shape):
            values[name] = shape[axis]

    def _part(self, value: ir.Value) -> _Traced | None:
        if value not in self._traced:
            self._traced[value] = self._made(value)
        return self._traced[value]

    def _made(self, value: ir.Value) -> _Traced | None:
        try:
            subgraph = extract((value,), (), self._facts)
            if not subgraph.nodes:
                return None
            dtypes = {item.dtype for item in subgraph.inputs} | {
                self._facts.dtype(output) for node in subgraph.nodes for output in node.outputs
            }
            return _Traced(subgraph, self._opsets, widened=ir.DataType.BFLOAT16 in dtypes)
        except (Refused, RuntimeRefusal):
            return None


def largest(subgraph: Subgraph, facts: Facts, values: Values) -> int:
    """Elements of the largest tensor in a piece, as far as shapes are known, weights left out."""
    prepared, read = subgraph.prepared(), subgraph.read()
    made = [value for node in subgraph.nodes for value in node.outputs if value not in prepared]
    inner = [found for value in made if (found := facts.dims(value)) is not None]
    shapes = [*(item.dims for item in subgraph.inputs if item.value in read - prepared), *inner]
    return max((sizes.evaluate(sizes.product(shape), values) for shape in shapes), default=0)
