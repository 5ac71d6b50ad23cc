"""Writing a formula as nodes: on tensors whose last two axes are rows and columns, batch and heads before them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Factor
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.softmax import maximum_of
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts_view import broadcast
from onnx_attnfuse.graph.ops import COMPARES, LOGICAL, is_standard
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.thresholds import NO_EXPONENTIAL
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.language.normal_form import FactorProduct, Form, Literal, Op, Slotted, Var
from onnx_attnfuse.reasons import Refused

_TRUTHS = COMPARES | LOGICAL | {"IsNaN"}
_WIDTH = {ir.DataType.FLOAT16: 0, ir.DataType.BFLOAT16: 0, ir.DataType.FLOAT: 1, ir.DataType.DOUBLE: 2}

Step = Callable[["ExpressionEmitter", ir.Value], ir.Value]
"""The function that makes one value of another."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Values of the graph for the operands and slots of a formula."""

    operands: Mapping[str, ir.Value | float]
    slots: Mapping[tuple[str, ...], Step] = dataclasses.field(default_factory=dict[tuple[str, ...], Step])
    """The effects of the slots of one place, by their sorted names."""
    softmax_dtype: ir.DataType | None = None
    """The element type in which the graph takes its softmax, where that is the wider one."""
    guard: Step | None = None
    """The graph's effect on the weights of rows without a key."""


