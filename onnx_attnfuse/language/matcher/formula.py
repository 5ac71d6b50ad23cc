"""Formulas of operators that are no attention, found above a value by the matcher of patterns.

    @Formula
    def gelu(x: Tensor) -> Tensor:
        return x * (1 + erf(x / math.sqrt(2))) / 2

    found = gelu.at(value, facts)          # found.values["x"], and the nodes that compute it

Factors come in any order, as quotients or products, and numbers as their element type holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves, refined
from onnx_attnfuse.attention.match.steps import Negated, Passed, Readers, Scaled, ScoreStep, ScoreStepReader
from onnx_attnfuse.graph.dtypes import FLOATS, narrows
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.decorators import Pattern, operands_of
from onnx_attnfuse.language.expression import Tensor, combined, either
from onnx_attnfuse.language.matcher.discrimination_net import Net
from onnx_attnfuse.language.matcher.matcher import Matcher


@dataclasses.dataclass(frozen=True)
class FoundFormula:
    """A formula in a graph: its operands, those that are one number, and the nodes that compute it."""

    values: Mapping[str, ir.Value]
    numbers: Mapping[str, float]
    nodes: tuple[ir.Node, ...]


class Formula:
    """A function of tensors that runs along the last axis; an operand with the default None is one that graphs may lack."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        operands, optional = operands_of(function, "formula")
        written = combined(lambda given: function(**given), operands, optional, either)
        self._net = Net([Pattern("formula", written, None, None, operands, 0, "", "")])

    def at(self, value: ir.Value, facts: Facts) -> FoundFormula | None:
        """The formula that computes a value, from operands of its type that lie as it does."""
        node = value.producer()
        match = None if node is None else Matcher(self._net, facts, facts.opset, _READERS).at(node)
        if match is None or not match.root.axes:
            return None
        state, axes, names = match.state, refined(match.root.axes), match.variant.names
        bound = {names[index]: item for index, item in state.operands.items()}
        numbers = {name: item.number for name, item in bound.items() if item.number is not None}
        indexed = {name: item.indexed for name, item in bound.items() if item.indexed is not None}
        lies = [refined(item.axes) == axes[-len(item.axes) :] for name, item in indexed.items() if name not in numbers]
        typed = [facts.dtype(item.value) == facts.dtype(value) for name, item in indexed.items() if name not in numbers]
        if not all(lies + typed) or set(leaves(state.axes.get(1, axes[-1]))) != set(axes[-1]):
            return None
        return FoundFormula({name: item.value for name, item in indexed.items()}, numbers, tuple(dict.fromkeys(state.nodes)))


def _steps(node: ir.Node, facts: Facts) -> Sequence[ScoreStep]:
    """Factors, and casts that round nothing."""
    values = [value for value in node.inputs if value is not None]
    types = [facts.dtype(value) for value in (*values, *node.outputs)]
    match node.op_type, values:
        case "Mul", [one, other]:
            return Scaled(one, other), Scaled(other, one)
        case "Div", [one, other]:
            return (Scaled(one, other, divide=True),)
        case "Neg", [one]:
            return (Negated(one),)
        case "Cast", [one] if FLOATS.issuperset(types) and not narrows(*types):
            return (Passed(one),)
        case _:
            return ()


_READERS = Readers.of([ScoreStepReader("formula", "", ("Mul", "Div", "Neg", "Cast"), _steps, "", "")])
