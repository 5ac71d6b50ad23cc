"""Element-wise operators on terms: the order of float additions, choices between numbers, and linear forms."""

from __future__ import annotations

import math

import onnx_ir as ir
import pytest

from onnx_attnfuse.attention.masks import operators
from onnx_attnfuse.certify import terms
from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.terms import Term

FLOAT, HALF, INT8, INT64 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8, ir.DataType.INT64
ROW, KEY = (terms.index(name, terms.number(100)) for name in "ij")
MASK = terms.element("v0", "Int", (KEY,))
LOWEST = -3.4028234663852886e38


def chosen(then: float, other: float) -> Term:
    return terms.ite(terms.element("v1", "Bool", (KEY,)), operators.literal(then), operators.literal(other))


def leaves(term: Term) -> set[float | None]:
    return {leaf for part in term.args[1:] for leaf in leaves(part)} if term.op == "ite" else {operators.float_of(term)}


def test_the_order_of_float_additions_is_kept() -> None:
    one, two = chosen(0, -1e9), terms.element("v2", "Real", (KEY,))
    found = operators.apply("Add", (operators.apply("Add", (two, one), FLOAT), two), FLOAT)
    assert (found.op, found.data, found.args[1]) == ("apply", "Add", two)
    assert found.args[0].args == (two, one)


def test_choices_between_numbers_are_computed_as_their_type_holds_them() -> None:
    assert leaves(operators.apply("Mul", (chosen(0, 2), operators.literal(LOWEST)), FLOAT)) == {0, -math.inf}
    assert leaves(operators.apply("Sub", (chosen(0, 1), operators.literal(1)), FLOAT)) == {-1, 0}
    assert leaves(operators.apply("Mul", (chosen(0, 2), operators.literal(-5e4)), HALF)) == {0, -math.inf}


@pytest.mark.parametrize(
    ("op", "bound", "read"),
    [("Less", 3.0, {False, True}), ("Greater", -1.0, {True}), ("Equal", -5.0, {False, True}), ("GreaterOrEqual", 4.5, {False})],
)
def test_choices_are_compared_number_by_number(op: str, bound: float, read: set[bool]) -> None:
    found = operators.apply(op, (chosen(0, 4) if op != "Equal" else chosen(0, -5), operators.literal(bound)), ir.DataType.BOOL)
    assert ({found.data} if found.op == "const" else {False, True}) == read


def test_one_minus_a_mask_times_a_number_is_a_choice() -> None:
    real = operators.cast(MASK, INT64, FLOAT)
    complement = operators.apply("Sub", (operators.literal(1), real), FLOAT)
    found = operators.apply("Mul", (complement, operators.literal(-1e4)), FLOAT)
    assert (found.op, leaves(found)) == ("ite", {0, -1e4})
    twice = operators.apply("Sub", (operators.literal(2), real), FLOAT)
    assert operators.apply("Mul", (twice, operators.literal(-1e4)), FLOAT).op == "apply"


def test_one_minus_an_integer_mask_times_a_number_is_a_choice_too() -> None:
    real = operators.cast(terms.subtract(terms.ONE, MASK), INT64, FLOAT)
    assert leaves(operators.apply("Mul", (real, operators.literal(-1e4)), FLOAT)) == {0, -1e4}
    less = operators.cast(terms.subtract(terms.ZERO, MASK), INT64, FLOAT)
    assert operators.apply("Mul", (less, operators.literal(-1e4)), FLOAT).op == "apply"


def test_positions_are_floats_only_where_these_hold_them() -> None:
    far = terms.add(KEY, terms.number(3000))
    assert operators.cast(KEY, INT64, HALF).op == "real"
    assert operators.cast(far, INT64, FLOAT).op == "real"
    with pytest.raises(Unsupported):
        operators.cast(far, INT64, HALF)
    assert operators.fits(terms.subtract(KEY, ROW), INT8)
    assert not operators.fits(terms.add(KEY, KEY), INT8)


@pytest.mark.parametrize(("bound", "read"), [(-10.0, {-10.0, 0.0}), (-1e5, {-2e4, -1e4, 0.0})])
def test_a_sum_of_choices_held_above_a_number_is_a_choice(bound: float, read: set[float]) -> None:
    other = terms.ite(terms.element("v3", "Bool", (ROW,)), operators.literal(0), operators.literal(-1e4))
    total = operators.apply("Add", (chosen(0, -1e4), other), FLOAT)
    assert total.op == "apply"
    assert leaves(operators.apply("Max", (total, operators.literal(bound)), FLOAT)) == read


def test_quotients_and_products_of_indices_are_no_forms() -> None:
    assert operators.is_form(terms.add(KEY, terms.multiply(terms.size("t"), ROW)))
    assert not operators.is_form(terms.multiply(ROW, KEY))
    assert not operators.is_form(terms.make("div", "Int", (KEY, terms.number(3))))
    assert operators.is_form(terms.make("div", "Int", (terms.size("t"), terms.number(3))))
