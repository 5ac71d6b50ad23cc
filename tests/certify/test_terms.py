"""Normal forms of terms, held against plain evaluation, and what must not be simplified."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from onnx_attnfuse.certify import arithmetic, sums
from onnx_attnfuse.certify.softmaxes import gathered, is_masked, is_minus_infinity, without_row
from onnx_attnfuse.certify.terms import (
    FALSE,
    MASKLIKE,
    NINF,
    TRUE,
    Term,
    add,
    element,
    index,
    ite,
    multiply,
    number,
    size,
    substitute,
)
from tests.support.term_values import Values

N, P = size("n"), size("p")
ROW, KEY = index("i", N), index("j", add(N, P))
_BINARY: list[Callable[[Term, Term], Term]] = [
    add, multiply, arithmetic.subtract, arithmetic.larger, arithmetic.smaller,
    lambda one, other: ite(arithmetic.at_most(one, other), one, multiply(other, number(2))),
    lambda one, other: ite(arithmetic.equals(one, other), number(3), other),
    lambda one, other: arithmetic.divide(one, number(3)), lambda one, other: arithmetic.modulo(one, number(4)),
    lambda one, other: arithmetic.divide(add(multiply(one, N), ROW), N),
]  # fmt: skip
_PLAIN: list[Callable[[int, int, dict[str, int]], int]] = [
    lambda a, b, v: a + b, lambda a, b, v: a * b, lambda a, b, v: a - b, lambda a, b, v: max(a, b), lambda a, b, v: min(a, b),
    lambda a, b, v: a if a <= b else 2 * b, lambda a, b, v: 3 if a == b else b, lambda a, b, v: a // 3, lambda a, b, v: a % 4,
    lambda a, b, v: (a * v["n"] + v["i"]) // v["n"],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_an_integer_is_simplified_to_what_it_is(seed: int) -> None:
    chance = random.Random(seed)
    leaves: list[tuple[Term, Callable[[dict[str, int]], int]]] = [
        (ROW, lambda v: v["i"]), (KEY, lambda v: v["j"]), (N, lambda v: v["n"]), (P, lambda v: v["p"]), (number(5), lambda v: 5),
        (number(-2), lambda v: -2),
    ]  # fmt: skip
    for _ in range(6):
        (one, first), (other, second) = chance.choice(leaves), chance.choice(leaves)
        place = chance.randrange(len(_BINARY))
        plain = _PLAIN[place]
        leaves.append((_BINARY[place](one, other), lambda v, a=first, b=second, f=plain: f(a(v), b(v), v)))
    term, expected = leaves[-1]
    for n, p in itertools.product((1, 2, 5), (0, 1, 3)):
        for i, j in itertools.product(range(n), range(n + p)):
            found = Values({"n": n, "p": p}, {}).of(term, {ROW: i, KEY: j})
            assert found == expected({"n": n, "p": p, "i": i, "j": j})


def test_a_length_that_may_be_0_is_not_taken_for_positive() -> None:
    assert arithmetic.is_nonnegative(N)
    assert not arithmetic.is_nonnegative(arithmetic.subtract(N, number(1)))
    assert arithmetic.is_nonnegative(arithmetic.subtract(arithmetic.subtract(N, ROW), number(1)))


def test_an_index_below_another_length_is_not_taken_for_below_its_own() -> None:
    assert arithmetic.below(ROW, N) is TRUE
    assert arithmetic.below(ROW, add(N, P)) is TRUE
    assert arithmetic.below(KEY, N) not in {TRUE, FALSE}


def test_two_sums_that_differ_in_the_name_of_their_index_are_one() -> None:
    one, other = index("a", N), index("b", N)
    first = sums.total(one, element("v0", "Real", (one, ROW)))
    second = sums.total(other, element("v0", "Real", (other, ROW)))
    assert first is second
    assert first is not sums.total(other, element("v0", "Real", (ROW, other)))


def test_what_is_substituted_is_not_captured_by_an_inner_index() -> None:
    bound = index("a", N)
    summed = sums.total(bound, element("v0", "Real", (bound, ROW)))
    outer = summed.args[0]
    moved = substitute(summed, {ROW: outer})
    assert moved.args[1].args[0] is not moved.args[1].args[1]


def test_a_mask_may_mask_and_an_activation_does_not() -> None:
    mask, activation = element(f"{MASKLIKE}0", "Real", (ROW,)), element("v0", "Real", (ROW,))
    lowest = number(-3.4e38, "Real")
    assert arithmetic.below(lowest, activation) is TRUE
    assert arithmetic.below(lowest, mask) not in {TRUE, FALSE}
    assert is_minus_infinity(add(activation, activation)) is FALSE
    assert is_minus_infinity(add(activation, mask)) is not FALSE
    assert is_masked(activation) is FALSE
    assert is_masked(mask) not in {TRUE, FALSE}
    assert is_masked(NINF) is TRUE


def test_a_number_that_masks_stays_in_a_row_although_it_is_the_same_for_all_keys() -> None:
    bound = index("k", N)
    score = element("v0", "Real", (ROW, bound))
    row = element("v1", "Real", (ROW,))
    assert without_row(bound, add(score, row)) is score
    masked = add(score, number(-3.4e38, "Real"))
    assert without_row(bound, masked) is masked


def test_exponentials_over_another_sum_are_no_softmax() -> None:
    from onnx_attnfuse.certify.softmaxes import function

    bound = index("k", N)
    powers = function("exp", element("v0", "Real", (ROW, bound)))
    others = function("exp", element("v1", "Real", (ROW, bound)))
    values = sums.total(bound, multiply(powers, element("v2", "Real", (bound,))))
    over = function("inverse", sums.total(bound, powers))
    assert any(item.op == "softmax" for item in _parts(gathered(multiply(values, over), is_finite=True)))
    assert gathered(multiply(values, over)) is multiply(values, over)  # exponentials without a maximum may overflow
    wrong = multiply(values, function("inverse", sums.total(bound, others)))
    assert gathered(wrong, is_finite=True) is wrong


def _parts(term: Term) -> list[Term]:
    from onnx_attnfuse.certify.terms import walk

    return list(walk(term))
