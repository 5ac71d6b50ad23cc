"""Formulas found in graphs, whatever their layout, and what becomes of places that are nearly the same."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import OptionError
from onnx_attnfuse.language import Pattern, Tensor, equation, exp, number, pattern, softmax, sum, tanh  # noqa: A004
from onnx_attnfuse.language.matcher.discrimination_net import Net
from onnx_attnfuse.testing import as_model, assert_fuses, assert_refuses
from onnx_attnfuse.testing.asserting import check


@pattern
def one_more(scores: Tensor, v: Tensor) -> Any:
    """Softmax with one more in the denominator."""
    return equation(exp(scores) / (1 + sum(exp(scores))) @ v, softmax(scores, sink=0) @ v)


@pattern
def difference(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, w: Tensor, scale: Tensor, mask: Tensor) -> Any:
    """The difference of two attentions over the same values."""
    first, second = softmax(scale * (q1 @ k1.T) + mask), softmax(scale * (q2 @ k2.T) + mask)
    return equation((first - w * second) @ v, first @ v - w * (second @ v))


@pattern
def capped(q: Tensor, k: Tensor, v: Tensor, cap: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
    """What the built-in steps read by themselves."""
    return softmax(cap * tanh(scale * (q @ k.T) / cap) + mask) @ v


HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'
TWO = """g (float[b, n, s, 8] q1, float[b, n, t, 8] k1, float[b, n, s, 8] q2, float[b, n, t, 8] k2, float[b, n, t, 6] v,
   float w, float[b, 1, 1, t] mask) => (float[b, n, s, 6] out)
