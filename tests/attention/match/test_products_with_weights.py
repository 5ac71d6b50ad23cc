"""Products of computed values with weights before a softmax: keys or queries that are constants, and what is neither."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.small_models import HEADER, parsed

_KERNELS = f"""{HEADER}
convolution (float[b, s, 8] x, float[b, s, 2, 4, 3] windows) => (float[b, s, 2, 4, 1] out)
<int64[5] kernels = {{0, 0, 2, 3, 1}}, float[8, 6] weight = {{%s}}> {{
    product = MatMul(x, weight)
    split = Reshape(product, kernels)
    weights = Softmax<axis = 3>(split)
    out = MatMul(windows, weights)
}}"""
"""A convolution whose kernel is a function of each position: two heads, kernels of three."""
_KEYS = f"""{HEADER}
memory (float[b, 2, s, 4] q, float[b, 2, 3, 4] v) => (float[b, 2, s, 4] out)
<float[4, 3] weight = {{%s}}> {{
    scores = MatMul(q, weight)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}}"""
_HEADS = f"""{HEADER}
talking (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out)
<float[2, 2] weight = {{%s}}> {{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    apart = Transpose<perm = [0, 2, 3, 1]>(scores)
    mixed = MatMul(apart, weight)
    again = Transpose<perm = [0, 3, 1, 2]>(mixed)
    weights = Softmax<axis = -1>(again)
    out = MatMul(weights, v)
}}"""
_QUERIES = f"""{HEADER}
latent (float[b, 2, t, 4] k, float[b, 2, t, 4] v) => (float[b, 2, 3, 4] out)
<float[3, 4] weight = {{%s}}> {{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(weight, kt)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}}"""


_CONTEXT = f"""{HEADER}
linear (float[b, s, 4] x) => (float[b, 4, 4] out)
<float[4, 8] weight = {{%s}}, int64[2] halves = {{4, 4}}, float[8] bias = {{0, 1, 2, 3, 4, 5, 6, 7}}> {{
    product = MatMul(x, weight)
    moved = Add(product, bias)
    k, v = Split<axis = -1>(moved, halves)
    kt = Transpose<perm = [0, 2, 1]>(k)
    weights = Softmax<axis = -1>(kt)
    out = MatMul(weights, v)
}}"""
"""Keys softmaxed over the tokens, as linear attention has them (CoaT)."""
_PART = _CONTEXT.replace("float[b, s, 4] x)", "float[b, s, 4] x, float[b, 4, 8] other)").replace("(x, weight)", "(x, other)")


_CORNERS = f"""{HEADER}
corners (float[b, 4, h, w] x) => (float[b, 2, h, w] out)
<float[3, 4, 1, 1] weight = {{%s}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}> {{
    scores = Conv(x, weight)
    weights = Softmax<axis = 1>(scores)
    out = Slice(weights, zero, two, one)
}}"""
"""The last class of a convolution's is dropped, as SuperPoint does where it finds none."""
_MIXED = f"""{HEADER}
mixed (float[b, s, 8] x, float[b, s, 4] v) => (float[b, 4, 4] out)
<float[8, 8, 1] weight = {{%s}}, int64[2] halves = {{4, 4}}> {{
    xt = Transpose<perm = [0, 2, 1]>(x)
    product = Conv(xt, weight)
    steps, gates = Split<axis = 1>(product, halves)
    weights = Softmax<axis = -1>(steps)
    gated = Mul(weights, gates)
    out = MatMul(gated, v)
}}"""
"""Steps of a state space as EfficientViM has them."""
_CONVOLVED = _HEADS.replace("[2, 2] weight", "[2, 2, 1, 1] weight").replace("MatMul(apart, weight)", "Conv(scores, weight)")
_CONVOLVED = _CONVOLVED.replace("Transpose<perm = [0, 3, 1, 2]>(mixed)", "Identity(mixed)")
_PADDED = f"""{HEADER}
chunks (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, u, 4] v) => (float[b, 2, s, 4] out)
<float[4, 4] weight = {{%s}}, int64[8] pads = {{0, 0, 0, 0, 0, 0, 0, 3}}> {{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    weights = Softmax<axis = -1>(scores)
    longer = Pad(weights, pads)
    out = MatMul(longer, v)
}}"""
"""Weights in a wider band of keys, as Longformer moves them."""
_UNUSED = _PADDED.replace("MatMul(longer, v)", "Identity(longer)").replace("s, 4] out", "s, r] out")


