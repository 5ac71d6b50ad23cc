"""Attention to blocks of keys: scores side by side, and sums of products of each block's weights with its values."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import HEADER, parsed

_MODEL = f"""{HEADER}
blocks (float[b, 2, s, 4] q, float[b, 2, p, 4] k, float[b, 2, p, 4] v, float[b, 2, s, 4] k2, float[b, 2, s, 4] v2,
        float[1, 2, g, 4] few, float[b, 2, s, 4] r) => (float[b, 2, s, 4] out)
<int64[1] none = {{{{0}}}}, int64[1] two = {{{{2}}}}, int64[1] three = {{{{3}}}}, int64[1] end = {{{{9223372036854775807}}}},
 float half = {{{{0.5}}}}, float third = {{{{0.3}}}}>
{{{{
    kt = Transpose<perm = [0, 1, 3, 2]>({{key}})
    kt2 = Transpose<perm = [0, 1, 3, 2]>(k2)
    qk = MatMul(q, kt)
    qk2 = MatMul({{query}}, kt2)
    scaled = Mul(qk, half)
    scaled2 = {{scaling}}
    scores = Concat<axis = 3>({{order}})
    weights = Softmax<axis = -1>(scores)
    shape = Shape({{key}})
    past = Slice(shape, two, three, none)
    w = Slice(weights, none, {{stop}}, three)
    w2 = Slice(weights, past, end, three)
    o = MatMul(w, {{value}})
    o2 = MatMul(w2, v2)
    out = {{total}}
}}}}"""
_PLAIN = {
    "key": "k", "query": "q", "scaling": "Mul(half, qk2)", "order": "scaled, scaled2", "stop": "past", "value": "v",
    "total": "Add(o, o2)",
}  # fmt: skip
_SIZES = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "v": (2, 2, 5, 4), "few": (1, 2, 5, 4)}


def outcome(text: str) -> tuple[onnx_attnfuse.SiteReport, int]:
    """The site of a model, after the outputs of both models were compared, and the products that are left."""
    rng, before = np.random.default_rng(0), parsed(text)
    feeds = {item.name: rng.standard_normal(_SIZES.get(item.name, _SIZES["q"]), np.float32) for item in before.graph.input}
    result = onnx_attnfuse.optimize(before)
    for name, array in run(before, feeds).items():
        np.testing.assert_allclose(run(result.model, feeds)[name], array, rtol=1e-5, atol=1e-6)
    (site,) = result.report.sites
    return site, result.report.ops_after.get("MatMul", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"total": "Add(o2, o)"},
        {"key": "few", "value": "few"},
        {"scaling": "Mul(qk2, half)"},
    ],
    ids=["past and present", "summed the other way", "keys for all entries", "scaled the other way"],
)
def test_blocks_of_keys_are_one_attention(changes: dict[str, str]) -> None:
    site, products = outcome(_MODEL.format(**{**_PLAIN, **changes}))
    assert (site.status, site.scale, products) == ("fused", 0.5, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"query": "r"},
        {"scaling": "Mul(qk2, third)"},
        {"total": "Sub(o, o2)"},
        {"order": "scaled2, scaled", "key": "k2", "value": "v2", "query": "r"},
        {"stop": "two"},
        {"scaling": "Div(half, qk2)"},
    ],
    ids=["other queries", "other scales", "difference", "other queries, as many keys", "columns left out", "divisors"],
)
def test_other_blocks_are_left(changes: dict[str, str]) -> None:
    text = _MODEL.format(**{**_PLAIN, **changes})
    site = onnx_attnfuse.optimize(parsed(text)).report.sites[0]
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["extra-column"])


_INSIDE = f"""{HEADER}
windows (float[b, n, 4, 8] q, float[b, n, 4, 8] k, float[b, n, 4, 8] v, float[b, 3, 8] few) => (float[b, n, 4, 8] out)
<int64[2] widths = {{{{3, 4}}}}>
{{{{
    near = Einsum<equation = "bnqh, bnkh -> bnqk">(q, k)
    far = Einsum<equation = "bnqh, bgh -> bnqg">(q, few)
    scores = Concat<axis = -1>(far, near)
    weights = Softmax<axis = -1>(scores)
    a, c = Split<axis = -1>(weights, widths)
    one = Einsum<equation = "bnqg, bgh -> bnqh">({{first}}, few)
    other = Einsum<equation = "bnqk, bnkh -> bnqh">({{second}}, v)
    out = Add(one, other)
}}}}"""


def test_keys_of_all_windows_join_those_of_one() -> None:
    rng, before = np.random.default_rng(0), parsed(_INSIDE.format(first="a", second="c"))
    feeds = {name: rng.standard_normal((2, 3, 4, 8), np.float32) for name in ("q", "k", "v")}
    feeds["few"] = rng.standard_normal((2, 3, 8), np.float32)
    result = onnx_attnfuse.optimize(before)
    (expected,), (found,) = run(before, feeds).values(), run(result.model, feeds).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [site.status for site in result.report.sites] == ["fused"]


def test_weights_of_another_block_are_left() -> None:
    text = _INSIDE.format(first="a", second="a").replace("4, 8] v", "3, 8] v")
    assert [site.status for site in onnx_attnfuse.optimize(parsed(text)).report.sites] == ["skipped"]
