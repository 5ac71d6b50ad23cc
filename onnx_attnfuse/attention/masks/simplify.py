"""Element-wise operators applied to mask expressions, simplified as they are applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.masks.expression import (
    FALSE,
    Apply,
    Choice,
    Element,
    Expression,
    Linear,
    Number,
    Truth,
    at_most_zero,
    bounds,
    choice,
    combine,
    conjunction,
    constant,
    disjunction,
    is_binary,
    is_truth,
    is_zero,
    negation,
    quotient,
    scaled,
    truth,
)
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.dtypes import FLOATS, HALVES, WHOLE_TO
from onnx_attnfuse.graph.ops import COMPARES

_NARROW = {
    ir.DataType.INT8: (-(1 << 7), (1 << 7) - 1),
    ir.DataType.UINT8: (0, (1 << 8) - 1),
    ir.DataType.INT16: (-(1 << 15), (1 << 15) - 1),
    ir.DataType.UINT16: (0, (1 << 16) - 1),
    ir.DataType.UINT32: (0, (1 << 32) - 1),
    ir.DataType.UINT64: (0, (1 << 64) - 1),
}
"""Integer types that wrap around at numbers which positions and their differences may reach."""
_ROUNDED = frozenset(["Add", "Div", "Max", "Min", "Mul", "Sub"])
_MAX_NUMBERS = 16
"""Numbers that a sum of choices may come to, to be written as one choice."""


def apply(op: str, operands: Sequence[Expression], dtype: ir.DataType | None) -> Expression | None:
    """The result of an element-wise operator, or None where it stays an operator.

    Args:
        op: ONNX operator type.
        operands: Its inputs at the index in question.
        dtype: Element type of the result.
    """
    found = _applied(op, operands, dtype not in FLOATS)
    if found is None or not fits(found, dtype):
        return None
    return _stored(found, dtype) if dtype is not None and dtype in FLOATS and op in _ROUNDED else found


def _stored(part: Expression, dtype: ir.DataType) -> Expression:
    """A choice between computed numbers as the element type holds them: the sum of two lowest numbers is -inf."""
    if isinstance(part, Choice):
        return choice(part.condition, _stored(part.chosen, dtype), _stored(part.other, dtype))
    if not isinstance(part, Number):
        return part
    with np.errstate(over="ignore"):
        return Number(float(np.asarray(part.value).astype(dtype.numpy())))


def fits(part: Expression, dtype: ir.DataType | None) -> bool:
    """Whether index arithmetic stays what it is in an element type, at every index and size."""
    if isinstance(part, Choice):
        return fits(part.chosen, dtype) and fits(part.other, dtype)
    if not isinstance(part, Linear) or dtype is None or (dtype not in _NARROW and dtype not in HALVES):
        return True
    least, most = _NARROW[dtype] if dtype in _NARROW else (-WHOLE_TO[dtype], WHOLE_TO[dtype])
    low, high = bounds(part)
    return isinstance(low, int) and isinstance(high, int) and least <= low and high <= most


def _applied(op: str, operands: Sequence[Expression], integer: bool) -> Expression | None:
    if op in {"BitwiseAnd", "BitwiseOr"}:
        return _bitwise(op, operands)
    if op == "Where":
        return _where(truth(operands[0]), operands[1], operands[2])
    if op in _LOGICAL:
        return _LOGICAL[op](operands)
    if op in COMPARES and len(operands) == 2:
        return _relation(op, operands[0], operands[1])
    if len(operands) == 1:
        return _unary(op, operands[0])
    if op in _NUMERIC and len(operands) == 2:
        return _binary(op, operands[0], operands[1], integer)
    return None


def _where(condition: Expression, chosen: Expression, other: Expression) -> Expression:
    """`chosen` or `other`, each simplified by the condition under which it is read."""
    return choice(condition, _given(condition, chosen), _given(negation(condition), other))


def _given(condition: Expression, part: Expression) -> Expression:
    """An expression where a condition holds: the branch that it decides, or 0 where it says that the expression is 0."""
    if isinstance(part, Choice) and part.condition == condition:
        return _given(condition, part.chosen)
    if isinstance(part, Choice) and part.condition == negation(condition):
        return _given(condition, part.other)
    is_number = isinstance(part, (Element, Linear, Apply)) and not is_truth(part)
    return zero_like(part) if is_number and truth(part) == negation(condition) else part


def cast(inner: Expression, source: ir.DataType | None, target: ir.DataType) -> Expression | None:
    """`inner`, of element type `source`, as another one; None where it stays a Cast, which may round or wrap around."""
    if target == ir.DataType.BOOL:
        return truth(inner)
    if source == ir.DataType.BOOL:
        inner = truth(inner)
    if isinstance(inner, Choice):
        chosen, other = (cast(part, source, target) for part in (inner.chosen, inner.other))
        return None if chosen is None or other is None else choice(inner.condition, chosen, other)
    if is_truth(inner):
        ones = (Number(1.0), Number(0.0)) if target in FLOATS else (constant(1), constant(0))
        return choice(inner, *ones)
    found = _as_float(inner) if target in FLOATS else _as_integer(inner, source)
    return found if found is not None and fits(found, target) else None


def _as_float(inner: Expression) -> Expression:
    if isinstance(inner, Linear) and not inner.terms and isinstance(inner.offset, int):
        return Number(float(inner.offset))
    return inner


def _as_integer(inner: Expression, source: ir.DataType | None) -> Expression | None:
    """A number as an integer, fractions cut off."""
    if isinstance(inner, Number):
        return constant(int(inner.value)) if math.isfinite(inner.value) else None
    return None if source in FLOATS and not isinstance(inner, Linear) else inner


def zero_like(inner: Expression) -> Expression:
    """Zero, or false, of the kind that `inner` is."""
    if is_truth(inner):
        return FALSE
    if isinstance(inner, Choice):
        return zero_like(inner.chosen)
    return constant(0) if isinstance(inner, Linear) else Number(0.0)


def _bitwise(op: str, operands: Sequence[Expression]) -> Expression | None:
    """Bit by bit is as truth values where every bit but the last is 0."""
    if not all(map(is_binary, operands)):
        return None
    joined = (conjunction if op == "BitwiseAnd" else disjunction)(truth(operand) for operand in operands)
    return joined if all(is_truth(operand) for operand in operands) else choice(joined, constant(1), constant(0))


def _exclusive(operands: Sequence[Expression]) -> Expression:
    left, right = (truth(operand) for operand in operands)
    return disjunction([conjunction([left, negation(right)]), conjunction([negation(left), right])])


_LOGICAL: dict[str, Callable[[Sequence[Expression]], Expression]] = {
    "And": lambda operands: conjunction(truth(operand) for operand in operands),
    "Not": lambda operands: negation(truth(operands[0])),
    "Or": lambda operands: disjunction(truth(operand) for operand in operands),
    "Xor": _exclusive,
}
_NUMERIC = frozenset(["Add", "Sub", "Mul", "Div", "Min", "Max", "Mod"])


def as_form(part: Expression) -> Linear | None:
    """An integer expression as a linear form."""
    if isinstance(part, Linear):
        return part
    if isinstance(part, Element):
        return Linear(((part, 1),))
    if isinstance(part, Number) and math.isfinite(part.value) and part.value == int(part.value) and abs(part.value) < 2**31:
        return constant(int(part.value))
    return None


def _relation(op: str, left: Expression, right: Expression) -> Expression | None:
    for first, second, flipped in ((left, right, False), (right, left, True)):
        if isinstance(first, Choice):
            chosen, other = (
                _relation(op, *((second, part) if flipped else (part, second))) for part in (first.chosen, first.other)
            )
            if chosen is None or other is None:
                return None
            return disjunction([conjunction([first.condition, chosen]), conjunction([negation(first.condition), other])])
    for first, second, flipped in ((left, right, False), (right, left, True)):
        if isinstance(first, Apply) and first.op == "Abs" and op != "Equal":
            return _of_distance(op, first.arguments[0], second, flipped)
    for first, second, flipped in ((left, right, False), (right, left, True)):
        if isinstance(first, Apply) and first.op in {"Min", "Max"} and op != "Equal":
            return _of_extremes(op, first, second, flipped)
    if op == "Equal" and is_truth(left) and is_truth(right):
        return negation(_exclusive([left, right]))
    if isinstance(left, Number) and isinstance(right, Number):
        return Truth(_NUMBERS[op](left.value, right.value))
    first, second = as_form(left), as_form(right)
    if first is None or second is None:
        return None
    if op == "Equal":
        return is_zero(combine(first, second, -1))
    low, high = (first, second) if op.startswith("Less") else (second, first)
    form = combine(low, high, -1)
    return at_most_zero(form if op.endswith("Equal") else combine(form, constant(1)))


def _of_distance(op: str, distance: Expression, bound: Expression, flipped: bool) -> Expression | None:
    """A relation between `|distance|` and a bound: both signs must hold where it is to be small, one where it is to be large."""
    form = as_form(distance)
    if form is None:
        return None
    signs = [form, scaled(form, -1)]
    found = [_relation(op, *((bound, sign) if flipped else (sign, bound))) for sign in signs]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    return conjunction(parts) if op.startswith("Less") != flipped else disjunction(parts)


def _of_extremes(op: str, extreme: Apply, bound: Expression, flipped: bool) -> Expression | None:
    """A relation between the least or largest of several and a bound: it holds for all of them, or for any."""
    found = [_relation(op, *((bound, item) if flipped else (item, bound))) for item in extreme.arguments]
    parts = [part for part in found if part is not None]
    if len(parts) < len(found):
        return None
    is_above = op.startswith("Greater") != flipped
    return conjunction(parts) if is_above == (extreme.op == "Min") else disjunction(parts)


_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "Equal": lambda a, b: a == b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
}


def _unary(op: str, part: Expression) -> Expression | None:
    if op == "Neg":
        return _binary("Mul", part, Number(-1.0), integer=False)
    if op == "Log" and isinstance(part, Number) and part.value >= 0:
        return Number(math.log(part.value) if part.value else -math.inf)
    if op == "Log" and isinstance(part, Choice):
        chosen, other = (_unary(op, item) for item in (part.chosen, part.other))
        return None if chosen is None or other is None else choice(part.condition, chosen, other)
    return None


def _binary(op: str, left: Expression, right: Expression, integer: bool) -> Expression | None:
    if isinstance(left, Number) and isinstance(right, Number):
        return _numbers(op, left.value, right.value)
    if isinstance(left, Choice) and isinstance(right, Choice) and left.condition == right.condition:
        pairs = ((left.chosen, right.chosen), (left.other, right.other))
        both = [_binary(op, *pair, integer) for pair in pairs]
        return None if both[0] is None or both[1] is None else choice(left.condition, both[0], both[1])
    for first, second, flipped in ((left, right, False), (right, left, True)):
        if isinstance(first, Choice) and isinstance(second, (Number, Linear)):
            parts = [
                _binary(op, *((second, part) if flipped else (part, second)), integer) for part in (first.chosen, first.other)
            ]
            if parts[0] is None or parts[1] is None:
                return None
            return choice(first.condition, parts[0], parts[1])
    found = _complement(op, left, right) or _bounded_sum(op, left, right)
    if found is not None:
        return found
    one, two = as_form(left), as_form(right)
    if one is None or two is None or (not integer and not (isinstance(left, Linear) and isinstance(right, Linear))):
        return _neutral(op, left, right)
    found = _of_forms(op, one, two, integer)
    return _neutral(op, left, right) if found is None else found


def _of_forms(op: str, one: Linear, two: Linear, integer: bool) -> Expression | None:
    """Arithmetic on index forms, where the result is one."""
    if op in {"Add", "Sub"}:
        return combine(one, two, 1 if op == "Add" else -1)
    if op == "Mul" and not two.terms:
        return scaled(one, two.offset)
    if op == "Mul" and not one.terms:
        return scaled(two, one.offset)
    if op not in {"Div", "Mod"} or two.terms or not integer:
        return None
    if op == "Div" and not one.terms:
        return constant(sizes.floor_quotient(one.offset, two.offset))
    parts = quotient(one, two.offset)
    return None if parts is None else parts[op == "Mod"]


def _numbers(op: str, left: float, right: float) -> Expression | None:
    if op == "Div":
        return Number(left / right) if right else None
    if op == "Mod":
        return None
    table: dict[str, Callable[[float, float], float]] = {
        "Add": lambda a, b: a + b,
        "Max": lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else max(a, b),
        "Min": lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else min(a, b),
        "Mul": lambda a, b: a * b,
        "Sub": lambda a, b: a - b,
    }
    return Number(table[op](left, right))


def _bounded_sum(op: str, left: Expression, right: Expression) -> Expression | None:
    """`max(a + b, number)` or `min(a + b, number)` for choices between numbers a and b, as a choice between numbers."""
    for part, bound in ((left, right), (right, left)):
        if op in {"Max", "Min"} and isinstance(bound, Number) and isinstance(part, Apply) and part.op == "Add":
            total = _total(part)
            return None if total is None else _binary(op, total, bound, integer=False)
    return None


def _total(part: Expression) -> Expression | None:
    """A sum of choices between numbers as one choice between few numbers; None if it is something else."""
    match part:
        case Number():
            return part
        case Choice(condition, chosen, other):
            both = _total(chosen), _total(other)
            return None if both[0] is None or both[1] is None else choice(condition, both[0], both[1])
        case Apply("Add", (left, right)):
            one, two = _total(left), _total(right)
            if one is None or two is None or _count(one) * _count(two) > _MAX_NUMBERS:
                return None
            return _plus(one, two)
        case _:
            return None


def _count(part: Expression) -> int:
    return _count(part.chosen) + _count(part.other) if isinstance(part, Choice) else 1


def _plus(one: Expression, two: Expression) -> Expression | None:
    """The sum of two choices between numbers, which are the first's branches with the second in each."""
    if not isinstance(one, Choice):
        return _binary("Add", one, two, integer=False)
    both = _plus(one.chosen, two), _plus(one.other, two)
    return None if both[0] is None or both[1] is None else choice(one.condition, both[0], both[1])


def _complement(op: str, left: Expression, right: Expression) -> Expression | None:
    """`(1 - m) · fill` for a mask m of zeros and ones: 0 where m is set, fill where it is not."""
    if op == "Sub" and left in {Number(1.0), constant(1)} and isinstance(right, Element):
        return Apply("Complement", (right,))
    for first, second in ((left, right), (right, left)):
        if op == "Mul" and isinstance(first, Apply) and first.op == "Complement" and isinstance(second, Number):
            if not math.isfinite(second.value):
                return None
            return choice(truth(first.arguments[0]), Number(0.0), second)
    return None


def _neutral(op: str, left: Expression, right: Expression) -> Expression | None:
    """Adding 0 and multiplying by 1."""
    if op == "Add":
        for first, second in ((left, right), (right, left)):
            if first == Number(0.0):
                return second
    if op in {"Mul", "Div"} and right in {Number(1.0), constant(1)}:
        return left
    return None
