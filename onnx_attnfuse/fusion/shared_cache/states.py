"""States of a decoder that are no keys and values: of convolutions and recurrences, each an input and an output."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE

State = tuple[ir.Value, ir.Value]
"""An input with the state before the new tokens, and the output with it after them."""
_CONVOLUTION, _RECURRENCE = 3, 4
"""The ranks of states (b, channels, positions) and (b, heads, keys, values)."""


@dataclasses.dataclass(frozen=True)
class States:
    """The states of a decoder, in the order of its layers."""

    convolutions: tuple[State, ...] = ()
    recurrences: tuple[State, ...] = ()


def read_states(graph: ir.Graph, cache: Collection[ir.Value], facts: Facts) -> States:
    """The states of a decoder: the output of a state is the one of its shape that the fewest other states reach.

    Args:
        graph: The decoder.
        cache: Inputs and outputs with keys and values.
        facts: Its facts.

    Returns:
        No states where the output of one is in doubt.
    """
    states = [item for item in graph.inputs if item not in cache and item.const_value is None and _is_state(item, facts)]
    reached = _reached(graph, states)
    outputs = [item for item in graph.outputs if item not in cache]
    pairs: list[State] = []
    for state in states:
        alike = [item for item in outputs if state in reached[item] and _kind(item, facts) == _kind(state, facts)]
        alike.sort(key=lambda item: len(reached[item]))
        if not alike or (len(alike) > 1 and len(reached[alike[0]]) == len(reached[alike[1]])):
            return States()
        pairs.append((state, alike[0]))
    if len({after for _, after in pairs}) < len(pairs):
        return States()
    pairs.sort(key=lambda pair: len(reached[pair[1]]))
    convolutions, recurrences = (
        tuple(pair for pair in pairs if facts.rank(pair[0]) == rank) for rank in (_CONVOLUTION, _RECURRENCE)
    )
    return States(convolutions, recurrences)


def _is_state(value: ir.Value, facts: Facts) -> bool:
    """Whether an input has the shape of a state: one for each entry, of a size that does not change."""
    dims = facts.dims(value) or ()
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    return is_float and len(dims) in (_CONVOLUTION, _RECURRENCE) and all(isinstance(dim, int) for dim in dims[1:])


def _kind(value: ir.Value, facts: Facts) -> object:
    return facts.dims(value), facts.dtype(value)


def _reached(graph: ir.Graph, states: Collection[ir.Value]) -> dict[ir.Value | None, set[ir.Value]]:
    """The states that each value is computed from."""
    found = collections.defaultdict[ir.Value | None, set[ir.Value]](set, {state: {state} for state in states})
    for node in graph:
        inner = [value for branch in subgraphs(node) for item in branch.all_nodes() for value in item.inputs]
        given = () if is_standard(node, *ASKS_SHAPE) else (*node.inputs, *inner)
        sources = set[ir.Value]().union(*(found[value] for value in given if value in found))
        found.update(dict.fromkeys(node.outputs, sources))
    return found
