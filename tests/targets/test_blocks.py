"""Windows in blocks on the CPU: equal to their definition at all lengths, whatever else is masked; near misses stay whole."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.targets import blocks

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model ({kind}[b, {rows}, 32] q, {kind}[b, {keys}, {width}] k, {kind}[b, {keys}, {width}] v, int64[b, {keys}] mask,
  {kind}[1, 4, {rows}, {keys}] position, int64 any)
=> ({kind}[b, {rows}, 32] out)
<int64[4] heads = {{0, 0, 4, 8}}, int64[5] groups = {{0, 0, 2, 1, 8}}, int64[5] twice = {{1, 1, 1, 2, 1}},
 int64[3] flat = {{0, 0, 32}}, float scale32 = {{0.35}}, float nothing32 = {{0}}, float fill32 = {{{fill}}},
 int64 zero = {{0}}, int64 one = {{1}}, int64[1] last = {{1}}, int64 two = {{2}}, int64 three = {{3}}, int64 nine = {{9}},
 int64[2] middle = {{1, 2}}>
{{ scale = Cast<to={number}>(scale32) nothing = Cast<to={number}>(nothing32) fill = Cast<to={number}>(fill32)
   q4 = Reshape(q, heads) qt = Transpose<perm=[0, 2, 1, 3]>(q4) {operands}
   kt = Transpose<perm=[0, 2, 3, 1]>(k4) vt = Transpose<perm=[0, 2, 1, 3]>(v4)
   ss = Shape<start=1, end=2>(q) s1 = Squeeze(ss) rows = Range(zero, s1, one) i = Unsqueeze(rows, last)
   ts = Shape<start=1, end=2>(k) t1 = Squeeze(ts) j = Range(zero, t1, one)
   behind = Sub(i, j) far = Abs(behind) past = GreaterOrEqual(behind, zero) kept = Cast<to=9>(mask) key = Unsqueeze(kept, middle)
   {seen}
   m = Where(allowed, nothing, fill) qk = MatMul(qt, kt) scaled = Mul(qk, scale) {added}
   {softmax} mixed = MatMul(weights, vt) back = Transpose<perm=[0, 2, 1, 3]>(mixed)
   out = Reshape(back, flat) }}"""
_PLAIN = "k4 = Reshape(k, heads) v4 = Reshape(v, heads)"
_GROUPED = """k5 = Reshape(k, groups) v5 = Reshape(v, groups) kr = Expand(k5, twice) vr = Expand(v5, twice)
    k4 = Reshape(kr, heads) v4 = Reshape(vr, heads)"""
_ADDED = "masked = Add(scaled, m)"
_POSITION = "bounded = Tanh(position) moved = Add(scaled, bounded) masked = Add(moved, m)"
_SOFTMAX = "weights = Softmax<axis=-1>(masked)"
_GUARDED = "raw = Softmax<axis=-1>(masked) lost = IsNaN(raw) weights = Where(lost, nothing, raw)"
_LOWEST = "-3.4028234663852886e38"
_NEAR, _BACK = "near = LessOrEqual(far, three)", "recent = Less(behind, nine) near = And(recent, past)"
_SHIFTED = "early = Less(behind, nine) late = Greater(behind, three) near = And(early, late)"
_ALONE, _PADDED = " allowed = Identity(near)", " allowed = And(near, key)"
_WINDOWS = {_NEAR: (-3, 3), _BACK: (-8, 0), _SHIFTED: (-8, -4)}
LENGTHS = (1, 3, 4, 63, 64, 65, 70, 72, 134, 135, 136, 200)


def _model(
    window: str = _NEAR, rest: str = _PADDED, *, operands: str = _PLAIN, added: str = _ADDED, softmax: str = _SOFTMAX,
    fill: str = _LOWEST, rows: str = "s", keys: str = "s", kind: str = "float",
) -> onnx.ModelProto:  # fmt: skip
    width, number = 16 if operands == _GROUPED else 32, {"float": 1, "float16": 10}[kind]
    text = _TEXT.format(
        seen=window + rest, operands=operands, added=added, softmax=softmax, fill=fill, rows=rows, keys=keys, kind=kind,
        width=width, number=number,
    )  # fmt: skip
    return onnx.parser.parse_model(text)