class ExpressionEmitter:
    """Writes one formula."""

    def __init__(self, builder: Builder, given: Given, name: str) -> None:
        self.builder = builder
        self._given = given
        self._name = name
        self._known: dict[Form, ir.Value] = {}
        self.softmaxes: list[ir.Node] = []
        """The Softmax nodes that were written."""

    def emit(self, form: Form) -> ir.Value:
        """The value of a formula.

        Raises:
            Refused: A shape that it needs is unknown.
        """
        if form not in self._known:
            self._known[form] = self._written(form)
        return self._known[form]

    def _matrix(self, form: Form) -> ir.Value:
        """The value of a formula that has rows and columns.

        Raises:
            Refused: It is a number here, such as a factor that the graph leaves out: how many rows it has is not known.
        """
        value = self.emit(form)
        if len(self.dims(value)) < 2:
            raise Refused("number-for-matrix", "its meaning needs a matrix where the graph has a number")
        return value

    def dims(self, value: ir.Value) -> tuple[Dim, ...]:
        """The shape of a value.

        Raises:
            Refused: Not even its rank is known.
        """
        found = self.builder.facts.dims(value)
        if found is None:
            raise Refused("unknown-rank", f"the rank of '{value.name}' is unknown")
        return tuple(found)

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The element type of a value; float32 if it is unknown."""
        return self.builder.facts.dtype(value) or ir.DataType.FLOAT

    def elementwise(self, op: str, operands: Sequence[ir.Value | float]) -> ir.Value:
        """An operator on values and numbers; floats become the widest among them."""
        values = [operand for operand in operands if isinstance(operand, ir.Value)]
        types = [self.dtype(value) for value in values if self.dtype(value) != ir.DataType.BOOL]
        widest = max(types, key=lambda dtype: _WIDTH.get(dtype, -1), default=ir.DataType.FLOAT)
        typed = [self._typed(operand, widest) for operand in operands]
        return self.builder.elementwise(op, typed, ir.DataType.BOOL if op in _TRUTHS else widest)

    def _typed(self, operand: ir.Value | float, dtype: ir.DataType) -> ir.Value:
        if not isinstance(operand, ir.Value):
            integral = not dtype.is_floating_point()
            return self.builder.constant(np.asarray(int(operand), np.int64)) if integral else self.builder.scalar(operand, dtype)
        return operand if self.dtype(operand) == ir.DataType.BOOL else self.builder.cast(operand, dtype)

    def _written(self, form: Form) -> ir.Value:
        match form:
            case Var() | Literal():
                found = self._operand(form)
                return found if isinstance(found, ir.Value) else self.builder.scalar(found, ir.DataType.FLOAT)
            case FactorProduct():
                return self._product(form)
            case Slotted(slots, core):
                return self._given.slots[tuple(sorted(slots))](self, self.emit(core))
            case Op(op, _, args) if op not in _RULES:
                return self.elementwise(op, [self._operand(arg) for arg in args])
            case Op(op):
                return _RULES[op](self, form)

    def _operand(self, form: Form) -> ir.Value | float:
        """A number where the formula has one."""
        if isinstance(form, Literal):
            return form.value
        return self._given.operands[form.name] if isinstance(form, Var) else self.emit(form)

    def _product(self, form: FactorProduct) -> ir.Value:
        number, value = form.coefficient, self.emit(form.core)
        for name, sign in form.factors:
            operand = self._given.operands[name]
            if isinstance(operand, ir.Value):
                value = self.elementwise("Mul" if sign > 0 else "Div", [value, operand])
            else:
                number *= operand**sign
        if number != 1:
            value = self.elementwise("Mul", [value, number])
        return value if form.slot is None else self._given.slots[form.slot,](self, value)

    def product(self, form: Op) -> ir.Value:
        """A product of matrices, in the narrower of their types."""
        left, right = map(self._matrix, form.args)
        narrow = min((self.dtype(left), self.dtype(right)), key=lambda dtype: _WIDTH.get(dtype, 1))
        left, right = self.builder.cast(left, narrow), self.builder.cast(right, narrow)
        first, second = self.dims(left), self.dims(right)
        batch = broadcast([first[:-2], second[:-2]])
        dims = None if batch is None else (*batch, first[-2], second[-1])
        return self.builder.node("MatMul", [left, right], dims=dims, dtype=narrow)

    def turned(self, form: Op) -> ir.Value:
        """Rows and columns exchanged."""
        value = self.emit(form.args[0])
        rank = len(self.dims(value))
        if rank == 0:
            return value  # a number is a matrix with this number everywhere
        return self.builder.transpose(value, [*range(rank - 2), rank - 1, rank - 2])

    def softmax(self, form: Op) -> ir.Value:
        """The softmax, with a sink as one more column whose weight is dropped."""
        scores = self._matrix(form.args[0])
        wide = self._given.softmax_dtype
        if wide is not None and _WIDTH.get(wide, 0) > _WIDTH.get(self.dtype(scores), 0):
            scores = self.builder.cast(scores, wide)
        dims, dtype = self.dims(scores), self.dtype(scores)
        if len(form.args) > 1:
            scores = self._joined([scores, self._column(self._typed(self._operand(form.args[1]), dtype), len(dims))])
        weights = self.builder.node(
            "Softmax", [scores], {"axis": -1 if self.builder.opset >= 13 else len(dims) - 1}, dims=self.dims(scores), dtype=dtype,
            hint=self._name,
        )  # fmt: skip
        node = producer_of(weights)
        self.softmaxes.append(node)
        if len(form.args) > 1:
            weights = self._without_last(weights, dims)
        elif "shifted" in dict(form.attributes) and not self._is_lowered(scores):
            weights = self._voided(weights, scores, math.nan if ("shifted", 0) in form.attributes else math.inf)
        return weights if self._given.guard is None else self._given.guard(self, weights)

    def _is_lowered(self, scores: ir.Value) -> bool:
        """Whether each row's own maximum is subtracted in the graph already, so that no row of exponentials is 0 throughout."""
        node, facts = scores.producer(), self.builder.facts
        if not is_standard(node, "Sub") or node.inputs[0] is None:
            return False
        maximum = maximum_of(node.inputs[0], node.inputs[1], facts)
        rank = len(self.dims(scores))
        return bool(maximum) and axes_of(maximum[-1], 1, rank, facts) == [rank - 1]

    def _voided(self, weights: ir.Value, scores: ir.Value, number: float) -> ir.Value:
        """Weights that are `number` in rows whose exponentials are all 0: NaN, or infinite where they are not defined."""
        builder, dtype = self.builder, self.dtype(scores)
        top = builder.reduce("ReduceMax", scores, [len(self.dims(scores)) - 1])
        empty = builder.elementwise("Less", [top, builder.scalar(NO_EXPONENTIAL, dtype)], ir.DataType.BOOL)
        return builder.elementwise("Where", [empty, builder.scalar(number, dtype), weights], dtype)

    def _without_last(self, weights: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        bounds = [self.builder.constant([number]) for number in (0, -1, len(dims) - 1)]
        return self.builder.node("Slice", [weights, *bounds], dims=dims, dtype=self.dtype(weights))

    def concat(self, form: Op) -> ir.Value:
        """Two values side by side; axes that one of them only broadcasts along are repeated."""
        values = [self._matrix(arg) for arg in form.args]
        wide = max(map(self.dtype, values), key=lambda dtype: _WIDTH.get(dtype, 1))
        return self._joined([self.builder.cast(value, wide) for value in values])

    def _joined(self, values: Sequence[ir.Value]) -> ir.Value:
        found = self.builder.joined(values, -1)
        if found is None:
            raise Refused("unknown-rank", "the shapes of concatenated values may not fit")
        return found

    def _column(self, value: ir.Value, rank: int) -> ir.Value:
        """A value of so many axes, a number for instance."""
        dims = self.dims(value)
        return self.builder.reshape(value, [*[1] * (rank - len(dims)), *dims])

    def reduced(self, form: Op) -> ir.Value:
        """A reduction along the columns."""
        value = self._matrix(form.args[0])
        return self.builder.reduce(form.op, value, [len(self.dims(value)) - 1])

    def counted(self, form: Op) -> ir.Value:
        """The numbers of rows, as a column, or of columns, as a row."""
        dims = self.dims(self._matrix(form.args[0]))
        size = dims[-1] if form.op == "Columns" else dims[-2]
        found = self.builder.counting(size)
        return found if form.op == "Columns" else self.builder.reshape(found, [size, 1])

    def rearrange(self, form: Op) -> ir.Value:
        """Axes rearranged as einops writes it."""
        attributes = dict(form.attributes)
        expression = str(attributes.pop("expression"))
        sizes = {name: size for name, size in attributes.items() if isinstance(size, int)}
        return rearranged(self.builder, self.emit(form.args[0]), expression, sizes)


_RULES: dict[str, Callable[[ExpressionEmitter, Op], ir.Value]] = {
    "Columns": ExpressionEmitter.counted,
    "Concat": ExpressionEmitter.concat,
    "MatMul": ExpressionEmitter.product,
    "Rearrange": ExpressionEmitter.rearrange,
    "ReduceMax": ExpressionEmitter.reduced,
    "ReduceMean": ExpressionEmitter.reduced,
    "ReduceSum": ExpressionEmitter.reduced,
    "Rows": ExpressionEmitter.counted,
    "Softmax": ExpressionEmitter.softmax,
    "T": ExpressionEmitter.turned,
}


_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_NAME = re.compile(r"[a-zA-Z_]\w*")


def rearranged(builder: Builder, value: ir.Value, expression: str, given: Mapping[str, int]) -> ir.Value:
    """`value` with its axes rearranged.

    Raises:
        OptionError: The expression cannot be read.
        Refused: The shape of `value` does not fit it.
    """
    left, right = _sides(expression)
    dims = builder.facts.dims(value)
    if dims is None or len(dims) != len(left):
        raise Refused("unknown-rank", f"'{value.name}' is not known to have the {len(left)} axes of '{expression}'")
    lengths: dict[str, Dim] = dict(given)
    for group, dim in zip(left, dims, strict=True):
        _complete_lengths(group, dim, lengths, expression)
    factors = {name: Factor(lengths[name]) for group in left for name in group}
    for group in right:
        for name in group:
            if name not in factors:
                if name not in given:
                    raise OptionError(f"'{expression}' repeats along {name}, which has no length; give {name}=")
                factors[name] = Factor(given[name])
    source, target = (_laid(side, factors) for side in (left, right))
    return arrange(builder, IndexedValue(value, source), target)


def _laid(side: list[list[str]], factors: Mapping[str, Factor]) -> Axes:
    return tuple(tuple(factors[name] for name in group) for group in side)


def _sides(expression: str) -> tuple[list[list[str]], list[list[str]]]:
    left, arrow, right = expression.partition("->")
    sides = [[(inner or outer).split() for inner, outer in _GROUP.findall(side)] for side in (left, right)]
    sides = [[[name for name in group if name != "1"] for group in side] for side in sides]
    names = [[name for group in side for name in group] for side in sides]
    odd = [name for side in names for name in side if not _NAME.fullmatch(name)]
    if not arrow or odd or any(len(set(side)) < len(side) for side in names) or set(names[0]) - set(names[1]):
        raise OptionError(f"{expression!r} is no rearrangement; write each axis once on both sides, as in 'b s (n h) -> b n s h'")
    return sides[0], sides[1]


def _complete_lengths(group: list[str], dim: Dim, lengths: dict[str, Dim], expression: str) -> None:
    """The lengths of the factors of one axis, of which one may be open."""
    unknown = [name for name in group if name not in lengths]
    rest: Dim | None = dim
    for name in group:
        if name in lengths and rest is not None:
            rest = sizes.exact_quotient(rest, lengths[name])
    if len(unknown) > 1 or rest is None or (not unknown and rest != 1):
        raise Refused("unknown-heads", f"an axis of length {dim} is not known to be ({' '.join(group)}) of '{expression}'")
    if unknown:
        lengths[unknown[0]] = rest
