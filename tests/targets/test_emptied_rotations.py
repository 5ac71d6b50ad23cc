"""Queries that are 0 in some rows, rotated by tables that are 0 there."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.bundled import Array, run

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float16[b, s, 32] q, float16[b, s, 32] k, float16[b, s, 32] v, int64[b, s] places, {mask})
=> (float16[b, s, 32] out{outputs})
<int64[4] split = {{0, 0, 2, 16}}, int64[3] flat = {{0, 0, 32}}, int64[1] heads = {{1}}, int64[1] last = {{-1}},
 int64[1] none = {{0}}, int64[1] end = {{100}}, int64[1] half = {{{half}}}, int64[1] width = {{{width}}},
 int64 zero = {{0}}, int64 one = {{1}}>
{{
    {angles}
    c = Cos(whole) sn = Sin(whole)
    q4 = Reshape(q, split) qt = Transpose<perm = [0, 2, 1, 3]>(q4) k4 = Reshape(k, split) kt = Transpose<perm = [0, 2, 1, 3]>(k4)
    {turned_q} {turned_k}
    kk = Transpose<perm = [0, 1, 3, 2]>(k_t) v4 = Reshape(v, split) vt = Transpose<perm = [0, 2, 1, 3]>(v4)
    qk = MatMul(q_t, kk) scores = Mul(qk, scale) {seen}
    weights = Softmax<axis = -1>(seen) mixed = MatMul(weights, vt) turned = Transpose<perm = [0, 2, 1, 3]>(mixed)
    out = Reshape(turned, flat) {more}
}}"""
_EACH = """row = Unsqueeze(places, last) real = Cast<to = 10>(row) angle = Mul(real, speeds)
    both = Concat<axis = -1>(angle, angle) whole = Unsqueeze(both, heads)"""
_SHARED = """shape = Shape<start = 1, end = 2>(q) length = Squeeze(shape) count = Range(zero, length, one)
    row = Unsqueeze(count, last) real = Cast<to = 10>(row) angle = Mul(real, speeds) whole = Concat<axis = -1>(angle, angle)"""
_ALL = """{0}_a = Slice({0}t, none, half, last) {0}_b = Slice({0}t, half, end, last) {0}_n = Neg({0}_b)
    {0}_r = Concat<axis = -1>({0}_n, {0}_a) {0}_c = Mul({0}t, c) {0}_s = Mul({0}_r, sn) {0}_t = Add({0}_c, {0}_s)"""
_SOME = """{0}_w = Slice({0}t, none, width, last) {0}_p = Slice({0}t, width, end, last) {0}_a = Slice({0}_w, none, half, last)
    {0}_b = Slice({0}_w, half, end, last) {0}_n = Neg({0}_b) {0}_r = Concat<axis = -1>({0}_n, {0}_a) {0}_c = Mul({0}_w, c)
    {0}_s = Mul({0}_r, sn) {0}_d = Add({0}_c, {0}_s) {0}_t = Concat<axis = -1>({0}_d, {0}_p)"""


def model_of(
    angles: str = _EACH,
    turned: str = _ALL,
    *,
    half: int = 8,
    mask: str = "bool[b, 1, s, s] mask",
    outputs: str = "",
    more: str = "",
    seen: str = "not_mask = Not(mask) seen = Where(not_mask, low, scores)",
) -> onnx.ModelProto:
    """Two heads of 16 channels, of which 2 · `half` are rotated; positions by entry or for all."""
    rotated = {f"turned_{name}": turned.format(name) for name in "qk"}
    text = _TEXT.format(angles=angles, **rotated, half=half, width=2 * half, mask=mask, outputs=outputs, more=more, seen=seen)
    model = onnx.parser.parse_model(text)
    speeds = (1.0 / 7 ** (np.arange(half) / half)).astype(np.float16)
    low = np.asarray(np.finfo(np.float16).min, np.float16)
    for name, array in (
        ("speeds", speeds),
        ("low", low),
        ("nil", np.zeros((), np.float16)),
        ("scale", np.asarray(0.25, np.float16)),
    ):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def fused(model: onnx.ModelProto, sites: int = 1) -> onnx.ModelProto:
    """What is written for it on CUDA, verified."""
    result = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", verify="sites")
    assert result.report.fused == sites
    return result.model