def _feeds(model: onnx.ModelProto, length: int, pattern: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(length)
    mask = np.ones((3, length), np.int64)
    if pattern == "right":
        mask[1, 1:] = 0
        mask[2, length // 3 + 1 :] = 0
    elif pattern == "holes":
        mask = (draw.random((3, length)) < np.array([[0.05], [0.5], [0.0]])).astype(np.int64)
    widths = [item.type.tensor_type.shape.dim[-1].dim_value for item in model.graph.input[:3]]
    sizes = zip("qkv", widths, strict=True)
    found = {name: draw.standard_normal((3, length, size)).astype(np.float32) for name, size in sizes}
    position = draw.standard_normal((1, 4, length, length)).astype(np.float32)
    return {**found, "mask": mask, "position": position, "any": np.asarray(3)}


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {item.name: feeds[item.name] for item in session.get_inputs()})[0]


def _wanted(
    feeds: dict[str, np.ndarray], window: tuple[int, int], *, padded: bool, position: bool, lost: float | None
) -> np.ndarray:
    """The attention by its definition; rows without a key have the mean of all values, or `lost`."""
    query, key, value = (feeds[name].reshape(3, -1, feeds[name].shape[2] // 8, 8).transpose(0, 2, 1, 3) for name in "qkv")
    key, value = (item.repeat(4 // item.shape[1], 1) for item in (key, value))
    place = np.arange(query.shape[2])
    ahead = place - place[:, None]
    seen = np.broadcast_to((ahead >= window[0]) & (ahead <= window[1]), (3, 1, place.size, place.size)).copy()
    seen &= (feeds["mask"][:, None, None] > 0) | (not padded)
    scores = np.float32(0.35) * (query @ key.transpose(0, 1, 3, 2)) + (np.tanh(feeds["position"]) if position else 0)
    some = seen.any(-1, keepdims=True)
    scores = np.where(some, np.where(seen, scores, -np.inf), 0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result = weights / weights.sum(-1, keepdims=True) @ value
    result = result if lost is None else np.where(some, result, lost)
    return result.transpose(0, 2, 1, 3).reshape(feeds["q"].shape)


def _mask_form(model: onnx.ModelProto, **choices: object) -> tuple[onnx.ModelProto, str]:
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites", **choices)
    (site,) = result.report.sites
    assert (result.report.fused, result.report.differing, result.report.failures) == (1, 0, ())
    assert site.verified is not None
    return result.model, site.mask_form or ""


CASES = {
    "both sides": (_NEAR, _ALONE, {}),
    "both sides and padding": (_NEAR, _PADDED, {}),
    "behind": (_BACK, _ALONE, {}),
    "behind and padding": (_BACK, _PADDED, {}),
    "behind, grouped heads": (_BACK, _PADDED, {"operands": _GROUPED}),
    "a bias of its own for each head": (_NEAR, _ALONE, {"added": _POSITION}),
    "rows without a key become zero": (_NEAR, _PADDED, {"fill": "-inf", "softmax": _GUARDED}),
    "rows without a key stay NaN": (_NEAR, _PADDED, {"fill": "-inf"}),
    "further behind, so that the first rows see nothing": (_SHIFTED, _PADDED, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_in_blocks(case: str) -> None:
    window, rest, choices = CASES[case]
    model = _model(window, rest, **choices)
    fused, form = _mask_form(model)
    assert "64 rows and" in form
    lost = None if choices.get("fill") != "-inf" else 0.0 if "softmax" in choices else np.nan
    for length, pattern in itertools.product(LENGTHS, ("full", "right", "holes")):
        feeds = _feeds(model, length, pattern)
        found = _run(fused, feeds)
        wanted = _wanted(feeds, _WINDOWS[window], padded=rest == _PADDED, position="added" in choices, lost=lost)
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=f"{length} {pattern}")
        np.testing.assert_allclose(found, _run(model, feeds), atol=2e-5, err_msg=f"{length} {pattern}")


def test_nothing_is_left_to_do() -> None:
    fused, _ = _mask_form(_model())
    again = onnx_attnfuse.optimize(fused, ep="cpu", verify="sites")
    assert [site.status for site in again.report.sites] == ["already-fused"]
    assert [node.op_type for node in again.model.graph.node] == [node.op_type for node in fused.graph.node]


MISSES = {
    "a key that all rows see": _model(rest=" first = Equal(j, zero) either = Or(near, first) allowed = And(either, key)"),
    "every second key": _model("odd = Mod(behind, two) near = Equal(odd, zero)"),
    "no end behind": _model("near = LessOrEqual(behind, three)"),
    "a window that is an input": _model("near = LessOrEqual(far, any)"),
    "rows without a key keep something of their scores": _model(fill="-10000"),
    "more keys than blocks pay for": _model("wide = Constant<value_int = 254>() near = LessOrEqual(far, wide)"),
    "a sequence that is not much longer than the window": _model(rows="80", keys="80"),
    "one row": _model(rows="1", keys="t"),
    "float16": _model(kind="float16", fill="-65504"),
}


@pytest.mark.parametrize("case", MISSES)
def test_near_misses_stay_whole(case: str) -> None:
    assert "at a time" not in _mask_form(MISSES[case])[1]


@pytest.mark.parametrize(("length", "blocks"), [(80, False), (512, True)])
def test_lengths_that_are_told_decide(length: int, blocks: bool) -> None:
    assert ("at a time" in _mask_form(_model(), dim={"s": length})[1]) == blocks


@pytest.mark.parametrize(("number", "blocks"), [("254", True), ("600", False)])
def test_a_long_sequence_has_blocks_for_windows_that_verification_sees(number: str, blocks: bool) -> None:
    model = _model(f"wide = Constant<value_int = {number}>() near = LessOrEqual(far, wide)")
    assert ("at a time" in _mask_form(model, dim={"s": 8192})[1]) == blocks


def test_strips_that_begin_too_late_are_seen_by_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    read = blocks.band_of

    def late(spec: AttentionSpec, meaning: Meaning) -> blocks.Band | None:
        band = read(spec, meaning)
        return None if band is None else dataclasses.replace(band, back=band.back - 1)

    monkeypatch.setattr(blocks, "band_of", late)
    (site,) = onnx_attnfuse.optimize(_model(), ep="cpu", verify="sites").report.sites
    assert [reason.code for reason in site.reasons] == ["differs"]
    assert "at a time" not in (site.mask_form or "")
