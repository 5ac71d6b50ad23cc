"""Symbolic sizes against the integers they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim, evaluate, symbol

NAMES = ("batch", "past", "seq")
Values = dict[str, int]
Expression = tuple[Dim, Callable[[Values], int]]
"""A size, and the same computed by Python from the symbols' values."""


def number(value: int) -> Expression:
    return value, lambda values: value


def named(name: str) -> Expression:
    return symbol(name), lambda values: values[name]


def combined(first: Expression, second: Expression, operator: str) -> Expression:
    (left, left_value), (right, right_value) = first, second
    compute: dict[str, tuple[Callable[[Dim, Dim], Dim], Callable[[int, int], int]]] = {
        "+": (lambda a, b: a + b, lambda a, b: a + b),
        "-": (lambda a, b: a - b, lambda a, b: a - b),
        "*": (lambda a, b: a * b, lambda a, b: a * b),
        "max": (sizes.maximum, max),
        "min": (sizes.minimum, min),
    }
    symbolic, plain = compute[operator]
    return symbolic(left, right), lambda values: plain(left_value(values), right_value(values))


def divided(first: Expression, divisor: int) -> Expression:
    size, value = first
    return sizes.floor_quotient(size, divisor), lambda values: value(values) // divisor


leaves = st.integers(-3, 8).map(number) | st.sampled_from(NAMES).map(named)
expressions = st.recursive(
    leaves,
    lambda inner: (
        st.builds(combined, inner, inner, st.sampled_from(["+", "-", "*", "max", "min"]))
        | st.builds(divided, inner, st.integers(1, 5))
    ),
    max_leaves=10,
)
linear = st.recursive(
    leaves,
    lambda inner: (
        st.builds(combined, inner, inner, st.sampled_from(["+", "-"]))
        | st.builds(combined, st.integers(-4, 4).map(number), inner, st.just("*"))
    ),
    max_leaves=8,
)
values = st.fixed_dictionaries({name: st.integers(1, 30) for name in NAMES})


@given(expressions, values)
def test_a_size_evaluates_to_what_python_computes(expression: Expression, values: Values) -> None:
    size, value = expression
    assert evaluate(size, values) == value(values)


@given(linear, linear, linear)
def test_linear_sizes_are_equal_however_they_were_added_up(a: Expression, b: Expression, c: Expression) -> None:
    x, y, z = a[0], b[0], c[0]
    assert (x + y) + z == x + (y + z)
    assert x + y == y + x
    assert hash(x + y) == hash(y + x)
    assert x + y - y == x


@given(linear, values)
def test_linear_sizes_that_differ_somewhere_are_not_equal(a: Expression, values: Values) -> None:
    size = a[0]
    assert size + 1 != size
    assert evaluate(size + symbol("batch") - size, values) == values["batch"]