def query_of(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that gives the attention its queries."""
    made = {name: node for node in model.graph.node for name in node.output}
    attention = next(node for node in model.graph.node if node.op_type in {"Attention", "MultiHeadAttention"})
    return made[attention.input[0]]


def outputs_of(model: onnx.ModelProto, *, by_row: bool = True) -> Array:
    """What ONNX Runtime gives, without optimizations of its own; two rows, or an entry, have no key."""
    numbers = np.random.default_rng(1)
    kept = numbers.random((3, 1, 5, 5)) < 0.6
    kept[:, :, :, 0] = True
    kept[0, 0, 3] = kept[2, 0, 0] = False
    if not by_row:
        kept = np.repeat(np.asarray([True, False, True])[:, None, None, None], 5, axis=3)
    operands = {name: numbers.standard_normal((3, 5, 32)).astype(np.float16) for name in "qkv"}
    places = np.asarray([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [0, 0, 0, 1, 2]])
    return run(model, {**operands, "places": places, "mask": kept})["out"]


@pytest.mark.parametrize("by_row", [True, False], ids=["a row", "an entry"])
@pytest.mark.parametrize("angles", [_EACH, _SHARED], ids=["positions of each entry", "positions of all"])
def test_queries_are_emptied_by_the_tables_that_rotate_them(angles: str, by_row: bool) -> None:
    model = model_of(angles, mask="bool[b, 1, s, s] mask" if by_row else "bool[b, 1, 1, s] mask")
    result = fused(model)
    assert query_of(result).op_type == "RotaryEmbedding"
    rotations = [node for node in result.graph.node if node.op_type == "RotaryEmbedding"]
    assert len(rotations) == 2
    assert not set(rotations[0].input[2:]) & set(rotations[1].input[2:])
    wanted, found = outputs_of(model, by_row=by_row), outputs_of(result, by_row=by_row)
    np.testing.assert_allclose(found, wanted, atol=4e-3)


def test_rows_that_a_mask_is_added_to_are_emptied_by_the_tables_too() -> None:
    model = model_of(seen="bias = Where(mask, nil, low) seen = Add(scores, bias)")
    result = fused(model)
    assert query_of(result).op_type == "RotaryEmbedding"
    wanted, found = outputs_of(model), outputs_of(result)
    has_key = np.ones((3, 5), bool)
    has_key[0, 3] = has_key[2, 0] = False
    np.testing.assert_allclose(found[has_key], wanted[has_key], atol=4e-3)


def test_rows_of_all_entries_alike_leave_the_tables_as_short_as_they_are() -> None:
    model = model_of(_SHARED, mask="bool[1, 1, s, s] mask")
    result = onnx.shape_inference.infer_shapes(fused(model))
    made = {name: node for node in result.graph.node for name in node.output}
    places = next(item for item in result.graph.initializer if item.name == query_of(result).input[1])
    assert numpy_helper.to_array(places).tolist() == [0]
    assert made[query_of(result).input[2]].op_type in {"Where", "Reshape", "Squeeze"}


def test_channels_that_are_not_rotated_keep_their_where() -> None:
    model = model_of(turned=_SOME, half=4)
    result = fused(model)
    assert query_of(result).op_type == "Where"
    np.testing.assert_allclose(outputs_of(result), outputs_of(model), atol=4e-3)


def test_rotated_queries_that_two_attentions_empty_in_other_rows_have_tables_for_each() -> None:
    more = """qk_2 = MatMul(q_t, kk) scores_2 = Mul(qk_2, scale) seen_2 = Where(mask, low, scores_2)
        weights_2 = Softmax<axis = -1>(seen_2) other = MatMul(weights_2, vt)"""
    model = model_of(outputs=", float16[b, 2, s, 16] other", more=more)
    result = fused(model, sites=2)
    queries = [node.input[0] for node in result.graph.node if node.op_type == "MultiHeadAttention"]
    rotations = [node.output[0] for node in result.graph.node if node.op_type == "RotaryEmbedding"]
    assert len(queries) == len(set(queries)) == 2
    assert set(queries) < set(rotations)
    assert len(rotations) == 3
    np.testing.assert_allclose(outputs_of(result), outputs_of(model), atol=4e-3)
