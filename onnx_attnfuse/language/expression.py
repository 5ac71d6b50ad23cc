"""Attention written as maths: expressions over tensors, as authors of patterns write them.

    scores = cap * tanh(scale * (q @ k.T) / cap)
    weights = softmax(scores + mask)
    weights @ v

A `Tensor` is not data but a formula. Rows and columns are its last two axes; the axes before them, batch and heads, are
left to the engine, as is the order in which a graph keeps its axes. `softmax`, `sum`, `max` and `concat` run along the columns.

Operands that a graph may lack are parameters with the default None: the function is asked once for each combination, and its
results become one formula with alternatives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar, Union

from onnx_attnfuse.errors import OptionError

Attribute: TypeAlias = int | float | str
Operand: TypeAlias = Union["Tensor", float, int]
"""An operand of a formula: a tensor, or a number."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A formula; made by operators and the functions of this module, never by hand."""

    op: str
    """`Variable`, `Number`, `AnyOf`, `T`, an operator of ai.onnx, or one of the language's own."""
    args: tuple[Tensor, ...] = ()
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def attribute(self, name: str) -> Attribute | None:
        """The value of an attribute, None if it is absent."""
        return dict(self.attributes).get(name)

    @property
    def name(self) -> str:
        """The name of a variable or of a choice of alternatives."""
        return str(self.attribute("name"))

    @property
    def value(self) -> float:
        """The number of a literal."""
        return float(self.attribute("value") or 0)

    @property
    def T(self) -> Tensor:  # noqa: N802 - what NumPy and torch call it
        """Rows and columns exchanged."""
        return self.args[0] if self.op == "T" else Tensor("T", (self,))

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply("MatMul", self, other)

    def __add__(self, other: Operand) -> Tensor:
        return apply("Add", self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return apply("Add", other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return apply("Sub", self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return apply("Sub", other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return apply("Mul", self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return apply("Mul", other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return apply("Div", self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return apply("Div", other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return apply("Pow", self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return apply("Pow", other, self)

    def __neg__(self) -> Tensor:
        return apply("Neg", self)

    def __lt__(self, other: Operand) -> Tensor:
        return apply("Less", self, other)

    def __le__(self, other: Operand) -> Tensor:
        return apply("LessOrEqual", self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return apply("Greater", self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return apply("GreaterOrEqual", self, other)

    def __and__(self, other: Tensor) -> Tensor:
        return apply("And", self, other)

    def __or__(self, other: Tensor) -> Tensor:
        return apply("Or", self, other)

    def __invert__(self) -> Tensor:
        return apply("Not", self)

    def __bool__(self) -> bool:
        raise OptionError("a formula has no truth value; write where(condition, a, b), or any_of for alternatives")

    def __str__(self) -> str:
        return write(self)


def number(value: float) -> Tensor:
    """A constant as a formula; numbers beside an operator become one by themselves."""
    return Tensor("Number", (), (("value", float(value)),))


def variable(name: str) -> Tensor:
    """A tensor of the graph, by its name in the pattern."""
    return Tensor("Variable", (), (("name", name),))


def apply(op: str, *operands: Operand, **attributes: Attribute) -> Tensor:
    """An operator of ai.onnx, by its name.

    Raises:
        OptionError: An operand is neither a formula nor a number.
    """
    args: list[Tensor] = []
    for operand in operands:
        if operand is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise OptionError(f"{op} is given an operand that may be None; write `scores if mask is None else scores + mask`")
        if not isinstance(operand, (Tensor, int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"{op} is given {operand!r}; a formula is made of parameters, numbers and the language's functions")
        args.append(operand if isinstance(operand, Tensor) else number(operand))
    return Tensor(op, tuple(args), tuple(sorted(attributes.items())))


def any_of(choice: str, **alternatives: Tensor) -> Tensor:
    """A formula with several spellings, each by a name that the report tells.

    Args:
        choice: The choice, `any_of("form", shifted=..., plain=...)`; a name of its own, no parameter's.
        **alternatives: The forms, by name.

    Raises:
        OptionError: There are fewer than two.
    """
    if len(alternatives) < 2:
        raise OptionError(
            f"any_of({choice!r}) has {len(alternatives)} alternative; give two or more, or write the formula itself"
        )
    return Tensor("AnyOf", tuple(alternatives.values()), (("name", choice), ("names", " ".join(alternatives))))


def softmax(scores: Tensor, *, sink: Operand | None = None, shifted: bool | None = True) -> Tensor:
    """Softmax along the columns.

    Args:
        scores: The scores.
        sink: One more score in each row, which takes weight and has no value.
        shifted: Whether the row's maximum is subtracted before exponentials are taken, as the operator does; if not, the
            exponentials of a fully masked row are all 0, and the row is NaN; None: the result of such a row depends on the form.
    """
    attributes: dict[str, Attribute] = {} if shifted else {"shifted": 0 if shifted is not None else -1}
    return apply("Softmax", scores, *(() if sink is None else (sink,)), **attributes)


def sum(x: Tensor) -> Tensor:  # noqa: A001 - its name in NumPy and torch
    """The sum along the columns, which stay with length 1."""
    return apply("ReduceSum", x)


def max(x: Tensor) -> Tensor:  # noqa: A001
    """The maximum along the columns, which stay with length 1."""
    return apply("ReduceMax", x)


def mean(x: Tensor) -> Tensor:
    """The mean along the columns, which stay with length 1."""
    return apply("ReduceMean", x)


def concat(left: Tensor, right: Tensor) -> Tensor:
    """Two tensors side by side, along the columns."""
    return apply("Concat", left, right)


def mix_heads(x: Tensor, weights: Tensor) -> Tensor:
    """`x` with each head a sum of all heads by `weights`, as talking heads do; in written formulas only."""
    return apply("MixHeads", x, weights)


def where(condition: Tensor, chosen: Operand, other: Operand) -> Tensor:
    """`chosen` where the condition holds, else `other`."""
    return apply("Where", condition, chosen, other)


def minimum(left: Operand, right: Operand) -> Tensor:
    """The lesser of two, element by element."""
    return apply("Min", left, right)


def maximum(left: Operand, right: Operand) -> Tensor:
    """The greater of two, element by element."""
    return apply("Max", left, right)


def equal(left: Operand, right: Operand) -> Tensor:
    """Whether two are equal, element by element; `==` compares formulas."""
    return apply("Equal", left, right)


def rows(x: Tensor) -> Tensor:
    """The number of each row of `x`, from 0 on, as one column; in definitions only."""
    return apply("Rows", x)


def columns(x: Tensor) -> Tensor:
    """The number of each column of `x`, from 0 on, as one row; in definitions only."""
    return apply("Columns", x)


def rearrange(x: Tensor, expression: str, **sizes: int) -> Tensor:
    """Axes rearranged as einops writes it, `rearrange(x, "b s (n h) -> b n s h", n=num_heads)`; in definitions only.

    Args:
        x: The tensor.
        expression: Names of axes, products in parentheses, before and after the arrow; a name that is new after it repeats.
        **sizes: Lengths by name; of each product before the arrow all but one.
    """
    lengths = tuple(sorted(sizes.items()))
    return Tensor("Rearrange", (x,), (("expression", expression), *lengths))


def _unary(op: str, what: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        return apply(op, x)

    function.__doc__ = f"{what}, element by element."
    function.__name__ = function.__qualname__ = op.lower()
    return function


absolute = _unary("Abs", "The absolute value")
elu = _unary("Elu", "`x` where positive, else `exp(x) - 1`")
erf = _unary("Erf", "The error function")
exp = _unary("Exp", "The exponential")
isnan = _unary("IsNaN", "Whether it is no number")
log = _unary("Log", "The natural logarithm")
log_softmax = _unary("LogSoftmax", "The logarithm of `softmax`")
relu = _unary("Relu", "`x` where positive, else 0")
sigmoid = _unary("Sigmoid", "The logistic function")
softplus = _unary("Softplus", "`log(1 + exp(x))`")
sqrt = _unary("Sqrt", "The square root")
tanh = _unary("Tanh", "The hyperbolic tangent")

_SIGNS = "Add + Sub - Mul * Div / MatMul @ Pow ** Less < LessOrEqual <= Greater > GreaterOrEqual >= And & Or |".split()
_INFIX = dict(zip(_SIGNS[::2], _SIGNS[1::2], strict=True))
_BINDS = {"+": 4, "-": 4, "*": 5, "/": 5, "@": 5, "**": 7}
_NAMES = {
    "MixHeads": "mix_heads",
    "ReduceSum": "sum",
    "ReduceMax": "max",
    "ReduceMean": "mean",
    "Min": "minimum",
    "Max": "maximum",
    "Abs": "absolute",
}


def write(tensor: Tensor, outer: int = 0) -> str:
    """The formula as its author might write it."""
    if tensor.op in {"Variable", "Number"}:
        return tensor.name if tensor.op == "Variable" else f"{tensor.value:g}"
    if tensor.op == "T":
        return f"{write(tensor.args[0], 8)}.T"
    if tensor.op in _INFIX:
        sign = _INFIX[tensor.op]
        binds = _BINDS.get(sign, 3)
        left, right = write(tensor.args[0], binds), write(tensor.args[1], binds + 1)
        text = f"{left} {sign} {right}"
        return f"({text})" if binds < outer else text
    if tensor.op in {"Neg", "Not"}:
        return f"{'-' if tensor.op == 'Neg' else '~'}{write(tensor.args[0], 6)}"
    if tensor.op == "AnyOf":
        names = str(tensor.attribute("names")).split()
        return f"({' | '.join(f'{name}: {write(arg)}' for name, arg in zip(names, tensor.args, strict=True))})"
    inner = [write(arg) for arg in tensor.args]
    if tensor.op == "Softmax" and len(inner) == 2:
        inner[1] = f"sink={inner[1]}"
    if tensor.op == "Rearrange":
        inner.append(repr(tensor.attribute("expression")))
    name = _NAMES.get(tensor.op, tensor.op.lower())
    return f"{name}({', '.join(inner)})"


GIVEN, NONE = "given", "none"
_Returned = TypeVar("_Returned")
Asked = Callable[[Mapping[str, "Tensor | None"]], _Returned]


def combined(
    ask: Asked[_Returned],
    operands: Sequence[str],
    optional: Sequence[str],
    join: Callable[[str, _Returned, _Returned], _Returned],
) -> _Returned:
    """The return values of a function of operands, with and without each optional one, joined to one.

    Args:
        ask: The function, of operands by name.
        operands: Their names.
        optional: The names of those that may be None.
        join: Makes one of what was returned with an operand, whose name comes first, and without it.
    """
    return _combined(ask, {name: variable(name) for name in operands}, tuple(optional), join)


def _combined(
    ask: Asked[_Returned],
    given: Mapping[str, Tensor | None],
    open_: tuple[str, ...],
    join: Callable[[str, _Returned, _Returned], _Returned],
) -> _Returned:
    if not open_:
        return ask(given)
    first, *rest = open_
    return join(
        first,
        _combined(ask, given, tuple(rest), join),
        _combined(ask, {**given, first: None}, tuple(rest), join),
    )


def either(operand: str, with_it: Tensor, without: Tensor) -> Tensor:
    """A formula with two spellings, by whether an operand is given."""
    return any_of(operand, **{GIVEN: with_it, NONE: without})
