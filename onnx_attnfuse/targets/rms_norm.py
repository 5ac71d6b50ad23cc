"""RMS normalization as sources write it: an operator of ai.onnx, or decomposed.

    weight · x / sqrt(mean(x²) + epsilon)

Decomposed, x may be widened for it, the quotient be a product with a reciprocal, and the result be rounded before or after the
product with the weights.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.dtypes import narrows
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of


@dataclasses.dataclass(frozen=True)
class RmsNorm:
    """A normalization along the last axis.

    Attributes:
        x: The normalized input, of any shape.
        weight: The factors, as many as x has channels; None if there are none.
        epsilon: The summand of the mean of the squares.
        inside: Its nodes, the last one first.
    """

    x: ir.Value
    weight: ir.Value | None
    epsilon: float
    inside: tuple[ir.Node, ...]


def read_rms_norm(value: ir.Value, facts: Facts) -> RmsNorm | None:
    """The normalization that gives a value, in its own element type; None if none does."""
    found = _operator(value, facts) or _decomposed(value, facts)
    return found if found is not None and facts.dtype(found.x) == facts.dtype(value) else None


def _operator(value: ir.Value, facts: Facts) -> RmsNorm | None:
    around: list[ir.Node] = []
    node = _before_cast(value, around).producer()
    if not is_standard(node, "RMSNormalization") or attribute(node, "stash_type", 1) != 1:
        return None
    x, weight = node.inputs
    rank = None if x is None else facts.rank(x)
    if x is None or weight is None or rank is None or attribute(node, "axis", -1) % rank != rank - 1:
        return None
    inside = [*around, node]
    x = _before_cast(x, inside) if around else x
    return RmsNorm(x, weight, attribute(node, "epsilon", 1e-5), tuple(inside)) if _keeps(inside, x, facts) else None


def _decomposed(value: ir.Value, facts: Facts) -> RmsNorm | None:
    around: list[ir.Node] = []
    outer = _before_cast(value, around).producer()
    if is_standard(outer, "Mul"):
        for one, weight in (outer.inputs, reversed(outer.inputs)):
            if one is not None and weight is not None and facts.rank(weight) == 1:
                inside = [*around, outer]
                quotient = _before_cast(one, inside).producer()
                found = None if quotient is None else _quotient(quotient, weight, inside, facts)
                if found is not None:
                    return found
    return None if outer is None else _quotient(outer, None, around, facts)


def _quotient(node: ir.Node, weight: ir.Value | None, around: list[ir.Node], facts: Facts) -> RmsNorm | None:
    """`x / sqrt(mean(x²) + epsilon)`, with the nodes around it."""
    for wide, root, between in _over_root(node):
        inside = [*around, node, *between]
        epsilon = _root_mean_square(root, wide, inside, facts)
        if epsilon is None:
            continue
        x = _before_cast(wide, inside)
        if _keeps(inside, x, facts):
            return RmsNorm(x, weight, epsilon, tuple(inside))
    return None


def _over_root(node: ir.Node | None) -> list[tuple[ir.Value, ir.Value, list[ir.Node]]]:
    """Dividend and divisor, of a Div or a Mul by a Reciprocal, with the nodes between."""
    if not is_standard(node, "Div", "Mul"):
        return []
    left, right = node.inputs
    if left is None or right is None:
        return []
    if node.op_type == "Div":
        return [(left, right, [])]
    found: list[tuple[ir.Value, ir.Value, list[ir.Node]]] = []
    for one, other in ((left, right), (right, left)):
        inverse = other.producer()
        if is_standard(inverse, "Reciprocal") and inverse.inputs[0] is not None:
            found.append((one, inverse.inputs[0], [inverse]))
    return found


def _root_mean_square(value: ir.Value | None, wide: ir.Value, inside: list[ir.Node], facts: Facts) -> float | None:
    """The number that is added under the root, if `value` is the root mean square of `wide` along its last axis."""
    found: list[ir.Node] = []
    for op in ("Sqrt", "Add", "ReduceMean", "Pow"):
        node = None if value is None else value.producer()
        if op == "Pow" and is_standard(node, "Mul") and set(node.inputs) == {wide}:
            found.append(node)
            break
        if not is_standard(node, op):
            return None
        found.append(node)
        value = node.inputs[0]
        if op == "Add" and value is not None and facts.number(value) is not None:
            value = node.inputs[1]
    added, reduced, squared = found[1:]
    rank = facts.rank(wide)
    if squared.inputs[0] is not wide or rank is None or axes_of(reduced, 1, rank, facts) != [rank - 1]:
        return None
    if attribute(reduced, "keepdims", 1) != 1:
        return None
    if squared.op_type == "Pow" and (squared.inputs[1] is None or facts.number(squared.inputs[1]) != 2):
        return None
    numbers = [facts.number(item) for item in added.inputs if item is not None]
    inside += found
    return next((number for number in numbers if number is not None), None)


def _before_cast(value: ir.Value, inside: list[ir.Node]) -> ir.Value:
    """The value before it is cast, if it is."""
    node = value.producer()
    if is_standard(node, "Cast") and node.inputs[0] is not None:
        inside.append(node)
        return node.inputs[0]
    return value


def _keeps(inside: list[ir.Node], x: ir.Value, facts: Facts) -> bool:
    """Whether nothing is rounded to fewer bits on the way than x has."""
    return facts.dtype(x) is not None and not any(narrows(facts.dtype(x), facts.dtype(node.outputs[0])) for node in inside)
