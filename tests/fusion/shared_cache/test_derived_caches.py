"""Keys and values that are computed from a cache: latents, heads in rounds, keys and values of different sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from tests.support.decoder_loops import assert_serves, shared

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
decoder (int64[b, s] input_ids, int64[b, total] attention_mask, float[b, {first}, past, {c}] past_key,
         float[b, {second}, past, {d}] past_value{inputs})
     => (float[b, s, 99] logits, float[b, {first}, total, {c}] present_key, float[b, {second}, total, {d}] present_value{outputs})
<int64[4] queries = {{0, 0, 4, {h}}}, int64[4] heads = {{0, 0, {first}, {c}}}, int64[4] others = {{0, 0, {second}, {d}}},
 int64[4] own = {{0, -1, 4, {both}}}, int64[2] parts = {{8, {v}}}, int64[4] all = {{1, 4, 1, 1}},
 int64[4] rounds = {{1, 2, 1, 1}}, int64[5] shares = {{1, 1, 2, 1, 1}}, int64[4] joined = {{0, 4, -1, {h}}},
 int64[4] laid = {{0, 4, -1, {v}}}, int64[3] wide = {{0, 0, {width}}},
 int64[1] second = {{2}}, int64[1] last = {{-1}}, int64[2] middle = {{1, 2}},
 int64 zero = {{0}}, int64 one = {{1}}, int64 along = {{2}}, float scale = {{0.3}},
 float nothing = {{0}}, float fill = {{-60000}}>
{{ ps = Shape<start=2, end=3>(past_key) p1 = Squeeze(ps) ns = Shape<start=1, end=2>(input_ids) n1 = Squeeze(ns)
   t1 = Add(p1, n1) rows = Range(p1, t1, one) i = Unsqueeze(rows, last) j = Range(zero, t1, one) causal = LessOrEqual(j, i)
   kept = Cast<to=9>(attention_mask) row = Unsqueeze(kept, middle) allowed = And(causal, row)
   bias = Where(allowed, nothing, fill) x = Gather(table, input_ids)
   q = MatMul(x, wq) q4 = Reshape(q, queries) qt = Transpose<perm=[0, 2, 1, 3]>(q4)
   nk = MatMul(x, wk) nk4 = Reshape(nk, heads) nkt = Transpose<perm=[0, 2, 1, 3]>(nk4)
   nv = MatMul(x, wv) nv4 = Reshape(nv, others) nvt = Transpose<perm=[0, 2, 1, 3]>(nv4)
   present_key = Concat<axis=2>(past_key, nkt) present_value = Concat<axis=2>(past_value, nvt)
   {computed}
   kx = Transpose<perm=[0, 1, 3, 2]>(k) qk = MatMul(qt, kx) scaled = Mul(qk, scale) masked = Add(scaled, bias)
   weights = Softmax<axis=-1>(masked) mixed = MatMul(weights, v)
   back = Transpose<perm=[0, 2, 1, 3]>(mixed) flat = Reshape(back, wide) out = MatMul(flat, wo) y = Add(x, out)
   logits = MatMul(y, words) {end} }}"""
_EXPANDED = "e0 = MatMul(present_key, we) e = {f}(e0) e4 = Reshape(e, own) et = Transpose<perm=[0, 2, 1, 3]>(e4) {split}"
_SPLIT = "kn, v = Split<axis=3>(et, parts) kr = Expand({rotary}, all) k = Concat<axis=3>(kn, kr)"
_ASSIGNED = """kn, v = Split<axis=3>(et, parts) kr = Expand(present_value, all) ks = Concat<axis=3>(kn, kr)
   zs = Shape(ks) zeros = ConstantOfShape(zs) zt = Transpose<perm=[3, 1, 2, 0]>(zeros) at = Range(zero, length, one)
   front = Slice(at, first0, half) f1 = Unsqueeze(front, last) rest = Slice(at, half, far) r1 = Unsqueeze(rest, last)
   knt = Transpose<perm=[3, 1, 2, 0]>(kn) krt = Transpose<perm=[3, 1, 2, 0]>(kr)
   s1 = ScatterND(zt, f1, knt) s1t = Transpose<perm=[3, 1, 2, 0]>(s1) s1u = Transpose<perm=[3, 1, 2, 0]>(s1t)
   s2 = ScatterND(s1u, r1, krt) k = Transpose<perm=[3, 1, 2, 0]>(s2)"""
_ROUNDS = "k = Tile(present_key, rounds) v = Tile(present_value, rounds)"
_GROUPS = """ku = Unsqueeze(present_key, second) ke = Expand(ku, shares) k = Reshape(ke, joined)
   vu = Unsqueeze(present_value, second) ve = Expand(vu, shares) v = Reshape(ve, laid)"""


def _latent(split: str = _SPLIT.format(rotary="present_value"), f: str = "Identity", c: int = 16, **more: str) -> onnx.ModelProto:
    """A decoder that caches latents and one key for all heads."""
    return _made(_EXPANDED.format(f=f, split=split), {"first": 1, "second": 1, "c": c, "d": 8, "h": 16, "v": 8}, **more)


