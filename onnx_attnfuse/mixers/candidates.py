"""The sequence mixers of one graph that are no softmax attention, each by its structure.

    found = find_mixers(graph, facts)

- A *recurrence* adds an outer product to a state that a decay may have been multiplied by. The state comes from an input of the
  graph and goes to an output of the same shape, or a Scan or Loop carries it, or one token after the other is unrolled.
- A *chunked recurrence* multiplies by exponentials of running sums: decays between two tokens.
- A *causal convolution* is one of each channel by itself, after a state that it is appended to, or after zeros.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, subgraphs
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import (
    CASTS,
    ELEMENTWISE,
    GATHERS,
    REARRANGES,
    REDUCTIONS,
    REPEATS,
    SLICES,
    is_standard,
    plain_domain,
)
from onnx_attnfuse.graph.uses import before, reached, sources

MixerKind = Literal["recurrence", "unrolled recurrence", "recurrence in a loop", "chunked recurrence", "causal convolution"]
_LEAST_RANK = 3
"""The axes of a state: batch and the two of a matrix at least."""
_MOST = 4096
"""Nodes that a walk looks at."""
_LIGHT = (ELEMENTWISE | REARRANGES | REPEATS | SLICES | GATHERS | CASTS | REDUCTIONS).union(
    ["CumSum", "Pad", "Softplus", "Trilu"]
)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """One sequence mixer that is no softmax attention."""

    kind: MixerKind
    node: ir.Node
    """The node that updates the state, or computes decays, or convolves."""
    state: ir.Value | None = None
    """The state before it, where that is an input of the graph."""


def find_mixers(graph: ir.Graph, facts: Facts) -> list[Mixer]:
    """All mixers of a graph, in its order; those in the body of a loop are at the loop."""
    found = [*_loops(graph, facts), *_recurrences(graph, facts), *_chunked(graph, facts), *_convolutions(graph, facts)]
    places = {node: place for place, node in enumerate(graph)}
    return sorted(found, key=lambda item: places[item.node])


def _loops(graph: ir.Graph, facts: Facts) -> Iterator[Mixer]:
    """Scans and Loops whose body updates what it carries."""
    for node in graph:
        first = {"Scan": 0, "Loop": 2}.get(node.op_type)
        if first is None or plain_domain(node.domain):  # nothing but where its states are is asked of it
            continue
        for body in subgraphs(node):
            count = len(node.inputs) - (first or int(attribute(node, "num_scan_inputs", 0)))
            carried = list(body.inputs)[first : first + count]
            results = list(body.outputs)[1 if first else 0 :]
            states = _updates(body, facts)
            if any(states.get(through(result)) is state for state, result in zip(carried, results, strict=False)):
                yield Mixer("recurrence in a loop", node)


def _recurrences(graph: ir.Graph, facts: Facts) -> Iterator[Mixer]:
    """Sums with an outer product: of an input that becomes an output, or the last of several."""
    states = _updates(graph, facts)
    inner, outputs = set(states.values()), {through(value) for value in graph.outputs}
    for value, state in states.items():
        node, dims = value.producer(), facts.dims(value)
        if node is None or dims is None or len(dims) < _LEAST_RANK or facts.dtype(value) not in FLOATS or value in inner:
            continue
        if state in states:
            yield Mixer("unrolled recurrence", node)
        elif state in graph.inputs and value in outputs and facts.dims(state) == dims:
            yield Mixer("recurrence", node, state)


def _updates(graph: ir.Graph, facts: Facts) -> dict[ir.Value, ir.Value]:
    """The sums of a state, times a factor or not, and an outer product; each with the state before it."""
    found: dict[ir.Value, ir.Value] = {}
    for node in graph:
        if not is_standard(node, "Add"):
            continue
        for kept, added in (node.inputs, node.inputs[::-1]):
            if kept is None or added is None or not _is_outer(through(added), facts):
                continue
            faded = through(kept).producer()
            items = faded.inputs if is_standard(faded, "Mul") else [kept]
            begins = [state for state in map(through, filter(None, items)) if _begins(state, found, facts)]
            if begins:
                found[node.outputs[0]] = begins[0]
    return found


def _begins(value: ir.Value, updates: Container[ir.Value], facts: Facts) -> bool:
    """Whether a state may begin or go on at a value: an input, zeros, or another update."""
    return (value.producer() is None and value.const_value is None) or value in updates or facts.number(value) == 0


def _is_outer(value: ir.Value, facts: Facts) -> bool:
    """Whether a value is a product of two that vary along other axes."""
    node, dims = value.producer(), _dims(value, facts)
    if is_standard(node, "MatMul") and node.inputs[0] is not None:
        return (_dims(node.inputs[0], facts) or (0,))[-1] == 1
    if not is_standard(node, "Mul") or dims is None:
        return False
    operands = [through(item) for item in node.inputs if item is not None]
    shapes = [_dims(item, facts) for item in operands]
    ones = [
        {axis for axis, dim in enumerate(shape) if dim == 1 and dims[axis] != 1}
        for shape in shapes
        if shape is not None and len(shape) == len(dims)
    ]
    if len(ones) < len(shapes) or ones[0] & ones[1]:
        return False
    return all(ones) or (any(ones) and any(_is_outer(item, facts) for item in operands))


def _dims(value: ir.Value, facts: Facts) -> Sequence[object] | None:
    """The shape of a value, in the body of a Scan as it is annotated."""
    return facts.dims(value) or (None if value.shape is None else list(value.shape))


def through(value: ir.Value) -> ir.Value:
    """A value before what leaves it as it is."""
    return before(value, "Identity", "Cast")


def _chunked(graph: ir.Graph, facts: Facts) -> Iterator[Mixer]:
    """Exponentials of running sums: one mixer for those that come from one value."""
    known: list[set[ir.Value]] = []
    for node in graph:
        if not is_standard(node, "CumSum") or facts.dtype(node.outputs[0]) not in FLOATS or not _fades(node):
            continue
        above = _sources(node)
        overlapping = [other for other in known if other & above]
        if not overlapping:
            yield Mixer("chunked recurrence", node)
        known = [other for other in known if not other & above] + [above.union(*overlapping)]


def _fades(node: ir.Node) -> bool:
    """Whether an exponential of a running sum is multiplied by something."""

    def after(way: tuple[ir.Value, bool]) -> Iterator[tuple[ir.Value, bool]]:
        users = (user for user, _ in way[0].uses() if is_standard(user, *_LIGHT))
        return ((user.outputs[0], way[1] or user.op_type == "Exp") for user in users)

    ways = itertools.islice(reached([(node.outputs[0], False)], after), _MOST)
    return any(is_standard(user, "MatMul", "Einsum", "Mul") for value, grown in ways if grown for user, _ in value.uses())


def _sources(node: ir.Node) -> set[ir.Value]:
    """The values that a running sum is computed from by light operators, constants aside."""
    above = itertools.islice(sources(node.outputs, lambda _, maker: is_standard(maker, *_LIGHT)), _MOST)
    return {value for value in above if value.const_value is None and not is_standard(value.producer(), *_LIGHT)}


def _convolutions(graph: ir.Graph, facts: Facts) -> Iterator[Mixer]:
    """Convolutions of each channel by itself over inputs appended to a state, or to as many zeros as the kernel is long."""
    for node in graph:
        if not is_standard(node, "Conv") or node.inputs[0] is None or node.inputs[1] is None:
            continue
        weight = facts.dims(node.inputs[1])
        if weight is None or len(weight) != _LEAST_RANK or weight[1] != 1 or attribute(node, "group", 1) != weight[0]:
            continue
        size, before = weight[2], through(node.inputs[0]).producer()
        if not isinstance(size, int) or size == 1:
            continue
        seen = (size - 1) * attribute(node, "dilations", [1])[0]
        state = before.inputs[0] if is_standard(before, "Concat") and attribute(before, "axis") in {-1, 2} else None
        if state is not None and state in graph.inputs:
            kept = (facts.dims(state) or (0,))[-1]
            if isinstance(kept, int) and kept in {seen, seen + 1}:
                yield Mixer("causal convolution", node, state)
        elif _follows_zeros(node, before, seen):
            yield Mixer("causal convolution", node)


def _follows_zeros(node: ir.Node, before: ir.Node | None, seen: int) -> bool:
    """Whether as many zeros as a result sees of earlier elements come before a sequence."""
    if attribute(node, "pads", [0, 0])[0] == seen:
        return True
    pads = before.inputs[1].const_value if is_standard(before, "Pad") and before.inputs[1] is not None else None
    return pads is not None and pads.numpy().tolist() in ([0, 0, seen, 0, 0, 0], [seen, 0])
