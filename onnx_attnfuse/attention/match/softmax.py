"""Softmax operators, the maxima subtracted in front of them, and weights divided by their own sum after them.

A maximum that is one number for all keys changes nothing. A sum is read in normal form, guarded or not:

    Softmax ── Mul(mask) ─┬─────────────── Div ── ·V
                          └ ReduceSum ─────┘            the sum as it is, + 1e-13, max(·, 1e-9), or where(· > 0, ·, 1)

jax2onnx writes it for every mask, and hand-written masked softmaxes do. Rows of which nothing is left are NaN, or 0 where the sum
is kept from being 0.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, upward, varies_along
from onnx_attnfuse.attention.match.normal_form import Reading, nodes_between
from onnx_attnfuse.attention.match.steps import Renormalized, Shifted
from onnx_attnfuse.certify.arrays import axes_of
from onnx_attnfuse.certify.execution import UNKNOWN
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import FALSE, Term, polynomial, substitute, truth, walk
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REDUCTIONS

_ONE_AXIS_SINCE = 13


@dataclasses.dataclass(frozen=True)
class Softmax:
    """A softmax over one axis."""

    node: ir.Node
    """The node it is known by."""
    scores: ir.Value
    weights: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]
    sink: ir.Value | None = None
    """One more score in each row, whose weight is dropped."""
    is_gated: bool = False
    """The weights are multiplied by the share that a sink leaves, so that a row of -inf is NaN."""


def find_softmax(node: ir.Node, facts: Facts, opset: int) -> Softmax | None:
    """Reads `node` as a softmax, or returns None."""
    if not is_standard(node, "Softmax") or not node.inputs or node.inputs[0] is None:
        return None
    axis = softmax_axis(node, facts, opset)
    return None if axis is None else Softmax(node, node.inputs[0], node.outputs[0], axis, (node,))


def softmax_axis(node: ir.Node, facts: Facts, opset: int) -> int | None:
    """The one axis that a Softmax or LogSoftmax runs over, -1 for the last of an unknown rank; None if it is several.

    Before opset 13 they run over all axes from theirs on, which by default is the second.
    """
    axis: int = attribute(node, "axis", -1 if opset >= _ONE_AXIS_SINCE else 1)
    rank = None if node.inputs[0] is None else facts.rank(node.inputs[0])
    if rank is None:
        return axis if axis == -1 else None
    axis %= rank
    return axis if opset >= _ONE_AXIS_SINCE or axis == rank - 1 else None


_PASSES = ("Cast", "Expand", "Identity", "Reshape", "Unsqueeze")


def maximum_of(scores: ir.Value, value: ir.Value | None, facts: Facts) -> tuple[ir.Node, ...]:
    """The nodes that make `value` a maximum of `scores`, the one that reduces last; none if it is something else.

    Along which axes is not looked at: see `is_one_for_all_keys`.
    """
    nodes: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        nodes.append(node)
        if is_standard(node, "ReduceMax"):
            return tuple(nodes) if node.inputs[0] is scores else ()
        value = _before(node, facts)
    return ()


def largest_of(step: Shifted, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The maximum that is subtracted from scores laid out as `axes`, as it was reduced, before it is repeated for all keys."""
    own = aligned(step.largest, axes, facts)
    found = None if own is None else IndexedValue(step.largest, own)
    while found is not None and (node := found.value.producer()) is not None and not is_standard(node, "ReduceMax"):
        view, before = upward(found, facts), _before(node, facts)
        found = view or (None if before is None else IndexedValue(before, found.axes))
    return found


def is_one_for_all_keys(step: Shifted, axes: Axes, key_axis: Axis, facts: Facts) -> bool:
    """Whether the maximum that is subtracted from scores laid out as `axes` is the same for all keys of a row."""
    largest = largest_of(step, axes, facts)
    return largest is not None and not varies_along(largest, key_axis)


