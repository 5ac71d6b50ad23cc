"""Which axes of a value run over batch entries and positions, so that its rows are tokens.

Marks say it for each axis: `b`, `s`, both joined (`bs`, `sb`), or nothing for channels. In packed form the marked axes become one
that runs over the tokens that are no padding, in front of the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, refined
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, upward
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.sizes import Dim

Marks: TypeAlias = tuple[str, ...]
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The sizes of the batch that is packed."""

    facts: Facts
    batch: Dim
    length: Dim
    opset: int

    def size(self, mark: str) -> Dim:
        """The length of a marked axis."""
        return sizes.product({"b": self.batch, "s": self.length}[letter] for letter in mark)

    def is_full(self, value: ir.Value, marks: Marks) -> bool:
        """Whether a value has every token, rather than one for all entries or positions."""
        dims = self.facts.dims(value)
        return (
            dims is not None
            and len(dims) == len(marks)
            and all(not m or d == self.size(m) for m, d in zip(marks, dims, strict=True))
        )

    def fits(self, value: ir.Value, marks: Marks) -> bool:
        """Whether a value broadcasts to every token."""
        dims = self.facts.dims(value)
        if dims is None or len(dims) > len(marks):
            return False
        return all(
            not mark or dim in {1, self.size(mark)} for mark, dim in zip(marks[len(marks) - len(dims) :], dims, strict=True)
        )


def count_of(packed: ir.Value, facts: Facts) -> Dim:
    """How many tokens a packed value has."""
    dims = facts.dims(packed)
    assert dims
    return dims[0]


def others(marks: Marks, items: Sequence[_Item]) -> tuple[_Item, ...]:
    """The items, one for each axis, that belong to axes of channels."""
    return tuple(item for mark, item in zip(marks, items, strict=True) if not mark)


def read_marks(axes: Axes, batch: Axis, rows: Axis) -> Marks | None:
    """The marks of a layout; None if its tokens share an axis with something else, or it has not all of them."""
    known = {"b": leaves(batch), "s": leaves(rows), "bs": leaves((*batch, *rows)), "sb": leaves((*rows, *batch))}
    marked = set(known["bs"])
    found: list[str] = []
    for axis in refined(axes):
        mark = "" if marked.isdisjoint(axis) else next((name for name, parts in known.items() if axis == parts), None)
        if mark is None:
            return None
        found.append(mark)
    return tuple(found) if sorted("".join(found)) == ["b", "s"] else None


def as_axes(marks: Marks, dims: Dims, tokens: Tokens) -> tuple[Axes, Factor, Factor]:
    """A layout with these marks, and its factors for batch entries and positions."""
    letters = {"b": Factor(tokens.batch), "s": Factor(tokens.length)}
    axes: list[Axis] = []
    for mark, dim in zip(marks, dims, strict=True):
        axes.append(tuple(letters[letter] for letter in mark) if mark else () if dim == 1 else (Factor(dim),))
    return tuple(axes), letters["b"], letters["s"]


def through(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Marks | None:
    """The marks at the other side of a view, whose output or first input `value` is."""
    dims = tokens.facts.dims(value)
    if dims is None or len(dims) != len(marks):
        return None
    axes, batch, rows = as_axes(marks, dims, tokens)
    found = upward(IndexedValue(value, axes), tokens.facts) if value in node.outputs else downward(node, axes, tokens.facts)
    return None if found is None else read_marks(found.axes, (batch,), (rows,))