<float scale = {{0.4}}, float inverse = {{2.5}}, float zero = {{0}}>
{{
    k1t = Transpose<perm = [0, 1, 3, 2]>(k1)
    k2t = Transpose<perm = [0, 1, 3, 2]>(k2)
    {first}
    {second}
    {rest}
}}"""
PARTS = {
    "first": "p1 = MatMul(q1, k1t)\n s1 = Mul(p1, scale)\n m1 = Add(s1, mask)\n w1 = Softmax<axis = -1>(m1)",
    "second": "p2 = MatMul(q2, k2t)\n s2 = Mul(scale, p2)\n m2 = Add(mask, s2)\n w2 = Softmax<axis = -1>(m2)",
    "rest": "scaled = Mul(w, w2)\n d = Sub(w1, scaled)\n out = MatMul(d, v)",
}
GUARD = "raw{n} = Softmax<axis = -1>(m{n})\n bad{n} = IsNaN(raw{n})\n w{n} = Where(bad{n}, zero, raw{n})"


def two(**changed: str) -> str:
    return HEAD + TWO.format(**{**PARTS, **changed})


SPELLINGS = {
    "as written": {},
    "a quotient for a factor": {"second": PARTS["second"].replace("Mul(scale, p2)", "Div(p2, inverse)")},
    "casts on the way": {
        "rest": "scaled = Mul(w, w2)\n d = Sub(w1, scaled)\n e = Cast<to = 1>(d)\n i = Identity(e)\n out = MatMul(i, v)"
    },
    "guards of rows without a key": {
        name: PARTS[name].replace(f"w{n} = Softmax<axis = -1>(m{n})", GUARD.format(n=n))
        for name, n in (("first", 1), ("second", 2))
    },
    "products as Einsum": {
        "first": PARTS["first"].replace("MatMul(q1, k1t)", 'Einsum<equation = "bnsh,bnht->bnst">(q1, k1t)'),
        "rest": 'scaled = Mul(w, w2)\n d = Sub(w1, scaled)\n out = Einsum<equation = "bnst,bntv->bnsv">(d, v)',
    },
    "the weight as a quotient": {"rest": "scaled = Mul(w2, w)\n d = Sub(w1, scaled)\n out = MatMul(d, v)"},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_does_not_matter(name: str) -> None:
    result = assert_fuses(two(**SPELLINGS[name]), difference, sites=2)
    assert {site.pattern for site in result.report.sites} == {"difference"}
    assert not {"Softmax", "MatMul"} & {node.op_type for node in result.model.graph}


NEARLY = {
    "a sum": {"rest": "scaled = Mul(w, w2)\n d = Add(w1, scaled)\n out = MatMul(d, v)"},
    "scales that differ": {"second": PARTS["second"].replace("Mul(scale, p2)", "Mul(inverse, p2)")},
    "the difference the other way round": {"rest": "scaled = Mul(w, w2)\n d = Sub(scaled, w1)\n out = MatMul(d, v)"},
    "another axis": {"second": PARTS["second"].replace("axis = -1", "axis = 1")},
}


@pytest.mark.parametrize("name", NEARLY)
def test_near_misses_are_none_of_the_pattern(name: str) -> None:
    """Each softmax may be an attention of its own."""
    result = onnx_attnfuse.optimize(as_model(two(**NEARLY[name])), patterns=(difference,))
    assert {site.pattern for site in result.report.sites} == {None}
    assert all(site.verified for site in result.report.sites if site.is_rewritten)


ONE = """g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float one = {one}, int64[1] last = {{-1}}>
{{
    scores = MatMul(q, k)
    e = Exp(scores)
    total = ReduceSum<keepdims = 1>(e, last)
    more = Add(total, one)
    w = Div(e, more)
    out = MatMul(w, v)
}}"""


def test_a_number_is_the_formulas_or_there_is_no_match() -> None:
    assert_fuses(HEAD + ONE.format(one="{1}"), one_more, sites=1)
    with pytest.raises(AssertionError, match="no attention was found"):
        assert_fuses(HEAD + ONE.format(one="{2}"), one_more)


def test_the_nearest_miss_names_the_operator_and_what_was_expected() -> None:
    checked = check(HEAD + ONE.format(one="{1}").replace("Exp(", "[e] e = Sigmoid(").replace("e = [e]", "[e]"), one_more)
    assert checked.nearest is not None
    assert checked.nearest.expected == ("Exp",)
    assert checked.nearest.patterns == ("one_more",)
    assert "Sigmoid 'e' where Exp was expected, 2 operators matched" in str(checked.nearest)


def test_an_inner_value_that_is_used_elsewhere_keeps_the_formula() -> None:
    text = (HEAD + ONE.format(one="{1}")).replace("[b, n, s, 6] out)", "[b, n, s, 6] out, float[b, n, s, t] w)")
    result = assert_refuses(text, one_more, code="inner-value-used")
    assert "the intermediate value 'w' is an output of the graph" in str(result.report.sites[0].reasons[0])
    assert_fuses(text, one_more, keep_outputs=True)


def test_what_leads_nowhere_is_put_back() -> None:
    """Scores are replaced by -10, which is no mask, so neither half can be fused."""
    soft = "where{n} = Where(hidden, ten, s{n})\n w{n} = Softmax<axis = -1>(where{n})"
    text = two(
        first=PARTS["first"].partition("m1")[0] + soft.format(n=1), second=PARTS["second"].partition("m2")[0] + soft.format(n=2)
    )
    text = text.replace("float[b, 1, 1, t] mask", "bool[b, 1, 1, t] hidden").replace("zero = {0}", "ten = {-10}")
    before = as_model(text)
    result = assert_refuses(text, difference, code="soft-fill")
    assert [node.op_type for node in result.model.graph] == [node.op_type for node in before.graph]
    assert [site.name for site in result.report.sites] == ["w1 (1 of 2)", "w1 (2 of 2)"]
    assert set(result.model.graph.initializers) == set(before.graph.initializers)


def test_nothing_is_left_to_do_for_a_second_run() -> None:
    first = assert_fuses(two(), difference)
    again = onnx_attnfuse.optimize(first.model, patterns=(difference,))
    assert (again.report.fused, again.report.already_fused) == (0, 2)


def test_no_constant_is_left_behind() -> None:
    result = assert_fuses(two().replace(", float inverse = {2.5}", ""), difference)
    for value in result.model.graph.initializers.values():
        assert value.uses() or value.name == "zero", value.name


NESTED = """<ir_version: 10, opset_import: ["" : 18]>
g (bool yes, float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float one = {1}, int64[1] last = {-1}>
{
    out = If (yes) <
        then_branch = yes_graph () => (float[b, n, s, 6] inner) {
            scores = MatMul(q, k)
            e = Exp(scores)
            total = ReduceSum<keepdims = 1>(e, last)
            more = Add(one, total)
            w = Div(e, more)
            inner = MatMul(w, v)
        },
        else_branch = no_graph () => (float[b, n, s, 6] other) {
            p = MatMul(q, k)
            w2 = Sigmoid(p)
            other = MatMul(w2, v)
        }
    >
}"""


def test_formulas_are_found_in_branches() -> None:
    (site,) = assert_fuses(NESTED, one_more, sites=1).report.sites
    assert site.graph.endswith("then_branch")


HALF = """g (float16[b, n, s, 8] q, float16[b, n, 8, t] k, float16[b, n, t, 6] v) => (float16[b, n, s, 6] out)
<float one = {1}, int64[1] last = {-1}>
{
    p = MatMul(q, k)
    wide = Cast<to = 1>(p)
    e = Exp(wide)
    total = ReduceSum<keepdims = 1>(e, last)
    more = Add(total, one)
    w = Div(e, more)
    half = Cast<to = 10>(w)
    out = MatMul(half, v)
}"""


def test_what_is_computed_in_float32_between_halves_stays_as_precise() -> None:
    assert_fuses(HEAD + HALF, one_more, sites=1)


def test_a_pattern_that_restates_only_gives_its_name() -> None:
    text = (
        HEAD
        + """g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out)
