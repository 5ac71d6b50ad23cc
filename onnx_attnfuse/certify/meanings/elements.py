"""Operators that compute each element from one element of each input, the Gelus among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays
from onnx_attnfuse.certify.arrays import Array, Unsupported
from onnx_attnfuse.certify.magnitudes import as_float, fitting
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.certify.softmaxes import function, is_minus_infinity, is_nan
from onnx_attnfuse.certify.terms import (
    FALSE,
    NAN,
    NINF,
    ZERO,
    Term,
    add,
    conjoin,
    disjoin,
    is_constants,
    is_fill,
    ite,
    multiply,
    negate,
    number,
    substitute,
    subtract,
    to_real,
    truth,
    walk,
)

_BOOL = ir.DataType.BOOL
_HALF = Fraction(1, 2)
_CUBE, _ROOT_2_OVER_PI = 0.044715, math.sqrt(2 / math.pi)


def _negative(*items: Term) -> Term:
    return multiply(number(-1, items[0].sort), items[0])


def _root(name: str) -> Callable[..., Term]:
    return lambda *items: function(name, *map(to_real, items))


def _greater(*items: Term) -> Term:
    return arithmetic.below(items[1], items[0])


def _greater_or_equal(*items: Term) -> Term:
    return arithmetic.at_most(items[1], items[0])


def _different(*items: Term) -> Term:
    return negate(arithmetic.equals(items[0], items[1]))


def _binary(compute: Callable[..., Term], dtype: ir.DataType | None = None) -> Meaning:
    def meaning(call: Call) -> Sequence[Array]:
        inputs = [call.array(place) for place in range(len(call.inputs))]
        return [arrays.elementwise(inputs, dtype or inputs[0].dtype, compute)]

    return meaning


def _floating(compute: Callable[..., Term]) -> Meaning:
    """The meaning of an operator whose result is rounded."""

    def meaning(call: Call) -> Sequence[Array]:
        inputs = [call.array(place) for place in range(len(call.inputs))]
        dtype = inputs[0].dtype
        return [arrays.elementwise(inputs, dtype, lambda *items: as_float(compute(*items), dtype))]

    return meaning


def _unary(name: str) -> Meaning:
    return _binary(_root(name))


def inverse(term: Term) -> Term:
    """One over a real number."""
    return function("inverse", term)


def _divide(left: Term, right: Term) -> Term:
    if left.sort == "Int":
        if right.op == "const" and right.data > 0 and arithmetic.is_nonnegative(left):
            return arithmetic.divide(left, right)
        if _is_of_sizes(left) and (right.data > 0 if right.op == "const" else arithmetic.is_nonnegative(right)):
            return arithmetic.divide(left, right)
        if arithmetic.is_nonnegative(left) and arithmetic.is_nonnegative(right):
            return arithmetic.divide(left, right)
        raise Unsupported("a quotient of integers that may be negative, which is rounded to 0")
    if right.op == "const" and right.data:
        return multiply(left, number(1 / right.data, "Real"))
    return multiply(left, inverse(right))


def _modulo(call: Call) -> Sequence[Array]:
    inputs, takes_sign = [call.array(0), call.array(1)], call.attribute("fmod", 0)
    if inputs[0].sort != "Int":
        raise Unsupported("Mod of floats")

    def compute(left: Term, right: Term) -> Term:
        if not (right.op == "const" and right.data > 0) and not arithmetic.is_nonnegative(right):
            raise Unsupported("a remainder of a divisor that may be negative")
        if takes_sign and not arithmetic.is_nonnegative(left):
            raise Unsupported("a remainder of the sign of the dividend")
        return arithmetic.modulo(left, right)

    return [arrays.elementwise(inputs, inputs[0].dtype, compute)]


def _power(left: Term, right: Term) -> Term:
    if right.op == "const" and right.data in {1, 2}:
        return left if right.data == 1 else multiply(left, left)
    if right.op == "const" and left.sort == "Real":
        if right.data == _HALF:
            return function("sqrt", left)
        if right.data == -_HALF:
            return inverse(function("sqrt", left))
    if left.sort == "Int":
        raise Unsupported("a power of integers")
    return function("pow", left, to_real(right))


def absolute(term: Term) -> Term:
    """The number without its sign."""
    if term.sort == "Int":
        return arithmetic.larger(multiply(number(-1), term), term)
    zero = number(0, term.sort)
    return ite(arithmetic.below(term, zero), multiply(number(-1, term.sort), term), term)


def _where(call: Call) -> Sequence[Array]:
    inputs = [call.array(place) for place in range(3)]
    return [arrays.elementwise(inputs, inputs[1].dtype, _chosen)]


def _chosen(test: Term, then: Term, other: Term) -> Term:
    """A choice; where the test asks what an operand chooses by, as of a mask that is held against a number, that comes first."""
    for operand in (then, other):
        if operand.op == "ite" and any(item is operand.args[0] for item in walk(test)):
            first = operand.args[0]
            sides = ({first: truth(True)}, {first: truth(False)})
            return ite(first, *(_chosen(*(substitute(item, side) for item in (test, then, other))) for side in sides))
    return ite(test, then, other)


def _clip(call: Call) -> Sequence[Array]:
    data = call.array(0)
    low, high = call.optional(1), call.optional(2)
    bounds = [call.attribute("min") if low is None else None, call.attribute("max") if high is None else None]
    if bounds != [None, None]:
        raise Unsupported("Clip by attributes")

    def read(place: arrays.Index) -> Term:
        item = data.at(*place)
        item = item if low is None else _larger(item, low.at(*[ZERO] * low.rank))
        return item if high is None else _smaller(item, high.at(*[ZERO] * high.rank))

    return [Array(data.shape, data.dtype, read)]


def cast(term: Term, target: ir.DataType) -> Term:
    """An element as another type: real numbers stay the same, but for constants, which are rounded."""
    if target == _BOOL:
        return term if term.sort == "Bool" else negate(arithmetic.equals(term, number(0, term.sort)))
    if target.is_floating_point():
        return _rounded(to_real(term), target)
    if term.sort == "Bool":
        return ite(term, number(1), number(0))
    if term.sort == "Int":
        return fitting(term, target)
    if term.op == "ite":
        return ite(term.args[0], cast(term.args[1], target), cast(term.args[2], target))
    if term.op == "const":
        return number(int(term.data))
    if term.op == "real":
        return term.args[0]
    raise Unsupported("a float that is made an integer")


def _rounded(term: Term, target: ir.DataType) -> Term:
    if term.op == "ite" and (is_fill(term) or any(item.op == "const" for item in term.args[1:])):
        return ite(term.args[0], _rounded(term.args[1], target), _rounded(term.args[2], target))
    if term.op != "const":
        return term
    with np.errstate(over="ignore"):
        return arrays.literal(np.asarray(float(term.data)).astype(target.numpy()), "Real")


def _cast(call: Call) -> Sequence[Array]:
    data = call.array(0)
    target = call.array(1).dtype if call.node.op_type == "CastLike" else ir.DataType(call.attribute("to"))
    arrays.sort_of(target)
    return [Array(data.shape, target, lambda place: cast(data.at(*place), target))]


def _is_infinite(call: Call) -> Sequence[Array]:
    data = call.array(0)
    negative = call.attribute("detect_negative", 1)
    return [Array(data.shape, _BOOL, lambda place: is_minus_infinity(data.at(*place)) if negative else FALSE)]


def _logarithm(term: Term) -> Term:
    """The logarithm of a choice of constants; of 0 it is minus infinity, as that of anything else may be."""
    if term.op == "ite":
        return ite(term.args[0], _logarithm(term.args[1]), _logarithm(term.args[2]))
    if term.op != "const":
        raise Unsupported("a logarithm of a number that may be 0")
    return function("log", term) if term.data > 0 else NINF if not term.data else NAN


def _largest(*items: Term) -> Term:
    return reduce(_larger, items)


def _smallest(*items: Term) -> Term:
    return reduce(_smaller, items)


def _larger(left: Term, right: Term) -> Term:
    return _extreme(left, right, arithmetic.larger)


def _smaller(left: Term, right: Term) -> Term:
    return _extreme(left, right, arithmetic.smaller)


def _extreme(left: Term, right: Term, choose: Callable[[Term, Term], Term]) -> Term:
    """The larger or smaller of two numbers, drawn into a choice between constants."""
    if NAN in {left, right}:
        return NAN
    for one, other in ((left, right), (right, left)):
        if is_constants(one) and (one.sort == "Int" or other.op in {"const", "ninf"} or is_constants(other)):
            return ite(one.args[0], *(_extreme(part, other, choose) for part in one.args[1:]))
    return choose(left, right)


def _bitwise(compute: Callable[[int, int], int]) -> Callable[[Term, Term], Term]:
    """An operator on the bits of two integers that are constants, or choices between such."""

    def meaning(left: Term, right: Term) -> Term:
        for place, item in enumerate((left, right)):
            if is_constants(item):
                parts = [(part, right) if place == 0 else (left, part) for part in item.args[1:]]
                return ite(item.args[0], *(meaning(*part) for part in parts))
        if left.op != "const" or right.op != "const":
            raise Unsupported("bits of an integer that is computed")
        return number(compute(int(left.data), int(right.data)))

    return meaning


def _bitwise_not(call: Call) -> Sequence[Array]:
    data = call.array(0)
    ones = number(-1 if data.dtype.is_signed() else (1 << int(data.dtype.bitwidth)) - 1)
    return [Array(data.shape, data.dtype, lambda place: subtract(ones, data.at(*place)))]


def _sign(term: Term) -> Term:
    one, zero = number(1, term.sort), number(0, term.sort)
    return ite(arithmetic.below(zero, term), one, ite(arithmetic.below(term, zero), number(-1, term.sort), zero))


def _gelu(item: Term) -> Term:
    return _half_times_one_and(item, function("erf", multiply(item, number(math.sqrt(0.5), "Real"))))


def _fast_gelu(item: Term) -> Term:
    cube = multiply(multiply(multiply(item, item), item), number(_CUBE, "Real"))
    return _half_times_one_and(item, function("tanh", multiply(add(item, cube), number(_ROOT_2_OVER_PI, "Real"))))


def _half_times_one_and(item: Term, inner: Term) -> Term:
    return multiply(multiply(item, number(_HALF, "Real")), add(inner, number(1, "Real")))


def _gelu_of_a_sum(call: Call) -> Sequence[Array]:
    """Gelu, BiasGelu or FastGelu, of an input and its bias."""
    compute = _fast_gelu if call.node.op_type == "FastGelu" or call.attribute("approximate", "none") == "tanh" else _gelu
    parts = [call.array(0), *([] if call.optional(1) is None else [call.array(1)])]

    def computed(*items: Term) -> Term:
        return compute(add(*items))

    return [arrays.elementwise(parts, parts[0].dtype, computed)]


def _quick_gelu(call: Call) -> Sequence[Array]:
    alpha, data = number(call.attribute("alpha", 1.702), "Real"), call.array(0)

    def computed(item: Term) -> Term:
        return multiply(item, function("sigmoid", multiply(item, alpha)))

    return [arrays.elementwise([data], data.dtype, computed)]


MEANINGS: Mapping[str, Meaning] = {
    "Add": _floating(add), "Sum": _floating(add), "Sub": _floating(subtract), "Mul": _floating(multiply),
    "Div": _binary(_divide), "Neg": _floating(_negative), "Mod": _modulo, "Abs": _binary(absolute),
    "Pow": _binary(_power), "Reciprocal": _binary(inverse), "Max": _binary(_largest), "Min": _binary(_smallest),
    "Equal": _binary(arithmetic.equals, _BOOL), "Less": _binary(arithmetic.below, _BOOL),
    "LessOrEqual": _binary(arithmetic.at_most, _BOOL),
    "Greater": _binary(_greater, _BOOL),
    "GreaterOrEqual": _binary(_greater_or_equal, _BOOL),
    "And": _binary(conjoin), "Or": _binary(disjoin), "Not": _binary(negate),
    "Xor": _binary(_different),
    "BitwiseAnd": _binary(_bitwise(int.__and__)), "BitwiseOr": _binary(_bitwise(int.__or__)),
    "BitwiseXor": _binary(_bitwise(int.__xor__)), "BitwiseNot": _bitwise_not,
    "Where": _where, "Clip": _clip, "Sign": _binary(_sign),
    "Cast": _cast, "CastLike": _cast, "IsNaN": _binary(is_nan, _BOOL), "IsInf": _is_infinite,
    "Log": _binary(_logarithm),
    **{name: _unary(name.lower()) for name in "Sqrt Exp Tanh Sin Cos Floor Ceil Erf Relu Sigmoid Softplus".split()},
    "Gelu": _gelu_of_a_sum,
}  # fmt: skip
CONTRIB_MEANINGS: Mapping[str, Meaning] = {
    "Gelu": _gelu_of_a_sum, "BiasGelu": _gelu_of_a_sum, "FastGelu": _gelu_of_a_sum, "QuickGelu": _quick_gelu,
}  # fmt: skip


def _is_of_sizes(term: Term) -> bool:
    """Whether an integer is computed from sizes alone."""
    return (
        term.op in {"size", "const"}
        or (term.op in {"poly", "div", "mod", "ite"} and all(map(_is_of_sizes, term.args)))
        or (term.op in {"le0", "eq0", "not", "and", "or"} and all(map(_is_of_sizes, term.args)))
    )
