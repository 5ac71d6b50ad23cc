"""How a decoder counts positions: the tables that it reads by them, and whether each entry of a batch has its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE

_TABLE_RANK = 2


@dataclasses.dataclass(frozen=True)
class Counting:
    """The inputs of a decoder that positions may be made of."""

    tokens: ir.Value | None
    by_entry: frozenset[ir.Value]
    """Those with numbers for each entry: position ids, and the mask."""
    shared: frozenset[ir.Value]
    """Those with numbers for all entries alike."""


def context_length(graph: ir.Graph, counting: Counting, facts: Facts) -> int | None:
    """The rows of the smallest table that is read by position; None where there is none."""
    read = [table.shape[0] for table, index in _lookups(graph) if facts.rank(index) and _counts(_sources(index), counting, facts)]
    return min((rows for rows in read if isinstance(rows, int)), default=None)


def counts_alike(graph: ir.Graph, counting: Counting, facts: Facts) -> bool:
    """Whether a table is read, or an angle taken, at positions that all entries of a batch share."""
    if any(is_standard(node, "Slice") and _table(node.inputs[0]) and constant_tensor(node.inputs[1]) is None for node in graph):
        return True
    indices = [_sources(index) for _, index in _lookups(graph)]
    counted = [found for found in indices if _counts(found, counting, facts)]
    angles = [_sources(node.inputs[0]) for node in graph if is_standard(node, "Cos") and node.inputs[0] is not None]
    counted += [found for found in angles if counting.tokens not in found and _marks(found, counting)]
    return any(found.isdisjoint(counting.by_entry) for found in counted)


def _lookups(graph: ir.Graph) -> Iterator[tuple[ir.TensorProtocol, ir.Value]]:
    """The tables of floats that rows are gathered from, with the index."""
    for node in graph:
        table = _table(node.inputs[0]) if is_standard(node, "Gather") else None
        if table is not None and node.inputs[1] is not None:
            yield table, node.inputs[1]


def _table(value: ir.Value | None) -> ir.TensorProtocol | None:
    """A constant with rows of floats."""
    tensor = None if value is None else constant_tensor(value)
    return tensor if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == _TABLE_RANK else None


def _sources(value: ir.Value) -> set[ir.Value]:
    """A value, and all that its elements are computed from; a size depends on no element."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        node = item.producer()
        if node is not None and not is_standard(node, *ASKS_SHAPE):
            pending += [given for given in node.inputs if given is not None]
    return seen


def _counts(found: set[ir.Value], counting: Counting, facts: Facts) -> bool:
    """Whether an index with these sources is a position: it is counted, and of neither tokens nor floats."""
    of_floats = any((dtype := facts.dtype(item)) is not None and dtype.is_floating_point() for item in found)
    return counting.tokens not in found and not of_floats and _marks(found, counting)


def _marks(found: set[ir.Value], counting: Counting) -> bool:
    """Whether a position, a range or a running sum is among the sources."""
    nodes = (item.producer() for item in found)
    counted = any(node is not None and is_standard(node, "Range", "CumSum") for node in nodes)
    positions = counting.by_entry | counting.shared
    return counted or not found.isdisjoint(positions)
