"""Attentions that are read after a rewrite: padded scores, values in several parts, differences of weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import HEADER, parsed

_HEAD = f"""{HEADER}
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v, float[b, 2, t, 3] w)
=> (float[b, 2, s, 4] out, float[b, 2, s, {{width}}] other)
<float off = {{{{-1}}}}, int64[1] first = {{{{0}}}}, int64[1] less = {{{{-1}}}}, int64[1] axis = {{{{3}}}},
 int64[1] rows = {{{{2}}}}>
{{{{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    {{body}}
}}}}"""
_PADDED = """pads = Constant<value_ints = [{pads}]>()
    padded = Pad<mode = "{mode}">(scores, pads{number})
    all = Softmax<axis = -1>(padded)
    weights = Slice(all, first, less, axis)
    out = MatMul(weights, v)
    other = Neg(out)"""
_TWO = """weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
    {made}
    other = MatMul(weights, {value})"""


def model(body: str, width: int = 4) -> onnx.ModelProto:
    return parsed(_HEAD.format(body=body, width=width))


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"q": (5, 4), "k": (7, 4), "v": (7, 4), "w": (7, 3)}
    return {name: rng.standard_normal((2, 2, *size), np.float32) for name, size in sizes.items()}


def sites(before: onnx.ModelProto, atol: float = 1e-6) -> tuple[onnx_attnfuse.SiteReport, ...]:
    """The sites, after the outputs of both models were compared."""
    result = onnx_attnfuse.optimize(before)
    names = {item.name for item in before.graph.input}
    given = {name: array for name, array in feeds().items() if name in names}
    expected, found = run(before, given), run(result.model, given)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=atol)
    return result.report.sites


def fused(before: onnx.ModelProto) -> onnx_attnfuse.SiteReport:
    """The one site, after the outputs of both models were compared."""
    (site,) = sites(before)
    return site


@pytest.mark.parametrize("number", ["", ", off"])
def test_a_column_of_one_number_is_a_sink(number: str) -> None:
    site = fused(model(_PADDED.format(pads="0, 0, 0, 0, 0, 0, 0, 1", mode="constant", number=number)))
    assert (site.status, site.mask_form) == ("fused", "attention_bias b n s t, a column for the sink")


@pytest.mark.parametrize(
    ("pads", "mode"),
    [("0, 0, 0, 0, 0, 0, 0, 1", "edge"), ("0, 0, 0, 0, 0, 0, 1, 1", "constant"), ("0, 0, 0, 1, 0, 0, 0, 0", "constant")],
)
def test_other_columns_are_none(pads: str, mode: str) -> None:
    site = onnx_attnfuse.optimize(model(_PADDED.format(pads=pads, mode=mode, number=""))).report.sites[0]
    assert site.status == "skipped"


@pytest.mark.parametrize(
    ("made", "value", "width"), [("", "w", 3), ("late = Add(v, v)", "late", 4)], ids=["given", "made between the products"]
)
def test_values_in_two_parts_have_one_attention(made: str, value: str, width: int) -> None:
    site = fused(model(_TWO.format(made=made, value=value), width))
    assert (site.status, site.head_size, site.v_head_size) == ("fused", 4, 4 + width)


def test_values_that_rest_on_the_other_part_are_left() -> None:
    body = _TWO.format(made="mean = ReduceMean(out, rows) late = Add(v, mean)", value="late")
    site = fused(model(body))
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["inner-value-used"])


@pytest.mark.parametrize(("gated", "status"), [("", "fused"), ("gate = Softmax<axis = -1>(q) weights = Mul(q, gate)", "skipped")])
def test_values_of_fewer_axes_than_the_weights_have_one_attention(gated: str, status: str) -> None:
    """Other products with two matrices, of a gate that is no attention, stay as they are."""
    made = gated or "kt = Transpose<perm = [1, 0]>(k) scores = MatMul(q, kt) weights = Softmax<axis = -1>(scores)"
    before = parsed(f"""{HEADER}
    shared (float[b, s, 4] q, float[4, 4] k, float[4, 4] v, float[4, 3] w) => (float[b, s, 4] out, float[b, s, 3] other) {{
        {made} out = MatMul(weights, v) other = MatMul(weights, w) }}""")
    rng, result = np.random.default_rng(0), onnx_attnfuse.optimize(before)
    sizes = {"q": (2, 5, 4), "k": (4, 4), "v": (4, 4), "w": (4, 3)}
    given = {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}
    for name, array in run(before, given).items():
        np.testing.assert_allclose(run(result.model, given)[name], array, rtol=1e-5, atol=1e-6)
    assert result.report.differing == 0
    assert [site.status for site in result.report.sites] == [status]


_DIFFERENCE = """weights = Softmax<axis = -1>(scores)
    qt = Neg(q)
    others = MatMul(qt, kt)
    second = Softmax<axis = -1>(others)
    {made}
    total = Sub(weights, {other})
    out = MatMul(total, v)
    other = Neg(out)"""


@pytest.mark.parametrize(
    ("made", "other", "statuses"),
    [
        ("", "second", ["fused", "fused"]),
        ("part = Mul(second, off)", "part", ["fused", "fused"]),
        ("part = ReduceMean(second, rows)", "part", ["not-attention", "not-attention"]),
        ("part = Mul(second, others)", "part", ["skipped", "fused"]),
    ],
    ids=["plain", "with a factor", "a mean of rows", "with a factor by key"],
)
def test_a_difference_of_weights_is_one_of_two_attentions(made: str, other: str, statuses: list[str]) -> None:
    found = sites(model(_DIFFERENCE.format(made=made, other=other)), atol=1e-5)
    assert [site.status for site in found] == statuses


def test_weights_that_several_factors_multiply_are_left() -> None:
    text = f"""{HEADER}
    prior (float[s, t] scores, float[1, 2, 1, 1] gates, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out) {{
        weights = Softmax<axis = -1>(scores) gated = Mul(weights, gates) out = MatMul(gated, v) }}"""
    (site,) = onnx_attnfuse.optimize(parsed(text)).report.sites
    assert [reason.code for reason in site.reasons] == ["broadcast-weights"]
