"""Proofs of patterns' formulas: what is written against what it means, with a near miss each."""

from __future__ import annotations

import pathlib

import pytest

from onnx_attnfuse.language import Pattern, Tensor, any_of, concat, equation, exp, log, log_softmax, pattern, softmax
from onnx_attnfuse.language import max as largest
from onnx_attnfuse.language import sum as total
from onnx_attnfuse.testing.formulas import proofs
from onnx_attnfuse_cli.main import main

GALLERY = pathlib.Path(__file__).parents[2] / "patterns" / "gallery"


def _sink(count: float, shift: float) -> Pattern:
    @pattern
    def with_a_sink(scores: Tensor, v: Tensor) -> object:
        plain = exp(scores) / (count + total(exp(scores)))
        shifted = exp(scores - largest(scores)) / (exp(shift - largest(scores)) + total(exp(scores - largest(scores))))
        return equation(written=any_of("form", plain=plain, shifted=shifted) @ v, meaning=softmax(scores, sink=0) @ v)

    return with_a_sink


def test_a_sink_is_proved_in_both_spellings_and_another_one_in_neither() -> None:
    assert [proof.proved for proof in proofs(_sink(1, 0))] == [True, True]
    assert [proof.proved for proof in proofs(_sink(2, 1))] == [False, False]


@pytest.mark.parametrize(("factor", "proved"), [(1, True), (2, False)])
def test_a_softmax_of_exponentials_is_proved_of_its_own_scores_only(factor: float, proved: bool) -> None:
    @pattern
    def spelled(scores: Tensor, v: Tensor) -> object:
        return equation(written=exp(scores) / total(exp(scores)) @ v, meaning=softmax(scores * factor) @ v)

    (found,) = proofs(spelled)
    assert found.proved == proved
    assert str(found).startswith("proved for all sizes" if proved else "not proved: open is ")


@pytest.mark.parametrize(("factor", "proved"), [(1, True), (2, False)])
def test_an_exponential_of_logarithms_is_a_softmax_of_its_own_scores_only(factor: float, proved: bool) -> None:
    @pattern
    def by_difference(scores: Tensor, v: Tensor) -> object:
        return equation(written=exp(scores - log(total(exp(scores * factor)))) @ v, meaning=softmax(scores) @ v)

    @pattern
    def of_logarithms(scores: Tensor, v: Tensor) -> object:
        return equation(written=exp(log_softmax(scores)) @ v, meaning=softmax(scores * factor) @ v)

    assert [proof.proved for item in (by_difference, of_logarithms) for proof in proofs(item)] == [proved, proved]


@pytest.mark.parametrize("kind", ["scores", "mask"])
def test_a_logarithm_of_what_may_be_0_is_not_proved(kind: str) -> None:
    @pattern
    def of_scores(scores: Tensor, v: Tensor) -> object:
        return equation(written=exp(scores - log(total(scores))) @ v, meaning=softmax(scores) @ v)

    @pattern
    def of_a_mask(scores: Tensor, mask: Tensor, v: Tensor) -> object:
        written = exp(scores + mask - log(total(exp(scores + mask)))) @ v
        return equation(written=written, meaning=softmax(scores + mask) @ v)

    (found,) = proofs(of_scores if kind == "scores" else of_a_mask)
    assert str(found) == "not proved: a logarithm of a number that may be 0"


@pytest.mark.parametrize(("crossed", "proved"), [(False, True), (True, False)])
def test_a_sum_over_channels_is_split_where_both_sides_are_put_together(crossed: bool, proved: bool) -> None:
    @pattern
    def two_products(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> object:
        keys = concat(k2, k1) if crossed else concat(k1, k2)
        return equation(written=softmax(q1 @ k1.T + q2 @ k2.T) @ v, meaning=softmax(concat(q1, q2) @ keys.T) @ v)

    assert [proof.proved for proof in proofs(two_products)] == [proved]


def test_a_formula_that_restates_itself_has_nothing_to_prove() -> None:
    @pattern
    def plain(scores: Tensor, v: Tensor) -> object:
        return softmax(scores) @ v

    assert list(proofs(plain)) == []


def test_the_command_tells_what_is_proved_of_a_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patterns", "check", str(GALLERY / "softmax_one.py")]) == 0
    assert capsys.readouterr().out.count("formula: proved for all sizes") == 2
