"""Weights that are masked behind Softmax and divided by what is left of their sum, which is a mask of the scores.

    Softmax ── Mul(mask) ─┬─────────────── Div ── ·V
                          └ ReduceSum ─────┘            the sum as it is, + 1e-13, max(·, 1e-9), or where(· > 0, ·, 1)

jax2onnx writes it for every mask, and hand-written masked softmaxes do. Rows of which nothing is left are NaN, or 0 where the sum
is kept from being 0.
Safety: floats lose a small sum, alone or beside a number that is added to it; that no sum is so small is the assumption
`kept-weights`, and where that number is large the attention is left.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse import Facts, steps

_SAME = frozenset(["Cast", "Identity", "Unsqueeze"])


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The sum of weights, and everything that keeps it from being 0."""

    node: ir.Node
    """The node that sums."""
    values: tuple[ir.Value, ...]
    """Values that are the sum itself."""
    nodes: tuple[ir.Node, ...]
    guarded: bool = False
    softened: float = 0.0

    def same(self, node: ir.Node) -> _Sum:
        """The sum behind a node that does not change it."""
        return dataclasses.replace(self, values=(*self.values, node.outputs[0]), nodes=(*self.nodes, node))

    def guard(self, *nodes: ir.Node, number: float = 0.0) -> _Sum:
        """The sum behind nodes that keep it from being 0, by a number or not."""
        return dataclasses.replace(self, nodes=(*self.nodes, *nodes), guarded=True, softened=self.softened + number)


def renormalized(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.Renormalized | None:
    """`weights / sum(weights)`, with the sum guarded or the quotient, read at the Div or at the Mul by a Reciprocal."""
    divisor, inverse = node.inputs[1], ()
    if node.op_type == "Mul":
        other = node.inputs[1] if node.inputs[0] is weights else node.inputs[0]
        reciprocal = None if other is None else other.producer()
        if reciprocal is None or reciprocal.op_type != "Reciprocal":
            return None
        divisor, inverse = reciprocal.inputs[0], (reciprocal,)
    elif node.inputs[0] is not weights:
        return None
    total = _total(divisor, weights, facts)
    if divisor is None or total is None:
        return None
    output, quotient = node.outputs[0], (*total.nodes, *inverse)
    for user, place in output.uses():
        test = _test(user.inputs[0], total, facts) if user.op_type == "Where" and place else None
        if test is not None and test[1] == (place == 1) and _is_zero(user.inputs[3 - place], facts):
            return steps.Renormalized(user.outputs[0], divisor, total.node, True, total.softened, (*quotient, *test[0], user))
    return steps.Renormalized(output, divisor, total.node, total.guarded, total.softened, quotient)


def _total(value: ir.Value | None, weights: ir.Value, facts: Facts) -> _Sum | None:
    """A value read as the sum of the weights, guarded or not."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.op_type in {"ReduceSum", "ReduceL1"}:
        same = node.inputs[0] is not None and _plain(node.inputs[0]) is _plain(weights)
        return _Sum(node, (node.outputs[0],), (node,)) if same else None
    if node.op_type == "Where":
        return _chosen(node, weights, facts)
    found = _total(node.inputs[0], weights, facts)
    number = facts.number(node.inputs[1]) if len(node.inputs) == 2 and node.inputs[1] is not None else None
    if node.op_type in {"Add", "Max"} and found is None:
        found = _total(node.inputs[1], weights, facts)
        number = None if node.inputs[0] is None else facts.number(node.inputs[0])
    if found is None:
        return None
    if node.op_type in _SAME:
        return found.same(node)
    guards = node.op_type in {"Add", "Max", "Clip"} and number is not None and number > 0
    return found.guard(node, number=number) if guards and number is not None else None


def _chosen(node: ir.Node, weights: ir.Value, facts: Facts) -> _Sum | None:
    """`where(sum > 0, sum, 1)`, in either sense."""
    for place in (1, 2):
        total, other = _total(node.inputs[place], weights, facts), node.inputs[3 - place]
        test = None if total is None else _test(node.inputs[0], total, facts)
        number = None if other is None else facts.number(other)
        if total is not None and test is not None and test[1] == (place == 1) and number:
            return total.guard(*test[0], node)
    return None


def _test(value: ir.Value | None, total: _Sum, facts: Facts) -> tuple[tuple[ir.Node, ...], bool] | None:
    """The nodes of `sum > 0`, and whether it is that; else `sum == 0`."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.op_type == "Not":
        inner = _test(node.inputs[0], total, facts)
        return None if inner is None else ((*inner[0], node), not inner[1])
    if node.op_type not in {"Greater", "Less", "Equal"}:
        return None
    left, right = node.inputs if node.op_type != "Less" else reversed(node.inputs)
    if node.op_type == "Equal" and right in total.values:
        left, right = right, left
    return ((node,), node.op_type != "Equal") if left in total.values and _is_zero(right, facts) else None


def _plain(value: ir.Value) -> ir.Value:
    """A value before it is merely given another name."""
    node = value.producer()
    return _plain(node.inputs[0]) if node is not None and node.op_type == "Identity" and node.inputs[0] is not None else value


def _is_zero(value: ir.Value | None, facts: Facts) -> bool:
    return value is not None and facts.number(value) == 0
