"""Values in normal form, and weights that are divided by the rest of their sum, read as masks of the scores by it.

    Softmax ── Mul(mask) ─┬─────────────── Div ── ·V
                          └ ReduceSum ─────┘            the sum as it is, + 1e-13, max(·, 1e-9), or where(· > 0, ·, 1)

    softmax(s) · m / Σ softmax(s) · m        is        softmax(where(m, s, -inf))

jax2onnx writes it for every mask, and hand-written masked softmaxes do. Rows of which nothing is left are NaN, or 0 where the sum
is kept from being 0. The two differ where the unmasked weights are so small that floats lose them (`kept-weights`), and where a
row has only keys that something in front of the softmax masks, which is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned, varies_along
from onnx_attnfuse.attention.masks.classify import element, keep_condition, split_mask
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import is_binary
from onnx_attnfuse.attention.masks.seen_keys import implied
from onnx_attnfuse.attention.match import steps
from onnx_attnfuse.attention.match.contractions import read_contraction
from onnx_attnfuse.attention.match.paths import ScorePath, WeightPath
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.attention.match.steps import NaNZeroed, Renormalized, ScoreStep, Taken, Weighted, WeightStep, Zeroed
from onnx_attnfuse.attention.spec import Mask, Renormalization, Replaced
from onnx_attnfuse.certify.arrays import axes_of as places_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import FALSE, TRUE, Term, conjoin, polynomial, size, substitute, truth, walk
from onnx_attnfuse.graph.constants import attribute, is_constant, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, REDUCTIONS
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.thresholds import BESIDE_SOFTENING, LEAST_EXPONENT, LEAST_SUM, MASKS, SOFTENS
from onnx_attnfuse.reasons import Refused

MOST_NODES = 256
"""Nodes above or below a value beyond which it is left as it is."""


class Reading(Execution):
    """The graph, executed from values whose elements are ordinary numbers; others are if they are computed as activations are."""

    def __init__(self, facts: Facts, ends: Sequence[ir.Value]) -> None:
        self.names: dict[ir.Value, str] = {}
        super().__init__(facts, self._name, {}, lambda value: value in ends or is_product(value, facts), facts.opset, size)
        self._ordinary, self._bounds = ends, Bounds(facts)

    def _name(self, value: ir.Value) -> str:
        if value not in self.names:
            is_ordinary = value in self._ordinary or self._bounds.of(value)[0] > MASKS
            self.names[value] = f"{'v' if is_ordinary else 'm'}{len(self.names)}"
        return self.names[value]


def is_product(value: ir.Value, facts: Facts) -> bool:
    """Whether a value is a product of two computed ones."""
    node = value.producer()
    product = None if node is None else read_contraction(node, facts)
    return product is not None and not any(map(is_constant, product.operands))


def nodes_between(first: ir.Value, last: ir.Value) -> list[ir.Node] | None:
    """The nodes on the ways from one value to another, in order; None if something else looks into them."""
    below, moved = set[ir.Node](), [first]
    for value in moved:
        for node, _ in () if value is last else value.uses():
            if node.op_type in ASKS_SHAPE or node in below:
                continue
            if (node.graph is not first.graph and node.graph is not last.graph) or len(below) == MOST_NODES:
                return None
            below.add(node)
            moved += node.outputs
    ordered = dict[ir.Node, None]()

    def place(node: ir.Node | None) -> None:
        if node in below and node not in ordered:
            for item in node.inputs:
                place(None if item is None else item.producer())
            ordered[node] = None

    place(last.producer())
    return list(ordered)


@dataclasses.dataclass(frozen=True)
class InFront:
    """The ways to the softmax and from it once masks after it that are divided away are moved before it."""

    scores: ScorePath
    weights: WeightPath
    moved: int = 0
    """How many masks, the last steps of the scores."""
    taken: Taken[WeightStep] | None = None
    """The division; None where there is none."""


def in_front(softmax: Softmax, scores: ScorePath, weights: WeightPath, key_axis: Axis, reader: Reader) -> InFront:
    """Moves masks of weights that are divided by their sum in front of the softmax.

    Raises:
        Refused: The sum is not that of all keys of a row, or has other operators than masks before it.
    """
    place = next((at for at, taken in enumerate(weights.steps) if isinstance(taken.step, Renormalized)), None)
    if place is None:
        return InFront(scores, weights)
    taken = weights.steps[place]
    assert isinstance(taken.step, Renormalized)
    if softmax.sink is not None:
        raise Refused("weights-scaled-by-key", "the weights are divided by their sum, which removes the sink", taken.node.name)
    _check_sum(taken.step, taken, key_axis, reader.facts)
    masks = [_moved(item, softmax, key_axis, reader) for item in weights.steps[:place]]
    zeroed: list[Taken[WeightStep]] = [Taken(NaNZeroed(taken.step.output), taken.node, taken.axes)] if taken.step.zeroes else []
    scores = dataclasses.replace(scores, steps=(*scores.steps, *masks))
    return InFront(scores, dataclasses.replace(weights, steps=(*zeroed, *weights.steps[place + 1 :])), len(masks), taken)


def renormalization(mask: Mask, moved: InFront, reader: Reader) -> Renormalization | None:
    """How the weights are divided by the rest of their sum; None where all of it is left.

    Args:
        mask: All masks of the scores, the moved ones last.
        moved: Which these are.
        reader: Reads their values.

    Raises:
        Refused: Something in front of the softmax may mask keys that these keep, or the rest may be lost.
    """
    if moved.taken is None:
        return None
    first, last = mask[: len(mask) - moved.moved], mask[len(mask) - moved.moved :]
    step, node, facts = moved.taken.step, moved.taken.node, reader.facts
    assert isinstance(step, Renormalized)
    if step.softened > SOFTENS:
        message = f"{step.softened:g} is added to the sum that divides the weights, which changes small sums"
        raise Refused("vanishing-weights", message, node.name)
    bounds, parts = Bounds(facts), split_mask(first, reader)
    kept = conjoin(*(keep_condition(item.condition, item.keep_where, reader) for item in last if isinstance(item, Replaced)))
    lows = [low for bias in parts.biases for low in outcomes(bias)]
    least = max(LEAST_SUM, BESIDE_SOFTENING * step.softened)
    weakest = LEAST_EXPONENT + math.log(least / LEAST_SUM)
    hides = any(map(bounds.may_mask, parts.biases)) or min(lows, default=0.0) < min(weakest, 0.0)
    if hides or not (parts.allowed is TRUE or implied(kept, parts.allowed)):
        message = "the weights are masked after the softmax and the scores by another mask before it; a row may lose all keys"
        raise Refused("masked-twice", message, node.name)
    if first and bounds.lowest(first) == -math.inf:
        message = "fully masked rows are NaN after the softmax, before their weights are masked and divided by their sum"
        raise Refused("masked-twice", message, node.name)
    if kept is parts.allowed:
        return None
    if not facts.assumed.kept_weights:
        raise Refused(
            "vanishing-weights", "the weights are divided by the sum that a mask leaves, which rounding may swamp", node.name
        )
    return Renormalization(_total(step, moved.taken.axes, facts), least)


def _total(step: Renormalized, axes: Axes, facts: Facts) -> IndexedValue:
    """The sum of the weights laid out as `axes`, before anything keeps it from being 0."""
    reduced = axes_of(step.reduction, 1, len(axes), facts) or []
    kept: list[Axis] = [() if place in reduced else axis for place, axis in enumerate(axes)]
    if not attribute(step.reduction, "keepdims", 1):
        kept = [axis for place, axis in enumerate(axes) if place not in reduced]
    return IndexedValue(step.reduction.outputs[0], tuple(kept))


def _check_sum(step: Renormalized, taken: Taken[WeightStep], key_axis: Axis, facts: Facts) -> None:
    """Refuses any sum but that of all keys of one row."""
    reduced = axes_of(step.reduction, 1, len(taken.axes), facts)
    columns = set(leaves(key_axis))
    if reduced is None or {leaf for place in reduced for leaf in leaves(taken.axes[place])} != columns:
        message = f"the weights are divided by '{step.reduction.outputs[0].name}', which is not the sum of a row's keys"
        raise Refused("weights-scaled-by-key", message, taken.node.name)


def _moved(taken: Taken[WeightStep], softmax: Softmax, key_axis: Axis, reader: Reader) -> Taken[ScoreStep]:
    """A mask of the weights as one of the scores."""
    step = taken.step
    if isinstance(step, Zeroed):
        return Taken(steps.Replaced(softmax.scores, step.condition, step.keep_where, -math.inf), taken.node, taken.axes)
    if not isinstance(step, Weighted) or step.divide:
        message = f"{taken.node.op_type} is between the softmax and the sum that divides its weights"
        raise Refused("weights-scaled-by-key", message, taken.node.name)
    indexed = aligned(step.operand, taken.axes, reader.facts)
    if indexed is None or not varies_along(indexed, key_axis) or not is_binary(element(indexed.refined(), reader)):
        message = f"the weights are multiplied by '{step.operand.name}', which may be neither 0 nor 1, and divided by their sum"
        raise Refused("weights-scaled-by-key", message, taken.node.name)
    return Taken(steps.Replaced(softmax.scores, step.operand, True, -math.inf), taken.node, taken.axes)


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
        place = places_of(own)
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