def _model(text: str, count: int) -> onnx.ModelProto:
    numbers = np.random.default_rng(0).standard_normal(count).round(3)
    return parsed(text % ", ".join(map(str, numbers)))


@pytest.mark.parametrize(
    ("text", "count", "status", "codes"),
    [
        (_KERNELS, 48, "not-attention", ["not-attention"]),
        (_CONTEXT, 32, "not-attention", ["not-attention"]),
        (_PART, 32, "skipped", ["unreadable-score-step"]),
        (_KEYS, 12, "fused", []),
        (_HEADS, 4, "skipped", ["mixed-heads"]),
        (_QUERIES, 12, "fused", []),
        (_CORNERS, 12, "not-attention", ["not-attention"]),
        (_MIXED, 64, "not-attention", ["not-attention"]),
        (_CONVOLVED, 4, "skipped", ["unreadable-score-step"]),
        (_PADDED, 16, "skipped", ["unreadable-weight-step"]),
        (_UNUSED, 16, "not-attention", ["not-attention"]),
    ],
    ids=[
        *("kernels", "keys over all tokens", "a product of two inputs", "keys", "heads", "queries"),
        *("classes of a convolution", "steps of a convolution", "convolved scores", "padded weights", "padded weights alone"),
    ],
)
def test_weights_may_be_keys_or_queries(text: str, count: int, status: str, codes: list[str]) -> None:
    (site,) = onnx_attnfuse.optimize(_model(text, count)).report.sites
    assert site.status == status
    assert codes == [] or [reason.code for reason in site.reasons] == codes


@pytest.mark.parametrize(
    ("after", "columns", "status", "code"),
    [
        pytest.param("out = MatMul(weights, v)", 4, "skipped", "single-key", id="one key"),
        pytest.param("out, places = TopK(weights, one)", 1, "not-attention", "not-attention", id="one expert of those chosen"),
    ],
)
def test_a_softmax_of_one_column_is_an_attention_if_it_weighs_values(after: str, columns: int, status: str, code: str) -> None:
    text = f"""{HEADER}
    g (float[b, 2, s, 4] q, float[b, 2, 4, 1] k, float[b, 2, 1, 4] v) => (float[b, 2, s, {columns}] out) <int64[1] one = {{1}}> {{
        scores = MatMul(q, k)
        weights = Softmax<axis = -1>(scores)
        {after}
    }}"""
    (site,) = onnx_attnfuse.optimize(parsed(text)).report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == (status, [code])


@pytest.mark.parametrize(
    ("after", "status", "code"),
    [
        pytest.param("out = MatMul(kept, v)", "skipped", "extra-column", id="weights"),
        pytest.param("out = Identity(kept)", "not-attention", "not-attention", id="shares of experts"),
    ],
)
def test_dropped_columns_are_those_of_an_attention_if_the_others_weigh_values(after: str, status: str, code: str) -> None:
    text = f"""{HEADER}
    g (float[b, 2, s, 4] q, float[b, 2, 4, 5] k, float[b, 2, 4, 4] v) => (float[b, 2, s, 4] out)
    <int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] last = {{3}}> {{
        scores = MatMul(q, k)
        weights = Softmax<axis = -1>(scores)
        kept = Slice(weights, zero, four, last)
        {after}
    }}"""
    (site,) = onnx_attnfuse.optimize(parsed(text)).report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == (status, [code])


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        pytest.param("rest = Slice(weights, four, five, last) added = MatMul(w, rest)", "is cut into 2 parts", id="two products"),
        pytest.param("rest = Slice(weights, four, five, last) added = Relu(rest)", "are dropped", id="one"),
    ],
)
def test_columns_with_values_of_their_own_are_not_dropped(rest: str, message: str) -> None:
    """As where each cell of an image attends to its column and its row: the two products are not of one form."""
    text = f"""{HEADER}
    g (float[b, 2, 6, 4] q, float[b, 2, 4, 5] k, float[b, 2, 4, 4] v, float[b, 2, 4, 6] w) => (out, added)
    <int64[1] zero = {{0}}, int64[1] four = {{4}}, int64[1] five = {{5}}, int64[1] last = {{3}}> {{
        scores = MatMul(q, k)
        weights = Softmax<axis = -1>(scores)
        kept = Slice(weights, zero, four, last)
        out = MatMul(kept, v)
        {rest}
    }}"""
    (site,) = onnx_attnfuse.optimize(parsed(text)).report.sites
    assert [reason.code for reason in site.reasons] == ["extra-column"]
    assert message in site.reasons[0].message
