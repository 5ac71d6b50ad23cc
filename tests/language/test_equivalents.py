"""What one operator computes and what several do are one thing to a pattern, whichever of them its author and the graph write."""

from __future__ import annotations

from typing import Any

import pytest

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.language import (
    Pattern,
    Tensor,
    absolute,
    equation,
    exp,
    log,
    log_softmax,
    max,  # noqa: A004
    pattern,
    softmax,
    sqrt,
    sum,  # noqa: A004
)
from onnx_attnfuse.language.matcher.discrimination_net import Net
from onnx_attnfuse.language.normal_form import equivalents, normal
from onnx_attnfuse.testing import assert_fuses, assert_refuses

HEAD = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float two = {2}, float three = {3}, float low = {0.125}, int64[1] last = {-1}>
{
    raw = MatMul(q, k)
    x = Mul(raw, low)
    """
SOFTMAX = """
    d = Sub(x, l)
    w = Exp(d)
    out = MatMul(w, v)
}"""
LOGARITHMS = {
    "one operator": "l = ReduceLogSumExp<keepdims = 1>(x, last)",
    "one and a logarithm": "e = Exp(x)\n l = ReduceLogSum<keepdims = 1>(e, last)",
    "three": "e = Exp(x)\n t = ReduceSum<keepdims = 1>(e, last)\n l = Log(t)",
    "the maximum taken out": """m = ReduceMax<keepdims = 1>(x, last)
    s = Sub(x, m)
    e = Exp(s)
    t = ReduceSum<keepdims = 1>(e, last)
    g = Log(t)
    l = Add(g, m)""",
}


@pattern
def plainly(x: Tensor, v: Tensor) -> Any:
    """Without the maximum."""
    return equation(exp(x - log(sum(exp(x)))) @ v, softmax(x) @ v)


@pattern
def stably(x: Tensor, v: Tensor) -> Any:
    """With it."""
    return equation(exp(x - (max(x) + log(sum(exp(x - max(x)))))) @ v, softmax(x) @ v)


@pytest.mark.parametrize("made", [plainly, stably], ids=lambda made: made.name)
@pytest.mark.parametrize("name", LOGARITHMS)
def test_a_logarithm_of_a_sum_of_exponentials_is_found_in_every_spelling(name: str, made: Pattern) -> None:
    assert_fuses(HEAD + LOGARITHMS[name] + SOFTMAX, made, sites=1)


@pytest.mark.parametrize("name", LOGARITHMS)
def test_the_built_in_pack_reads_it_too(name: str) -> None:
    (site,) = assert_fuses(HEAD + LOGARITHMS[name] + SOFTMAX, sites=1).report.sites
    assert site.pattern is not None
    assert site.pattern.startswith("softmax_by_difference")


NEARLY = {
    "along another axis": LOGARITHMS["one operator"]
    .replace("x, last", "x, rows")
    .replace("l =", "rows = Constant<value_ints = [2]>()\n l ="),
    "of a sum without exponentials": "l = ReduceLogSum<keepdims = 1>(x, last)",
    "the maximum of something else": LOGARITHMS["the maximum taken out"].replace(
        "ReduceMax<keepdims = 1>(x", "ReduceMax<keepdims = 1>(raw"
    ),
    "the maximum not put back": LOGARITHMS["the maximum taken out"].replace("Add(g, m)", "Add(g, g)"),
}


@pytest.mark.parametrize("made", [plainly, stably], ids=lambda made: made.name)
@pytest.mark.parametrize("name", NEARLY)
def test_near_misses_stay(name: str, made: Pattern) -> None:
    assert_refuses(HEAD + NEARLY[name] + SOFTMAX, made, code=None)


@pattern
def by_logarithms(scores: Tensor, mask: Tensor, v: Tensor) -> Any:
    """A slot that takes a maximum, too."""
    return equation(exp(log_softmax(scores + mask)) @ v, softmax(scores + mask) @ v)


SHIFTED = """m = ReduceMax<keepdims = 1>(x, axes)
    s = Sub(x, m)
    l = LogSoftmax<axis = -1>(s)
    w = Exp(l)
    out = MatMul(w, v)
}"""


@pytest.mark.parametrize("axes", ["-1", "1, 3"])
def test_a_slot_takes_a_maximum_that_is_one_for_all_columns(axes: str) -> None:
    assert_fuses(HEAD + f"axes = Constant<value_ints = [{axes}]>()\n" + SHIFTED, by_logarithms)


def test_a_slot_takes_no_maximum_of_each_column() -> None:
    assert_refuses(HEAD + "axes = Constant<value_ints = [-2]>()\n" + SHIFTED, by_logarithms, code="shift-by-key", verify="none")


@pattern
def squared(x: Tensor, v: Tensor) -> Any:
    """A softmax of squares; the meaning has a square, too."""
    return softmax(x**2) @ v


SQUARES = {
    "a power": "s = Pow(x, two)",
    "a product": "s = Mul(x, x)",
    "a product of what is the same behind a cast": "y = Cast<to = 1>(x)\n s = Mul(x, y)",
}
REST = """
    w = Softmax<axis = -1>(s)
    out = MatMul(w, v)
}"""


@pytest.mark.parametrize("made", [squared, pattern(name="product")(lambda x, v: softmax(x * x) @ v)], ids=lambda made: made.name)
@pytest.mark.parametrize("name", SQUARES)
def test_a_square_is_a_power_and_a_product(name: str, made: Pattern) -> None:
    result = assert_matches(SQUARES[name], made)
    assert result == made.name


def assert_matches(square: str, made: Pattern) -> str | None:
    """The pattern that names the only site."""
    from onnx_attnfuse import explain
    from onnx_attnfuse.testing import as_model

    (site,) = explain(as_model(HEAD + square + REST), patterns=(made,)).sites
    return site.pattern


@pytest.mark.parametrize("other", ["s = Pow(x, three)", "s = Pow(two, x)", "s = Mul(x, raw)", "s = Add(x, x)"])
def test_what_is_no_square_is_not_found(other: str) -> None:
    assert assert_matches(other, squared) is None


NORMS = {
    "sum(x * x)": (
        lambda x: sum(x * x),
        ["n = ReduceSumSquare<keepdims = 1>(x, last)", "p = Pow(x, two)\n n = ReduceSum<keepdims = 1>(p, last)"],
    ),
    "sqrt(sum(x ** 2))": (
        lambda x: sqrt(sum(x**2)),
        [
            "n = ReduceL2<keepdims = 1>(x, last)",
            "p = ReduceSumSquare<keepdims = 1>(x, last)\n n = Sqrt(p)",
            "p = Mul(x, x)\n o = ReduceSum<keepdims = 1>(p, last)\n n = Sqrt(o)",
        ],
    ),
    "sum(absolute(x))": (
        lambda x: sum(absolute(x)),
        ["n = ReduceL1<keepdims = 1>(x, last)", "p = Abs(x)\n n = ReduceSum<keepdims = 1>(p, last)"],
    ),
    "log(sum(x))": (
        lambda x: log(sum(absolute(x) + 1)),
        ["one = Constant<value_float = 1.0>()\n p = Abs(x)\n r = Add(p, one)\n n = ReduceLogSum<keepdims = 1>(r, last)"],
    ),
}


@pytest.mark.parametrize(("name", "graph"), [(name, graph) for name, (_, graphs) in NORMS.items() for graph in graphs])
def test_norms_are_found_in_every_spelling(name: str, graph: str) -> None:
    norm, _ = NORMS[name]
    made = pattern(name="normed")(lambda x, v: softmax(x / norm(x)) @ v)
    assert assert_matches(f"{graph}\n s = Div(x, n)", made) == "normed"


def test_a_norm_of_another_kind_is_not_found() -> None:
    made = pattern(name="normed")(lambda x, v: softmax(x / sqrt(sum(x * x))) @ v)
    for graph in ("n = ReduceL1<keepdims = 1>(x, last)", "n = ReduceSumSquare<keepdims = 1>(x, last)"):
        assert assert_matches(f"{graph}\n s = Div(x, n)", made) is None


def test_the_authors_spelling_is_among_them() -> None:
    for made in (plainly, stably, squared):
        assert normal(made.written) in set(equivalents(normal(made.written)))


def test_one_formula_in_two_spellings_is_one_formula() -> None:
    with pytest.raises(OptionError, match=r"two patterns are the same formula: .*plainly and .*stably"):
        Net([plainly, stably])


OLD = """<ir_version: 7, opset_import: ["" : 11]>
g (float[b, 2, s, 4] q, float[b, 2, 4, t] k, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out)
{ x = MatMul(q, k) %s out = MatMul(w, v) }"""


@pytest.mark.parametrize("weights", ["w = Softmax(x)", "l = LogSoftmax(x) w = Exp(l)", "l = LogSoftmax<axis = 2>(x) w = Exp(l)"])
def test_before_opset_13_a_softmax_runs_over_all_axes_from_its_own_on(weights: str) -> None:
    assert_refuses(OLD % weights, code=None, verify="none")


LATE = {
    "sums of other exponentials": "o = Exp(raw) t = ReduceSum(o, last) p = MatMul(e, v) out = Div(p, t)",
    "sums along the channels": "p = MatMul(e, v) t = ReduceSum(p, last) out = Div(p, t)",
    "two over the sum": "t = ReduceSum(e, last) i = Div(two, t) w = Mul(e, i) out = MatMul(w, v)",
    "masked, and the sum of all": "t = ReduceSum(e, last) m = Greater(e, low) y = Where(m, e, zero) w = Div(y, t) "
    "out = MatMul(w, v)",
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_what_is_divided_by_another_sum_is_no_softmax(late: str) -> None:
    assert_refuses(HEAD + f"e = Exp(x) zero = Constant<value_float = 0.0>() {late} }}", code=None)
