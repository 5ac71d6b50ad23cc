"""Keys and values in two parts: those after a past are appended by the operator, if there always are some."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import HEADER, parsed

_ROLLED = f"""{HEADER}
rolled (float[b, s, 2, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, float[b, 2, p, 4] past)
=> (float[b, 2, rows, 4] out)
<int64[1] last = {{{{-1}}}}, int64[1] first = {{{{0}}}}, int64[1] end = {{{{9223372036854775807}}}}, int64[1] keys = {{{{2}}}}>
{{{{
    own = Transpose<perm = [0, 2, 1, 3]>(q)
    heads = {{queries}}
    {{parts}}
    all_k = Concat<axis = 2>(first_k, rest_k)
    all_v = Concat<axis = 2>(first_v, rest_v)
    turned = Transpose<perm = [0, 1, 3, 2]>(all_k)
    scores = MatMul(heads, turned)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, all_v)
}}}}"""
_CUT = " ".join(f"first_{x} = Slice({x}, last, end, keys) rest_{x} = Slice({x}, first, last, keys)" for x in "kv")
_GIVEN = " ".join(f"first_{x} = Identity(past) rest_{x} = Identity({x})" for x in "kv")


_OWN, _JOINED = "Identity(own)", "Concat<axis = 2>(past, own)"


@pytest.mark.parametrize(
    ("parts", "queries", "operator"),
    [(_CUT, _OWN, "MultiHeadAttention"), (_GIVEN, _OWN, "Attention"), (_GIVEN, _JOINED, "MultiHeadAttention")],
    ids=["rolled", "a past", "two streams, as of text and image"],
)
def test_keys_are_appended_where_there_always_are_new_ones(parts: str, queries: str, operator: str) -> None:
    """And where queries are those of the new positions alone."""
    model = parsed(_ROLLED.format(parts=parts, queries=queries))
    result = onnx_attnfuse.optimize(model)
    (site,) = result.report.sites
    assert (site.status, site.op) == ("fused", operator)
    rng = np.random.default_rng(0)
    for length in (1, 2, 5):
        shapes = {"q": (2, length, 2, 4), "k": (2, 2, length, 4), "v": (2, 2, length, 4), "past": (2, 2, 3, 4)}
        feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        np.testing.assert_allclose(run(result.model, feeds)["out"], run(model, feeds)["out"], rtol=1e-5, atol=1e-6)