<float cap = {20}, float scale = {0.35}>
{
    p = MatMul(q, k)
    scaled = Mul(p, scale)
    small = Div(scaled, cap)
    squashed = Tanh(small)
    scores = Mul(squashed, cap)
    [here] w = Softmax<axis = -1>(scores)
    out = MatMul(w, v)
}"""
    )
    with_name = assert_fuses(text, capped)
    without = onnx_attnfuse.optimize(as_model(text))
    assert [site.pattern for site in with_name.report.sites] == ["capped"]
    assert [node.op_type for node in with_name.model.graph] == [node.op_type for node in without.model.graph]
    other = text.replace("Mul(squashed, cap)", "Mul(squashed, scale)")
    assert [site.pattern for site in assert_fuses(other).report.sites] == [None]


PLAIN = """g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v) => (float[b, n, s, 6] out) {
    scores = MatMul(q, k)
    w = Softmax<axis = -1>(scores)
    out = MatMul(w, v)
}"""


def test_of_two_that_fit_the_higher_priority_is_taken_and_then_the_larger() -> None:
    small = pattern(name="small")(lambda scores, v: softmax(scores) @ v)
    large = pattern(name="large")(lambda q, k, v: softmax(q @ k) @ v)
    text = HEAD + PLAIN
    assert onnx_attnfuse.explain(as_model(text), patterns=(small, large)).sites[0].pattern == "large"
    urgent = pattern(name="small", priority=1)(lambda scores, v: softmax(scores) @ v)
    assert onnx_attnfuse.explain(as_model(text), patterns=(urgent, large)).sites[0].pattern == "small"


def test_one_formula_twice_is_an_error_that_names_both() -> None:
    other = pattern(name="other")(lambda a, b: equation(exp(a) / (1 + sum(exp(a))) @ b, softmax(a, sink=0) @ b))
    with pytest.raises(OptionError, match=r"two patterns are the same formula: .*one_more and .*<lambda>"):
        onnx_attnfuse.explain(as_model(HEAD + ONE.format(one="{1}")), patterns=(one_more, other))


def variation(count: int) -> Pattern:
    return pattern(name=f"p{count}")(lambda q, k, v: softmax(tanh(q @ k.T) + number(count + 2) * exp(q @ k.T)) @ v)


def test_patterns_that_begin_alike_share_their_branch() -> None:
    net = Net([variation(count) for count in range(50)])
    branch, depth = net.root, 0
    while len(branch.ops) == 1 and not branch.others:
        (found,) = branch.ops.values()
        branch, depth = next(iter(found.values())), depth + 1
    assert depth >= 3
    assert len(branch.names) == 50


def test_softmax_is_the_same_for_ir_and_proto() -> None:
    assert isinstance(as_model(two()), ir.Model)
