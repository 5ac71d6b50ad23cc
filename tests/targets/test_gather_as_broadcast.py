"""Masks that are picked element by element are made of the data as it lies, where every element is taken in its place."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED, run
from tests.support.small_models import parsed

_TEXT = """<ir_version: 10, opset_import: ["" : 18]>
attention (float[b, 3, s, 4] q, float[b, 3, t, 4] k, float[b, 3, t, 4] v, int64[b, KEYS] seen) => (float[b, 3, s, 4] out)
<int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] last = {-1}, int64[3] behind = {1, 2, 3},
 int64[3] around = {0, 1, 2}, float none = {0}, float low = {-3.4028234663852886e38}>
{
    entries = Shape<start = 0, end = 1>(q)
    rows = Shape<start = 2, end = 3>(q)
    keys = Shape<start = 2, end = 3>(k)
    n = Squeeze(entries)
    s_ = Squeeze(rows)
    t_ = Squeeze(keys)
    bs = Range(zero, n, one)
    is = Range(zero, s_, one)
    js = Range(zero, t_, one)
    end = Sub(t_, one)
    b_ = Unsqueeze(bs, behind)
    i_ = Unsqueeze(is, first)
    row = Unsqueeze(i_, last)
    j_ = Unsqueeze(js, around)
    entry = ENTRY
    key = KEY
    both = Max(entry, row, key)
    shape = Shape(both)
    entry_wide = Expand(entry, shape)
    key_wide = Expand(key, shape)
    entry_last = Unsqueeze(entry_wide, last)
    key_last = Unsqueeze(key_wide, last)
    places = Concat<axis = -1>(entry_last, key_last)
    truths = Cast<to = 9>(seen)
    PICKED
    causal = LessOrEqual(j_, row)
    kept = And(causal, picked)
    mask = Where(kept, none, low)
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    qk = MatMul(q, kt)
    masked = Add(qk, mask)
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, v)
}"""


_OF_A_TABLE = "picked = GatherND(truths, places)"
_OF_A_LINE = """
    any = Constant<value_ints = [-1]>()
    line = Reshape(truths, any)
    length = Shape<start = 1>(seen)
    before = Mul(entry, length)
    place = Add(before, key)
    picked = Gather(line, place)"""


def _fused(entry: str, key: str, keys: str, picked: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    text = _TEXT.replace("PICKED", picked)
    source = parsed(text.replace("ENTRY", entry).replace("KEYS", keys).replace("KEY", key))
    result = onnx_attnfuse.optimize(source, ep="cpu", verify="sites")
    assert [site.status for site in result.report.sites] == ["fused"]
    return source, result.model if isinstance(result.model, onnx.ModelProto) else ir.to_proto(result.model)


def _assert_equal(source: onnx.ModelProto, fused: onnx.ModelProto, longer: int = 0) -> None:
    """On masks with rows that lose every key, and sizes of 1."""
    rng = np.random.default_rng(0)
    for entries, rows, keys in ((3, 5, 5), (1, 1, 4), (2, 4, 1)):
        sizes = {"q": rows, "k": keys, "v": keys}
        feeds = {name: 3 * rng.standard_normal((entries, 3, size, 4)).astype(np.float32) for name, size in sizes.items()}
        seen = (rng.random((entries, keys + longer)) < 0.6).astype(np.int64) * 2
        seen[-1, :] = 0
        feeds["seen"] = seen
        np.testing.assert_allclose(run(fused, feeds)["out"], run(source, feeds)["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "picked"),
    [
        pytest.param("t", _OF_A_TABLE, id="from a table"),
        pytest.param("more", _OF_A_TABLE, id="from a table of a length of its own"),
        pytest.param("t", _OF_A_LINE, id="from a line"),
    ],
)
def test_nothing_is_picked_where_every_element_is_taken_in_its_place(keys: str, picked: str) -> None:
    source, fused = _fused("Identity(b_)", "Identity(j_)", keys, picked)
    ops = [node.op_type for node in fused.graph.node]
    assert not {"Gather", "GatherND"} & set(ops)
    assert ("Slice" in ops) == (keys == "more")
    _assert_equal(source, fused, longer=2 if keys == "more" else 0)


@pytest.mark.parametrize(
    ("entry", "key", "keys", "picked"),
    [
        pytest.param("Identity(b_)", "Sub(end, j_)", "t", _OF_A_TABLE, id="keys from behind"),
        pytest.param("Mul(b_, zero)", "Identity(j_)", "t", _OF_A_TABLE, id="the first entry for all"),
        pytest.param("Identity(b_)", "Min(j_, row)", "t", _OF_A_TABLE, id="the key of the row at most"),
        pytest.param(
            "Identity(b_)", "Identity(j_)", "more", _OF_A_LINE, id="from a line whose rows may be shorter than the keys"
        ),
    ],
)
def test_elements_of_other_places_are_picked_as_before(entry: str, key: str, keys: str, picked: str) -> None:
    source, fused = _fused(entry, key, keys, picked)
    assert {"Gather", "GatherND"} & {node.op_type for node in fused.graph.node}
    _assert_equal(source, fused)


def test_an_export_of_today_is_told_of_its_rows_by_its_keys() -> None:
    (path,) = (path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
    result = onnx_attnfuse.optimize(path, ep="cpu", verify="sites")
    assert {site.mask_form for site in result.report.sites} == {"attention_bias b 1 1 t"}
    model = result.model if isinstance(result.model, onnx.ModelProto) else ir.to_proto(result.model)
    assert not {"GatherND", "Max", "Range"} & {node.op_type for node in model.graph.node}
