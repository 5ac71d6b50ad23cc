"""Positions in the graph of a decoder: how many there can be at most, and whether all entries of a batch share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.masks.mask_terms import elements_of, factors_of, value_of
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.constants import attribute, constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.uses import sources

_TABLE_RANK = 2
_COUNTS = ("Range", "CumSum")
_KEEPS = REARRANGES | REPEATS | SLICES | CASTS | {"Identity"}
_LOOKS_UP = ("Gather", "GatherElements")


@dataclasses.dataclass(frozen=True)
class Counting:
    """The inputs of a decoder that positions may be made of."""

    tokens: ir.Value | None
    positions: frozenset[ir.Value]
    """Position ids."""
    masks: frozenset[ir.Value]
    """The mask, whose running sum is a position."""
    shared: frozenset[ir.Value]
    """Those with positions for all entries alike."""


def context_length(graph: ir.Graph, counting: Counting, facts: Facts) -> int | None:
    """The most positions for which each table that is read by position has a row; None where there is none."""
    firsts, found = _Firsts(counting, facts), list[int]()
    for node in graph:
        data, index = (*node.inputs, None)[:2] if is_standard(node, *_LOOKS_UP) else (None, None)
        dims = None if data is None or facts.dtype(data) == ir.DataType.BOOL else facts.dims(data)
        if data is None or not dims or index is None or not facts.rank(index):
            continue
        axis: int = attribute(node, "axis", 0)
        rows, first = dims[axis], firsts.of(index)
        if isinstance(rows, int) and first is not None and _is_fixed(data):
            found.append(rows - first)
    return min(found, default=None)


def _is_fixed(value: ir.Value) -> bool:
    """Whether the elements of a value are those of constants, in whatever order."""
    made = _made_of(value)
    return not any(
        (item.is_graph_input() and item.const_value is None) or is_standard(item.producer(), *_COUNTS) for item in made
    )


class _Firsts:
    """The numbers that values have for position 0, of those that count positions from there."""

    def __init__(self, counting: Counting, facts: Facts) -> None:
        self._counting, self._facts = counting, facts
        self._known: dict[ir.Value | None, int | None] = {None: None}

    def of(self, value: ir.Value | None) -> int | None:
        """The number of a value; None: it may be anything, as a clipped position, a distance, or a table's entry for one."""
        if value not in self._known:
            assert value is not None
            self._known[value] = self._read(value, value.producer())
        return self._known[value]

    def _read(self, value: ir.Value, node: ir.Node | None) -> int | None:
        if node is None:
            return 0 if value in self._counting.positions | self._counting.shared else None
        given = node.inputs[0] if node.inputs else None
        if given is None or is_standard(node, *_KEEPS) or (is_standard(node, "Gather") and not _is_fixed(given)):
            return self.of(given)
        if is_standard(node, "Range"):
            return self._number(given) or 0
        if is_standard(node, "CumSum"):
            of_mask = not _made_of(given).isdisjoint(self._counting.masks)
            return (0 if attribute(node, "exclusive", 0) else 1) if of_mask else None
        if is_standard(node, "Where", "Mul", "Max"):
            return max((first for item in node.inputs if (first := self.of(item)) is not None), default=None)
        return (
            self._moved(given, node.inputs[1], 1 if is_standard(node, "Add") else -1) if is_standard(node, "Add", "Sub") else None
        )

    def _moved(self, left: ir.Value, right: ir.Value | None, sign: int) -> int | None:
        """The number of a position plus or minus other numbers."""
        assert right is not None
        if sign == 1 and self.of(left) is None:
            left, right = right, left
        first = self.of(left)
        if first is None or self.of(right) is not None or _marks(_made_of(right), self._counting):
            return None
        return first + sign * (self._number(right) or 0)

    def _number(self, value: ir.Value) -> int | None:
        found = self._facts.number(value)
        return None if found is None else int(found)


def is_by_place(bias: Term, counting: Counting) -> bool:
    """Whether a bias differs by the places of rows and keys, padding counted, and by no positions of each entry."""
    own = counting.positions | counting.masks
    return bool(factors_of(bias)) and all(_made_of(value_of(item)).isdisjoint(own) for item in elements_of(bias))


def counts_alike(graph: ir.Graph, counting: Counting, facts: Facts) -> bool:
    """Whether a table is read, or an angle taken, at positions that all entries of a batch share."""
    if any(
        is_standard(node, "Slice") and _is_table(node.inputs[0]) and constant_tensor(node.inputs[1]) is None for node in graph
    ):
        return True
    counted = [found for index in _lookups(graph) if _counts(found := _made_of(index), counting, facts)]
    angles = [_made_of(node.inputs[0]) for node in graph if is_standard(node, "Cos") and node.inputs[0] is not None]
    counted += [found for found in angles if counting.tokens not in found and _marks(found, counting)]
    return any(found.isdisjoint(counting.positions | counting.masks) for found in counted)


def _lookups(graph: ir.Graph) -> Iterator[ir.Value]:
    """The places of rows that are gathered from tables of floats."""
    for node in graph:
        if is_standard(node, "Gather") and _is_table(node.inputs[0]) and node.inputs[1] is not None:
            yield node.inputs[1]


def _is_table(value: ir.Value | None) -> bool:
    """Whether a value is a constant with rows of floats."""
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == _TABLE_RANK


def _made_of(value: ir.Value) -> set[ir.Value]:
    """A value, and all that its elements are computed from; a size depends on no element."""
    return set(sources([value], lambda _, node: not is_standard(node, *ASKS_SHAPE)))


def _counts(found: set[ir.Value], counting: Counting, facts: Facts) -> bool:
    """Whether an index with these sources is a position: it is counted, and of neither tokens nor floats."""
    of_floats = any((dtype := facts.dtype(item)) is not None and dtype.is_floating_point() for item in found)
    return counting.tokens not in found and not of_floats and _marks(found, counting)


def _marks(found: set[ir.Value], counting: Counting) -> bool:
    """Whether a position, a range or a running sum is among the sources."""
    counted = any(is_standard(item.producer(), *_COUNTS) for item in found)
    return counted or not found.isdisjoint(counting.positions | counting.masks | counting.shared)