def _before(node: ir.Node, facts: Facts) -> ir.Value | None:
    """The value that a node repeats, casts, or takes the maximum of with -inf, as JAX begins one with."""
    if is_standard(node, "Max") and len(node.inputs) == 2:
        for value, other in (node.inputs, node.inputs[::-1]):
            if other is not None and facts.number(other) == -math.inf:
                return value
    return node.inputs[0] if is_standard(node, *_PASSES) else None


def renormalized(node: ir.Node, weights: ir.Value, facts: Facts) -> Renormalized | None:
    """`weights / sum(weights)`, met at the node that divides; None if it is something else."""
    if len(weights.uses()) < 2:
        return None
    guards = [user.outputs[0] for user, place in node.outputs[0].uses() if user.op_type == "Where" and place]
    with aside():
        found = (_read(node, output, weights, facts) for output in (*guards, node.outputs[0]))
        return next((step for step in found if step is not None), None)


def _read(node: ir.Node, output: ir.Value, weights: ir.Value, facts: Facts) -> Renormalized | None:
    nodes = nodes_between(weights, output) or []
    sums = [item for item in nodes if is_standard(item, *REDUCTIONS)]
    if len(sums) != 1:
        return None
    reading = Reading(facts, [weights])
    try:
        array, own = reading.array(output, beyond=True), reading.array(weights)
        place = axes_of(own)
        term, weight = array.at(*place), own.at(*place)
    except UNKNOWN:
        return None
    signs = {item: FALSE for item in walk(term) if item.op == "lt0" and item.args[0].data == weight.data}  # weights are 0 or more
    term = substitute(term, signs)
    totals = {item for item in walk(term) if item.op == "sum"}
    total = totals.pop() if len(totals) == 1 else None
    if total is None or not any(substitute(total.args[1], {total.args[0]: item}) is weight for item in place):
        return None
    tests = {item: _threshold(item, total) for item in walk(term) if item.op in {"le0", "lt0", "eq0"}}
    if None in tests.values():
        return None
    known = {test: found for test, found in tests.items() if found is not None}
    empty = _share(substitute(term, {test: truth(is_met) for test, (_, is_met, _) in known.items()}), weight, total)
    usual = _share(substitute(term, {test: truth(is_met) for test, (_, _, is_met) in known.items()}), weight, total)
    is_guard = output is not node.outputs[0]  # which is not that of the sum where it is a test for NaN, that none has here
    if empty is None or usual is None or usual == _ZERO or (is_guard and empty != _ZERO):
        return None
    softened = max(0.0, usual, *(number for number, _, _ in known.values()))
    return Renormalized(output, sums[0], empty != 0, softened, tuple(item for item in nodes if item is not node))


_ZERO = -1.0
"""The addend of a sum where the quotient is 0 or a number times a weight, whatever the sum."""


def _threshold(test: Term, total: Term) -> tuple[float, bool, bool] | None:
    """The number that a test holds the sum against, and the answers for a sum of 0 and for a large one; None if it is another."""
    parts = dict(polynomial(test.args[0]))
    factor, number = parts.pop((total,), 0), parts.pop((), 0)
    if not factor or parts:
        return None
    empty = number <= 0 if test.op == "le0" else number < 0 if test.op == "lt0" else number == 0
    return float(-number / factor), empty, test.op != "eq0" and factor < 0


def _share(term: Term, weight: Term, total: Term) -> float | None:
    """The addend of the sum that a weight is divided by; None if the term is no such quotient."""
    parts = polynomial(term)
    if not parts:
        return _ZERO
    ((atoms, factor), *more) = parts.items()
    others = [atom for atom in atoms if atom is not weight]
    if more or len(others) != len(atoms) - 1:
        return None
    if not others:
        return _ZERO
    below = dict(polynomial(others[0].args[0])) if others[0].op == "function" and others[0].data == "inverse" else {}
    added = float(below.pop((), 0))
    return added if len(others) == 1 and factor == 1 and below == {(total,): 1} and added >= 0 else None
