"""Two attentions that share the sum of two products of queries and keys."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.small_models import HEADER, parsed

_MODEL = f"""{HEADER}
shared (float[b, 4, s, 8] q, float[b, 4, s, 8] k, float[b, 4, s, 8] v, float[b, 4, s, 2] q2, float[b, 4, s, 2] k2,
        float[b, 4, s, 2] v2, float[b, 1, 1, s] mask) => (float[b, 4, s, 8] out, float[b, 4, s, 2] out2 {{more}})
<float root = {{{{2.5}}}}, float factor = {{{{0.5}}}}>
{{{{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    k2t = Transpose<perm = [0, 1, 3, 2]>({{keys}})
    product = MatMul(q, kt)
    product2 = MatMul(q2, k2t)
    text = Div(product, root)
    layout = {{layout}}
    sum = {{sum}}
    masked = Add(sum, mask)
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, v)
    sum2 = Add(layout, text)
    masked2 = Add(sum2, mask)
    weights2 = Softmax<axis = -1>(masked2)
    out2 = MatMul(weights2, v2)
    {{last}}
}}}}"""
_PLAIN = {"layout": "Mul(product2, factor)", "sum": "Add(text, layout)", "keys": "k2", "last": "", "more": ""}


def outcome(changes: dict[str, str]) -> tuple[list[str], int]:
    """What becomes of both sites, after the outputs of both models were compared, and the products that are left."""
    before = parsed(_MODEL.format(**{**_PLAIN, **changes}))
    rng, sizes = np.random.default_rng(0), {"b": 2, "s": 5}
    shapes = {
        item.name: [dim.dim_value or sizes[dim.dim_param] for dim in item.type.tensor_type.shape.dim]
        for item in before.graph.input
    }
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    result = onnx_attnfuse.optimize(before)
    for name, array in run(before, feeds).items():
        np.testing.assert_allclose(run(result.model, feeds)[name], array, rtol=1e-5, atol=1e-6)
    found = [site.reasons[0].code if site.reasons else site.status for site in result.report.sites]
    return found, result.report.ops_after.get("MatMul", 0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"layout": "Div(product2, root)"}, {"sum": "Add(layout, text)"}],
    ids=["scaled apart", "scaled alike", "summed the other way"],
)
def test_attentions_that_share_two_products_are_both_fused(changes: dict[str, str]) -> None:
    assert outcome(changes) == (["fused", "fused"], 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"last": "most = ReduceMax<keepdims = 0>(text)", "more": ", float most"},
        {"layout": "Abs(product2)"},
        {"layout": "Mul(product2, mask)"},
    ],
    ids=["something else looks at a product", "scores of one are no multiple of its product", "a factor that is no number"],
)
def test_near_misses_keep_their_products(changes: dict[str, str]) -> None:
    found, products = outcome(changes)
    assert "inner-value-used" in found
    assert products >= 2


def test_divisors_of_float16_keep_their_digits() -> None:
    """A factor of 1 / 2.449, which float16 rounds, would move results by 2e-4; in float32 the forms agree to 1e-5."""
    text = _MODEL.format(**{**_PLAIN, "layout": "Div(product2, factor16)"}).replace("float[", "float16[")
    text = text.replace("{2.5}", "{2.449}").replace("{0.5}", "{3.465}").replace("Div(product, root)", "Div(product, root16)")
    text = text.replace("kt = T", "root16 = Cast<to = 10>(root)\n    factor16 = Cast<to = 10>(factor)\n    kt = T", 1)
    report = onnx_attnfuse.optimize(parsed(text)).report
    codes = [[reason.code for reason in site.reasons] for site in report.sites]
    assert (codes, report.differing) == ([[], ["rounded-mask"]], 0), "the second has a bias in float16 beside the mask"
