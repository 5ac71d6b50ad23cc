"""The windows of ai.onnx Attention are part of its mask: what is written has them, and no other window is equal."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import certify
from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.verify.references import operator

pytestmark = pytest.mark.newest
MODEL = """<ir_version: 10, opset_import: ["" : 25]>
g (float[b, s, 32] q, float[b, t, 32] k, float[b, t, 32] v) => (float[b, s, 32] y) {{
    [attention] y = Attention <q_num_heads = 4, kv_num_heads = 4{attributes}> (q, k, v)
}}"""
CASES = {
    "causal within 3": ({"left_window_size": 3, "is_causal": 1}, (9, 9)),
    "causal by its window": ({"left_window_size": 3, "right_window_size": 0}, (9, 9)),
    "itself": ({"left_window_size": 0, "right_window_size": 0}, (9, 9)),
    "both sides": ({"left_window_size": 2, "right_window_size": 1}, (9, 9)),
    "ahead": ({"right_window_size": 2}, (9, 9)),
    "behind": ({"left_window_size": 4}, (9, 9)),
    "the triangle cuts what is ahead": ({"right_window_size": 5, "is_causal": 1}, (9, 9)),
    "fewer keys than rows, and rows without any": ({"left_window_size": 2}, (9, 4)),
    "a long one": ({"left_window_size": 127, "right_window_size": 0}, (200, 200)),
}

_OTHERS = "itself", "both sides", "ahead", "causal within 3"


def _model(attributes: dict[str, int]) -> onnx.ModelProto:
    return onnx.parser.parse_model(MODEL.format(attributes="".join(f", {name} = {value}" for name, value in attributes.items())))


def _wanted(feeds: list[np.ndarray], left: int, right: int, causal: int) -> np.ndarray:
    """The attention by its definition."""
    query, key, value = (item.reshape(*item.shape[:2], 4, 8).transpose(0, 2, 1, 3) for item in feeds)
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(8)
    rows, keys = np.arange(query.shape[2])[:, None], np.arange(key.shape[2])
    seen = np.ones((rows.size, keys.size), np.bool_)
    seen &= (rows - keys <= left) | (left < 0)
    seen &= (keys - rows <= right) | (right < 0)
    seen &= (keys <= rows) | (not causal)
    powers = np.where(seen, np.exp(scores), 0)
    total = powers.sum(-1, keepdims=True)
    result = np.where(total > 0, powers / np.where(total > 0, total, 1), 0) @ value
    return result.transpose(0, 2, 1, 3).reshape(feeds[0].shape)


def _bounds(attributes: dict[str, int]) -> tuple[int, int, int]:
    return attributes.get("left_window_size", -1), attributes.get("right_window_size", -1), attributes.get("is_causal", 0)


def _feeds(rows: int, keys: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((2, count, 32)).astype(np.float32) for count in (rows, keys, keys)]


def _run(model: onnx.ModelProto, feeds: list[np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip("qkv", feeds, strict=True)))[0]


@pytest.mark.parametrize("case", CASES)
def test_the_reference_and_what_is_spelled_out_have_the_window(case: str) -> None:
    attributes, lengths = CASES[case]
    feeds = _feeds(*lengths)
    wanted = _wanted(feeds, *_bounds(attributes))
    found = operator("Attention", "").called(*feeds, q_num_heads=4, kv_num_heads=4, **attributes)[0]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    result = onnx_attnfuse.unfuse(_model(attributes))
    assert [site.status for site in result.report.sites] == ["unfused"]
    np.testing.assert_allclose(_run(result.model, feeds), wanted, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_is_fused_has_the_window(case: str) -> None:
    attributes, lengths = CASES[case]
    feeds = _feeds(*lengths)
    result = onnx_attnfuse.optimize(_model(attributes), verify="sites")
    (site,) = result.report.sites
    if not site.is_rewritten:
        assert "window" in str(site.reasons)
        assert [node.op_type for node in result.model.graph.node] == ["Attention"]
        return
    np.testing.assert_allclose(_run(result.model, feeds), _wanted(feeds, *_bounds(attributes)), atol=2e-5)


def test_a_window_that_ends_at_the_row_is_one_of_group_query_attention() -> None:
    model = _model({"left_window_size": 3, "right_window_size": 0})
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_param = "s"
    result = onnx_attnfuse.optimize(model, target="GroupQueryAttention", verify="sites")
    (node,) = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    assert {item.name: item.i for item in node.attribute}["local_window_size"] == 4


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.permutations(["itself", "both sides", "ahead", "causal within 3"], 2))
)
def test_two_windows_are_never_proved_equal(before: str, after: str) -> None:
    models = [from_any(_model(CASES[name][0]))[0] for name in (before, after)]
    assert not certify(*models).is_complete


@pytest.mark.parametrize("case", ["causal within 3", "both sides", "causal by its window"])
def test_what_is_spelled_out_is_proved(case: str) -> None:
    source = _model(CASES[case][0])
    found = onnx_attnfuse.unfuse(source).model
    assert certify(from_any(source)[0], from_any(found)[0]).is_complete


_LONE = {
    "FlexAttention": ('"" : 26, "ai.onnx.preview" : 1', "float[b, 4, s, 8]", "ai.onnx.preview.FlexAttention (q, k, v)"),
    "LinearAttention": (
        '"" : 27',
        "float[b, s, 32]",
        'LinearAttention <q_num_heads = 4, kv_num_heads = 4, update_rule = "linear"> (q, k, v)',
    ),
}


@pytest.mark.parametrize("op", _LONE)
def test_an_attention_of_another_kind_is_a_site_that_is_left(op: str) -> None:
    opsets, shape, call = _LONE[op]
    results = "y" if op == "FlexAttention" else "y, state"
    text = f"<ir_version: 10, opset_import: [{opsets}]> g ({shape} q, {shape} k, {shape} v) => (y) {{ [one] {results} = {call} }}"
    (site,) = onnx_attnfuse.explain(onnx.parser.parse_model(text)).sites
    assert (site.name, site.op, [item.code for item in site.reasons]) == ("one", op, ["other-attention"])
