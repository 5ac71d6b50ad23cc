"""GroupQueryAttention: windows and grouped heads of half precision before Hopper, for batches without padding."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model ({dtype}[b, s, {width}] q, {dtype}[b, {keys}, {half}] k, {dtype}[b, {keys}, {half}] v, int64[b, {keys}] mask)
=> ({dtype}[b, s, {width}] out)
<int64[4] heads = {{0, 0, 4, {size}}}, int64[5] groups = {{0, 0, 2, 1, {size}}}, int64[5] twice = {{1, 1, 1, 2, 1}},
 int64[3] flat = {{0, 0, {width}}}, float scale32 = {{0.35}}, float nothing32 = {{0}}, float fill32 = {{-65504}},
 int64 zero = {{0}}, int64 one = {{1}}, int64[1] last = {{1}}, int64 window = {{3}}, int64[2] middle = {{1, 2}}>
{{ scale = Cast<to={number}>(scale32) nothing = Cast<to={number}>(nothing32) fill = Cast<to={number}>(fill32)
   q4 = Reshape(q, heads) qt = Transpose<perm=[0, 2, 1, 3]>(q4) k5 = Reshape(k, groups) v5 = Reshape(v, groups)
   kr = Expand(k5, twice) vr = Expand(v5, twice) k4 = Reshape(kr, heads) v4 = Reshape(vr, heads)
   kt = Transpose<perm=[0, 2, 3, 1]>(k4) vt = Transpose<perm=[0, 2, 1, 3]>(v4)
   ss = Shape<start=1, end=2>(q) s1 = Squeeze(ss) rows = Range(zero, s1, one) i = Unsqueeze(rows, last)
   ts = Shape<start=1, end=2>(k) t1 = Squeeze(ts) j = Range(zero, t1, one) behind = Sub(i, j)
   past = GreaterOrEqual(behind, zero) near = Less(behind, window) {seen}
   m = Where(allowed, nothing, fill) qk = MatMul(qt, kt) scaled = Mul(qk, scale) masked = Add(scaled, m)
   weights = Softmax<axis=-1>(masked) mixed = MatMul(weights, vt) back = Transpose<perm=[0, 2, 1, 3]>(mixed)
   out = Reshape(back, flat) }}"""
_WINDOW = "allowed = And(past, near)"
_PADDED = "kept = Cast<to=9>(mask) wide = Unsqueeze(kept, middle) inner = And(past, near) allowed = And(inner, wide)"


def _model(seen: str = _WINDOW, *, dtype: str = "float16", size: int = 8, keys: str = "s") -> onnx.ModelProto:
    number = {"float16": 10, "float": 1}[dtype]
    text = _TEXT.format(seen=seen, dtype=dtype, number=number, size=size, width=4 * size, half=2 * size, keys=keys)
    return onnx.parser.parse_model(text)


def _run(model: onnx.ModelProto, mask: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 7, 32 if name == "q" else 16)).astype(np.float16) for name in "qkv"}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    given = {item.name: {**feeds, "mask": mask}[item.name] for item in session.get_inputs()}
    return np.asarray(session.run(None, given)[0], np.float32)


def test_a_window_of_grouped_heads() -> None:
    model = _model()
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm80", verify="sites")
    (site,) = result.report.sites
    assert (site.op, site.mask_form) == ("GroupQueryAttention", "GroupQueryAttention causal, local_window_size 3")
    assert site.kernel is not None
    assert site.kernel.forecast == "FLASH_ATTENTION"
    (node,) = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    found = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    assert (found["num_heads"], found["kv_num_heads"], found["local_window_size"]) == (4, 2, 3)
    mask = np.ones((2, 7), np.int64)
    np.testing.assert_allclose(_run(result.model, mask), _run(model, mask), atol=4e-3)


def test_with_padding_it_has_the_batches_without_any() -> None:
    model = _model(_PADDED)
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm80", padding="guarded", verify="sites")
    (site,) = result.report.sites
    assert site.op == "MultiHeadAttention"
    assert (site.mask_form or "").startswith("GroupQueryAttention causal, local_window_size 3, else attention_bias")
    for pattern in ("full", "right", "holes"):
        mask = np.ones((2, 7), np.int64)
        if pattern != "full":
            mask[1, 4 if pattern == "holes" else slice(5, None)] = 0
        np.testing.assert_allclose(_run(result.model, mask), _run(model, mask), atol=4e-3, err_msg=pattern)


@pytest.mark.parametrize(
    ("model", "choices"),
    [
        (_model(dtype="float"), {}),
        (_model(size=4), {}),
        (_model(keys="t"), {}),
        (_model("allowed = And(near, near)"), {}),
        (_model(_PADDED), {"padding": "exact"}),
        (_model(), {"ep": "cpu", "arch": None}),
        (_model(), {"arch": "sm90"}),
        (_model(), {"dim": {"b": 8, "s": 512}}),
    ],
    ids=["float32", "narrow heads", "other keys", "no triangle", "exact", "cpu", "cuDNN", "few scores"],
)
def test_what_it_is_not_for(model: onnx.ModelProto, choices: dict[str, object]) -> None:
    chosen: dict[str, object] = {"ep": "cuda", "arch": "sm80", "verify": "sites", **choices}
    (site,) = onnx_attnfuse.optimize(model, **chosen).report.sites
    assert site.op == "MultiHeadAttention"
    assert "GroupQueryAttention" not in (site.mask_form or "")


@pytest.mark.parametrize(("ep", "arch"), [("cpu", None), ("cuda", "sm90")])
def test_it_is_taken_where_it_is_asked_for(ep: str, arch: str | None) -> None:
    model = _model()
    result = onnx_attnfuse.optimize(model, ep=ep, arch=arch, target="GroupQueryAttention", verify="sites")
    (site,) = result.report.sites
    assert site.op == "GroupQueryAttention"
    mask = np.ones((2, 7), np.int64)
    np.testing.assert_allclose(_run(result.model, mask), _run(model, mask), atol=4e-3)


def test_asked_for_it_has_the_batches_without_padding_whatever_is_faster() -> None:
    choices = {"ep": "cuda", "arch": "sm90", "target": "GroupQueryAttention"}
    (site,) = onnx_attnfuse.optimize(_model(_PADDED), **choices).report.sites
    assert (site.mask_form or "").startswith("GroupQueryAttention causal, local_window_size 3, else attention_bias")


def test_asked_for_without_a_test_it_does_not_take_padding() -> None:
    choices = {"ep": "cuda", "arch": "sm80", "target": "GroupQueryAttention", "padding": "exact"}
    (site,) = onnx_attnfuse.optimize(_model(_PADDED), **choices).report.sites
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["not-every-batch"])


def test_where_there_is_no_padding_by_assumption_no_test_is_made() -> None:
    model = _model(_PADDED)
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm80", padding="assume-none", verify="sites")
    assert [site.op for site in result.report.sites] == ["GroupQueryAttention"]
    assert all(node.op_type != "If" for node in result.model.graph.node)
    full = np.ones((2, 7), np.int64)
    np.testing.assert_allclose(_run(result.model, full), _run(model, full), atol=4e-3)
