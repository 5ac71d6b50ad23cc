"""Keys and values appended to those of earlier positions: by the operator where it can, its outputs in the source's place."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse
from tests.support.decoders import decoder

_TEXT = """<ir_version: 9, opset_import: ["" : {opset}]>
model ({dtype}[b, s, 32] q, {dtype}[b, s, 16] k, {dtype}[b, s, 16] v, {dtype}[b, 2, p, 8] past_k, {dtype}[b, 2, p, 8] past_v,
       int64[b, total] mask) => ({dtype}[b, s, 32] out, {dtype}[b, 2, total, 8] present_k, {dtype}[b, 2, total, 8] present_v)
<int64[4] heads = {{0, 0, 4, 8}}, int64[4] groups = {{0, 0, 2, 8}}, int64[5] twice = {{1, 1, 2, 1, 1}},
 int64[3] flat = {{0, 0, 32}}, int64[4] joined = {{0, 4, -1, 8}}, float scale32 = {{0.35}}, float nothing32 = {{0}},
 float fill32 = {{{fill}}}, int64 zero = {{0}}, int64 one = {{1}}, int64[1] last = {{1}}, int64[1] second = {{2}},
 int64[2] middle = {{1, 2}}>
{{ scale = Cast<to={number}>(scale32) nothing = Cast<to={number}>(nothing32) fill = Cast<to={number}>(fill32)
   q4 = Reshape(q, heads) qt = Transpose<perm=[0, 2, 1, 3]>(q4) k4 = Reshape(k, groups) kt = Transpose<perm=[0, 2, 1, 3]>(k4)
   v4 = Reshape(v, groups) vt = Transpose<perm=[0, 2, 1, 3]>(v4)
   {before} present_k = Concat<axis=2>({keys}) present_v = Concat<axis=2>({values})
   ku = Unsqueeze(present_k, second) ke = Expand(ku, twice) kr = Reshape(ke, joined) kx = Transpose<perm=[0, 1, 3, 2]>(kr)
   vu = Unsqueeze(present_v, second) ve = Expand(vu, twice) vr = Reshape(ve, joined)
   ps = Shape<start=2, end=3>(past_k) p1 = Squeeze(ps) ts = Shape<start=2, end=3>(present_k) t1 = Squeeze(ts)
   rows = Range(p1, t1, one) i = Unsqueeze(rows, last) j = Range(zero, t1, one) causal = LessOrEqual(j, i) {seen}
   m = Where(allowed, nothing, fill) qk = MatMul(qt, kx) scaled = Mul(qk, scale) masked = Add(scaled, m)
   weights = Softmax<axis=-1>(masked) mixed = MatMul(weights, vr) back = Transpose<perm=[0, 2, 1, 3]>(mixed)
   out = Reshape(back, flat) }}"""
_CAUSAL = "allowed = Identity(causal)"
_PADDED = "kept = Cast<to=9>(mask) wide = Unsqueeze(kept, middle) allowed = And(causal, wide)"
_LOWEST = {"float": -3.4028234663852886e38, "float16": -65504.0}
_SIZES = [(2, 1, 5), (1, 4, 3), (3, 4, 0), (2, 3, 4)]
"""Batch, new positions, earlier ones: a step, more of one entry, a prompt, more of several entries."""


def _model(
    seen: str = _CAUSAL,
    *,
    dtype: str = "float",
    opset: int = 18,
    before: str = "",
    keys: str = "past_k, kt",
    values: str = "past_v, vt",
) -> onnx.ModelProto:
    number, fill = {"float16": 10, "float": 1}[dtype], _LOWEST[dtype]
    text = _TEXT.format(seen=seen, dtype=dtype, number=number, opset=opset, before=before, keys=keys, values=values, fill=fill)
    return onnx.parser.parse_model(text)


def _session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _feeds(size: tuple[int, int, int], padding: str) -> dict[str, np.ndarray]:
    b, s, p = size
    rng = np.random.default_rng(s)
    shapes = {"q": (b, s, 32), "k": (b, s, 16), "v": (b, s, 16), "past_k": (b, 2, p, 8), "past_v": (b, 2, p, 8)}
    mask = np.ones((b, p + s), np.int64)
    if padding == "left":
        mask[0, : (p + s) // 2] = 0
    elif padding == "none left":
        mask[0] = 0
    elif padding == "holes":
        mask[0, 1::2] = 0
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"mask": mask}


def _same(before: onnx.ModelProto, after: onnx.ModelProto, paddings: tuple[str, ...] = ("full",), atol: float = 1e-5) -> None:
    """Outputs and presents are what they were, for every size and padding."""
    original, fused = _session(before), _session(after)
    assert [item.name for item in fused.get_outputs()] == ["out", "present_k", "present_v"]
    for size in _SIZES:
        for padding in paddings:
            found = _feeds(size, padding)
            types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
            given = {item.name: found[item.name].astype(types[item.type]) for item in original.get_inputs()}
            given_after = {item.name: given[item.name] for item in fused.get_inputs()}
            for old, new in zip(original.run(None, given), fused.run(None, given_after), strict=True):
                np.testing.assert_allclose(new, old, atol=atol, err_msg=f"{size} {padding}")


def _ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(("seen", "form"), [(_CAUSAL, "is_causal"), (_PADDED, "attn_mask b 1 s t")])
def test_on_a_cpu_the_standard_operator_appends_for_every_batch(seen: str, form: str) -> None:
    model = _model(seen)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    (site,) = result.report.sites
    assert (site.op, site.mask_form, site.kv_num_heads) == ("Attention", form, 2)
    assert site.verified is not None
    assert "Concat" not in _ops(result.model)
    assert "Expand" not in [node.op_type for node in result.model.graph.node if "attnfuse" not in node.name]
    _same(model, result.model, ("full", "left", "none left") if seen == _PADDED else ("full",))


def test_on_a_gpu_the_grouped_operator_appends_and_a_test_keeps_the_rest() -> None:
    model = _model(_PADDED, dtype="float16")
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", padding="guarded", verify="sites")
    (site,) = result.report.sites
    assert (site.mask_form or "").startswith("GroupQueryAttention causal, else attn_mask")
    assert site.kernel is not None
    assert site.kernel.when == "there is no padding and one entry, one new position or no past"
    _same(model, result.model, ("full", "holes"), atol=5e-3)


def test_where_it_is_vouched_for_the_grouped_operator_stands_alone() -> None:
    model = _model(_PADDED, dtype="float16")
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", padding="assume-none", verify="sites")
    assert [site.op for site in result.report.sites] == ["GroupQueryAttention"]
    assert "If" not in _ops(result.model)
    assert "Concat" not in _ops(result.model)


def test_the_grouped_operator_on_a_cpu() -> None:
    model = _model()
    result = onnx_attnfuse.optimize(model, ep="cpu", target="GroupQueryAttention", verify="sites")
    (site,) = result.report.sites
    assert (site.mask_form or "").startswith("GroupQueryAttention causal, else ")
    _same(model, result.model)


def test_the_grouped_operator_is_no_choice_for_a_computed_cache() -> None:
    """Up to 1.31 ONNX Runtime gives the longer cache the memory of a computed one that nothing reads later, and fails."""
    before = "old_k = Neg(past_k) old_v = Neg(past_v)"
    model = _model(before=before, keys="old_k, kt", values="old_v, vt")
    result = onnx_attnfuse.optimize(model, ep="cpu", target="GroupQueryAttention", verify="sites")
    assert [(site.op, site.reasons[0].code) for site in result.report.sites] == [(None, "computed-cache")]
    _same(model, onnx_attnfuse.optimize(model, ep="cpu", verify="sites").model)


def test_on_a_cpu_a_prompt_of_several_entries_keeps_the_positions_of_each() -> None:
    """The kernel reads the first position of a prompt alone, so what differs by entry is rotated in front of it."""
    model = decoder()
    result = onnx_attnfuse.optimize(model, ep="cpu", target="GroupQueryAttention", padding="assume-none")
    assert [site.mask_form for site in result.report.sites] == ["GroupQueryAttention causal"] * 2
    rng = np.random.default_rng(0)
    feeds = {
        name: np.zeros((2, 2, 0, 16), np.float32) for name in (f"past_{part}_{i}" for i in (0, 1) for part in ("key", "value"))
    }
    feeds |= {"input_ids": rng.integers(0, 99, (2, 6)), "attention_mask": np.ones((2, 6), np.int64)}
    feeds["position_ids"] = np.stack([np.arange(6), 3 * np.arange(6) + 2])
    old, new = (_session(item).run(["logits"], feeds)[0] for item in (model, result.model))
    np.testing.assert_allclose(new, old, atol=2e-4)


def test_on_a_cpu_positions_that_count_up_for_all_entries_go_into_the_operator() -> None:
    model = decoder(given=False)
    result = onnx_attnfuse.optimize(model, ep="cpu", target="GroupQueryAttention", padding="assume-none")
    assert [site.mask_form for site in result.report.sites] == ["GroupQueryAttention causal, do_rotary"] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": "kt, past_k", "values": "vt, past_v"},
        {"keys": "past_k, kt, kt", "values": "past_v, vt, vt"},
    ],
    ids=["new ones first", "three parts"],
)
def test_what_is_no_cache_is_put_together_outside(changes: dict[str, str]) -> None:
    model = _model("later = Not(causal) allowed = Not(later)", **changes)
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    assert "Concat" in _ops(result.model)


def test_a_triangle_that_begins_elsewhere_is_no_causal_attribute() -> None:
    model = _model("shifted = Sub(i, one) allowed = LessOrEqual(j, shifted)")
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    (site,) = result.report.sites
    assert site.mask_form == "attn_mask 1 1 s t"
    _same(model, result.model)


def test_the_opset_is_raised_and_said() -> None:
    result = onnx_attnfuse.optimize(_model(opset=17), ep="cpu")
    assert [item.version for item in result.model.opset_import if not item.domain] == [23]
    assert result.report.notes == ("opset raised from 17 to 23, which ai.onnx Attention needs",)


def test_a_second_run_changes_nothing() -> None:
    once = onnx_attnfuse.optimize(_model(_PADDED), ep="cpu").model
    twice = onnx_attnfuse.optimize(once, ep="cpu")
    assert twice.report.fused == 0
    assert twice.model.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


_LEARNT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v, float[b, 2, 1, 8] more_k, float[b, 2, 1, 8] more_v)
    => (float[b, 2, s, 8] out)
{
    keys = Concat<axis = 2>(k, more_k)
    values = Concat<axis = 2>(v, more_v)
    kt = Transpose<perm = [0, 1, 3, 2]>(keys)
    scores = MatMul(q, kt)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, values)
}"""


def test_a_key_that_is_appended_to_those_of_the_queries_is_judged_with_queries() -> None:
    """What stands where earlier keys would is as long as the queries, so it is never empty."""
    result = onnx_attnfuse.optimize(onnx.parser.parse_model(_LEARNT), verify="model")
    assert [(site.status, site.verified is not None) for site in result.report.sites] == [("fused", True)]
    assert any("whole model verified" in note for note in result.report.notes)