def _made(computed: str, sizes: dict[str, int], inputs: str = "", outputs: str = "", end: str = "") -> onnx.ModelProto:
    sizes = sizes | {"both": 8 + sizes["v"], "width": 4 * sizes["v"]}
    model = onnx.parser.parse_model(_TEXT.format(computed=computed, inputs=inputs, outputs=outputs, end=end, **sizes))
    rng = np.random.default_rng(0)
    shapes = {
        "table": (99, 32),
        "words": (32, 99),
        "wq": (32, 4 * sizes["h"]),
        "wk": (32, sizes["first"] * sizes["c"]),
        "wv": (32, sizes["second"] * sizes["d"]),
        "we": (sizes["c"], 4 * sizes["both"]),
        "wo": (4 * sizes["v"], 32),
    }
    weights = {name: rng.standard_normal(shape) * 1.5 / shape[-2] ** 0.5 for name, shape in shapes.items()}
    numbers = {"length": 16, "half": [8], "first0": [0], "far": [99]}
    for name, array in [(name, array.astype(np.float32)) for name, array in weights.items()]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, number in numbers.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, np.int64), name))
    return model


def _by_operator(model: onnx.ModelProto) -> onnx.ModelProto:
    """The decoder with ai.onnx Attention, which has the mask as truth values."""
    nodes = {node.output[0]: node for node in model.graph.node}
    made = onnx.helper.make_node("Attention", ["qt", "k", "v", "allowed"], ["mixed"], scale=0.3)
    kept = [made if node is nodes["mixed"] else node for node in model.graph.node]
    gone = [nodes[name] for name in ("bias", "kx", "qk", "scaled", "masked", "weights")]
    del model.graph.node[:]
    model.graph.node.extend(node for node in kept if node not in gone)
    model.opset_import[0].version = 23
    return model


_PLAIN = {"first": 2, "second": 2, "c": 12, "d": 8, "h": 12, "v": 8}
_SERVED = {
    "latents": (_latent(), 1, 24),
    "latents that are no smaller": (_latent(c=64), 4, 16),
    "latents through an activation": (_latent(f="Tanh"), 4, 16),
    "latents assigned to slices": (_latent(_ASSIGNED), 1, 24),
    "latents that an operator attends to": (_by_operator(_latent()), 1, 24),
    "keys wider than values": (_made(_GROUPS, _PLAIN), 2, 16),
    "values wider than keys": (_made(_GROUPS, _PLAIN | {"c": 8, "h": 8, "d": 12, "v": 12}), 2, 16),
    "heads in rounds": (_made(_ROUNDS, _PLAIN | {"c": 8, "h": 8}), 2, 8),
    "rounds of different sizes": (_made(_ROUNDS, _PLAIN), 2, 16),
}
_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}


@pytest.mark.parametrize("name", _SERVED)
def test_their_cache_is_one_of_keys_and_values(name: str) -> None:
    model, heads, size = _SERVED[name]
    result = shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")]
    assert (found.kv_heads, found.head_size) == (heads, size)
    assert not {"ScatterND", "Tile"} & {node.op_type for node in result.model.graph.node}
    for padding in _PADDINGS.values():
        assert_serves(model, result, padding, (1, 1, 1))


def test_weights_that_queries_are_multiplied_by_are_constants() -> None:
    model = shared(_latent()).model
    given = {item.name for item in (*model.graph.input, *model.graph.initializer)}
    assert all(set(node.input) - given for node in model.graph.node if node.op_type in {"MatMul", "Transpose", "Slice"})
    shapes = {tuple(item.dims) for item in model.graph.initializer if item.name.startswith("attnfuse/weight")}
    assert shapes == {(4, 16, 24), (4, 24, 8)}


def test_they_are_not_read_for_one_entry_as_pages_have() -> None:
    result = shared(_latent(), cache="paged")
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"cache-kept"}


@pytest.mark.parametrize(("latents", "sizes"), [(248, [256, 256]), (256, [264, 152])])
def test_wide_heads_are_for_providers_that_are_known_to_take_them(latents: int, sizes: list[int]) -> None:
    computed = _EXPANDED.format(f="Identity", split=_SPLIT.format(rotary="present_value"))
    model = _made(computed, {"first": 1, "second": 1, "c": latents, "d": 8, "h": 16, "v": 152})
    half = onnx_attnfuse.convert(model, dtype="float16").model
    found = [shared(half, ep=ep, verify="none").report.decoder for ep in ("cpu", "cuda")]
    assert [item and item.head_size for item in found] == sizes


_TURNED = """angle = Cast<to=1>(j) angles = Unsqueeze(angle, last) turn = Cos(angles) turned = Mul(present_value, turn) """
_NEAR_MISSES = {
    "positions that are added up": (
        _latent("run = CumSum(present_value, along) " + _SPLIT.format(rotary="run")), "cache-kept",
    ),
    "keys that are turned by their positions": (_latent(_TURNED + _SPLIT.format(rotary="turned")), "cache-kept"),
    "a factor that a caller gives": (
        _latent("gained = Mul(present_value, gain) " + _SPLIT.format(rotary="gained"), inputs=", float[1] gain"),
        "cache-kept",
    ),
    "latents that are read otherwise": (
        _latent(end="total_sum = ReduceSum<keepdims=0>(present_key)", outputs=", float[] total_sum"), "cache-used",
    ),
    "a past that is read otherwise": (
        _latent(end="total_sum = ReduceSum<keepdims=0>(past_value)", outputs=", float[] total_sum"), "cache-used",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _NEAR_MISSES)
def test_near_misses_are_left_as_they_were(name: str) -> None:
    model, code = _NEAR_MISSES[name]
    result = shared(model)
    assert result.report.decoder is None
    assert code in {reason.code for site in result.report.sites for reason in site.reasons}
    assert any(note.startswith("the cache is as it was: ") for note in result.report.notes)
    assert [site.status for site in result.report.sites] == ["fused"]
    assert [item.name for item in result.model.graph.input] == [item.name for item in model.graph.input]
    assert [item.name for item in result.model.graph.output] == [item.name for item in model.graph.output]