@given(st.lists(linear, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_largest_of_several_is_the_same_in_every_order(several: list[Expression], random: Random) -> None:
    dims = [size for size, _ in several]
    shuffled = random.sample(dims, len(dims))
    assert functools.reduce(sizes.maximum, dims) == functools.reduce(lambda a, b: sizes.maximum(b, a), shuffled)


def test_what_operands_broadcast_to_is_the_largest_of_them_that_a_graph_computes() -> None:
    batch, past, seq = map(symbol, NAMES)
    largest = sizes.maximum(sizes.maximum(batch, past), seq)
    assert sizes.broadcast((batch, largest)) == largest == sizes.broadcast((batch, past, seq))
    floored = sizes.maximum(batch, 2)
    assert sizes.broadcast((floored, 1)) == floored, "2 is a length that it may have, and not the one that it has"


@given(st.sampled_from(NAMES), linear, linear)
def test_a_shared_symbol_is_taken_out_of_a_sum(name: str, a: Expression, b: Expression) -> None:
    shared = symbol(name)
    assume(all(not isinstance(size, sizes.Size) or len(size.atoms) == 1 for size in (a[0], b[0], a[0] + b[0])))
    assert shared * a[0] + shared * b[0] == shared * (a[0] + b[0])


@given(expressions, expressions)
def test_a_product_divides_by_each_of_its_factors(a: Expression, b: Expression) -> None:
    assume(b[0] != 0)
    assert sizes.exact_quotient(a[0] * b[0], b[0]) == a[0]


@given(expressions, expressions, values)
def test_an_exact_quotient_times_its_divisor_is_the_dividend(a: Expression, b: Expression, values: Values) -> None:
    quotient = sizes.exact_quotient(a[0], b[0])
    if quotient is not None:
        assert evaluate(quotient, values) * b[1](values) == a[1](values)


def test_a_quotient_that_may_have_a_remainder_is_not_exact() -> None:
    seq = symbol("seq")
    assert sizes.exact_quotient(seq, 2) is None
    assert sizes.exact_quotient(6, 4) is None
    assert sizes.exact_quotient(6, seq) is None
    assert sizes.exact_quotient(seq, symbol("batch")) is None
    assert sizes.exact_quotient(seq, 0) is None
    assert sizes.exact_quotient(0, seq) == 0
    assert sizes.floor_quotient(seq, 2) != sizes.floor_quotient(seq, 3)
    assert sizes.floor_quotient(seq + 4, 2) == sizes.floor_quotient(seq, 2) + 2 != sizes.floor_quotient(seq + 3, 2) + 2


@given(expressions)
def test_only_symbols_that_matter_are_named(expression: Expression) -> None:
    size = expression[0]
    named = sizes.symbols(size)
    assert named <= set(NAMES)
    assert evaluate(size, dict.fromkeys(named, 7)) == expression[1](dict.fromkeys(NAMES, 7))


@given(linear)
def test_a_sum_is_made_of_its_summands(expression: Expression) -> None:
    parts = sizes.summands(expression[0])
    assert sum(parts, start=0) == expression[0]
    assert all(len(sizes.summands(part)) == 1 for part in parts)


@given(st.lists(expressions, max_size=4), values)
def test_a_product_of_sizes_is_that_of_their_values(factors: list[Expression], values: Values) -> None:
    expected = 1
    for _, value in factors:
        expected *= value(values)
    assert evaluate(sizes.product(size for size, _ in factors), values) == expected


@given(expressions, values)
def test_a_printed_size_is_read_back(expression: Expression, values: Values) -> None:
    size = expression[0]
    text = str(size)
    assume(isinstance(size, sizes.Size))
    read = sizes.parse(text)
    assert read is not None
    assert evaluate(read, values) == expression[1](values)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("past + seq", symbol("seq") + symbol("past")),
        ("2*seq", symbol("seq") * 2),
        ("(past + seq)*batch", symbol("batch") * symbol("past") + symbol("batch") * symbol("seq")),
        ("seq - 1", symbol("seq") - 1),
        ("-1 + seq", symbol("seq") - 1),
        ("seq//2", sizes.floor_quotient(symbol("seq"), 2)),
        ("4*seq//2", symbol("seq") * 2),
        ("Max(0, -Min(8, past) + seq)", sizes.maximum(0, symbol("seq") - sizes.minimum(8, symbol("past")))),
        ("min(seq, past, 4)", sizes.minimum(sizes.minimum(symbol("seq"), symbol("past")), 4)),
    ],
)
def test_dimension_names_that_are_arithmetic_are_computed(text: str, same: Dim) -> None:
    assert sizes.parse(text) == same


@pytest.mark.parametrize(
    "text", ["sequence length", "input.1_dim_0", "s**2", "seq % 2", "-", "Max(s0)", "Mod(s0, 2)", "Gather_1_o0__d2"]
)
def test_other_dimension_names_are_symbols(text: str) -> None:
    assert sizes.parse(text) == symbol(text)


@pytest.mark.parametrize(("text", "number"), [("7", 7), ("2 + 3", 5)])
def test_a_dimension_name_that_is_a_number_is_that_number(text: str, number: int) -> None:
    assert sizes.parse(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "seq - seq"])
def test_a_dimension_name_that_is_no_length_says_nothing(text: str) -> None:
    assert sizes.parse(text) is None


def test_a_symbol_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        evaluate(symbol("seq") + 1, {"batch": 1})


@pytest.mark.parametrize(
    ("present", "length"),
    [({symbol("seq")}, symbol("seq") + 1), ({symbol("past")}, symbol("seq") + sizes.minimum(1, symbol("seq")))],
)
def test_the_smaller_of_one_and_what_is_not_empty_is_one(present: set[Dim], length: Dim) -> None:
    assert sizes.not_empty(symbol("seq") + sizes.minimum(1, symbol("seq")), present) == length
