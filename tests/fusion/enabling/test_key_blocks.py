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
        {"query": "r"},
        {"order": "scaled2, scaled", "key": "k2", "value": "v2", "query": "r"},
    ],
    ids=[
        "past and present",
        "summed the other way",
        "keys for all entries",
        "scaled the other way",
        "other queries",
        "in the other order",
    ],
)
def test_blocks_of_keys_are_one_attention(changes: dict[str, str]) -> None:
    site, products = outcome(_MODEL.format(**{**_PLAIN, **changes}))
    assert (site.status, site.scale, products) == ("fused", 0.5, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling": "Mul(qk2, third)"},
        {"total": "Sub(o, o2)"},
        {"stop": "two"},
        {"scaling": "Div(half, qk2)"},
    ],
    ids=["other scales", "difference", "columns left out", "divisors"],
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


_MASKED = f"""{HEADER}
windows (float[b, n, 4, 8] q, float[b, n, 4, 8] k, float[b, n, 4, 8] v, float[b, 3, 8] few, float[b, 1, 1, 3] seen,
         float[b, 1, 4, 4] nearby) => (float[b, n, 4, 8] out)
<int64[3] widths = {{{{3, 4, 3}}}}, float half = {{{{0.5}}}}, float third = {{{{0.3}}}}>
{{{{
    near = Einsum<equation = "bnqh, bnkh -> bnqk">(q, k)
    far = Einsum<equation = "bnqh, bgh -> bnqg">(q, few)
    near_half = Mul(near, half)
    far_half = Mul(far, {{factor}})
    near_masked = Add(near_half, nearby)
    far_masked = Add(far_half, seen)
    scores = Concat<axis = -1>(far_masked, near_masked, {{last}})
    weights = Softmax<axis = -1>(scores)
    a, c, d = Split<axis = -1>(weights, widths)
    one = Einsum<equation = "bnqg, bgh -> bnqh">(a, few)
    other = Einsum<equation = "bnqk, bnkh -> bnqh">(c, v)
    more = Einsum<equation = "bnqg, bgh -> bnqh">(d, few)
    two = Add(other, more)
    out = {{total}}
}}}}"""


@pytest.mark.parametrize(
    ("factor", "last", "total", "status"),
    [
        ("half", "far_masked", "Add(one, two)", "fused"),
        ("half", "far_half", "Add(two, one)", "fused"),
        ("third", "far_masked", "Add(one, two)", "skipped"),
        ("half", "far_masked", "Sub(one, two)", "skipped"),
        ("half", "far_masked", "Add(two, two)", "skipped"),
    ],
    ids=["masks of blocks", "a block without a mask", "other factors", "difference", "a block that is left out"],
)
def test_masks_of_blocks_are_one_mask(factor: str, last: str, total: str, status: str) -> None:
    rng, before = np.random.default_rng(0), parsed(_MASKED.format(factor=factor, last=last, total=total))
    feeds = {name: rng.standard_normal((2, 3, 4, 8), np.float32) for name in ("q", "k", "v")}
    feeds["few"] = rng.standard_normal((2, 3, 8), np.float32)
    feeds["seen"] = np.where(rng.random((2, 1, 1, 3)) < 0.5, 0, -1e4).astype(np.float32)
    feeds["nearby"] = rng.standard_normal((2, 1, 4, 4), np.float32)
    result = onnx_attnfuse.optimize(before)
    (expected,), (found,) = run(before, feeds).values(), run(result.model, feeds).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert [site.status for site in result.report.sites] == [status]


_GRID = f"""{HEADER}
grid (float[b, 2, s, 4] ww, float[b, 2, s, 4] we, float[b, 2, e, 4] ew, float[b, 2, e, 4] ee, float[b, 2, t, 4] k,
      float[b, 2, e, 4] v2, float[b, 2, s, 4] v1, float[b, 1, 1, t] seen) => (float[b, 2, t, 4] out)
<float half = {{{{0.5}}}}, int64[1] none = {{{{0}}}}, int64[1] two = {{{{2}}}}, int64[1] end = {{{{9223372036854775807}}}}>
{{{{
    rows = Shape<start = 2, end = 3>(ww)
    kw = Slice(k, none, rows, two)
    ke = Slice(k, rows, end, two)
    kwt = Transpose<perm = [0, 1, 3, 2]>(kw)
    ket = Transpose<perm = [0, 1, 3, 2]>(ke)
    a = MatMul(ww, kwt)
    c = MatMul(we, {{right}})
    d = MatMul(ew, kwt)
    f = MatMul(ee, ket)
    words = Concat<axis = 3>(a, c)
    others = Concat<axis = 3>({{below}})
    scores = Concat<axis = 2>(words, others)
    scaled = Mul(scores, half)
    masked = Add(scaled, seen)
    weights = Softmax<axis = -1>(masked)
    values = Concat<axis = 2>(v1, v2)
    out = MatMul(weights, values)
}}}}"""


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, "fused"), ({"below": "f, d"}, "skipped"), ({"right": "rt"}, "skipped")],
    ids=["a query for each kind of key", "keys in another order", "other keys for one kind of query"],
)
def test_queries_of_their_own_for_each_block_of_keys_are_one_attention(changes: dict[str, str], status: str) -> None:
    """A float64 softmax over the four blocks is the truth."""
    text = _GRID.format(**{"right": "ket", "below": "d, f", **changes})
    text = text.replace("a = MatMul", "rt = Transpose<perm = [0, 1, 3, 2]>(v2)\n    a = MatMul")
    rng, before = np.random.default_rng(0), parsed(text)
    lengths = {"ww": 3, "we": 3, "ew": 2, "ee": 2, "k": 5, "v1": 3, "v2": 2}
    feeds = {name: 2 * rng.standard_normal((2, 2, length, 4), np.float32) for name, length in lengths.items()}
    feeds["seen"] = np.where(rng.random((2, 1, 1, 5)) < 0.3, -1e9, 0).astype(np.float32)
    result = onnx_attnfuse.optimize(before)
    assert [site.status for site in result.report.sites] == [status]
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    wide["kw"], wide["ke"] = np.split(wide["k"], [3], 2)
    right, below = "v2" if "right" in changes else "ke", ["d", "f"][:: -1 if "below" in changes else 1]
    parts = {"a": ("ww", "kw"), "c": ("we", right), "d": ("ew", "kw"), "f": ("ee", "ke")}
    made = {name: np.einsum("bnsh,bnth->bnst", wide[query], wide[key]) for name, (query, key) in parts.items()}
    rows = [np.concatenate([made[name] for name in names], 3) for names in (["a", "c"], below)]
    powers = np.exp(np.concatenate(rows, 2) * 0.5 + wide["seen"])
    weights = powers / powers.sum(-1, keepdims=True)
    (found,) = run(result.model, feeds).values()
    np.testing.assert_allclose(found, weights @ np.concatenate([wide["v1"], wide["v2"]], 2), rtol=1e-4, atol=1e-5)
