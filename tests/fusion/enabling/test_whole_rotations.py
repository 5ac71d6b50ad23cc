"""First tokens that are not rotated, rotated by a cosine of 1 and a sine of 0: equal to the bit, and what stays cut."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.bundled import run
from tests.support.rewrites import counts, optimized

_TEXT = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
model (float[b, 7, 16] x{inputs}) => (float[b, 7, 16] seen, {outputs})
<int64[4] parted = {{0, 0, 2, 8}}, int64[3] flat = {{0, 0, 16}}, int64[2] sizes = {{2, 5}}, int64[1] first = {{0}},
 int64[1] two = {{2}}, int64[1] three = {{3}}, int64[1] end = {{99}}, int64[1] axis = {{2}}, int64[1] shifted = {{1}}>
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) weights = Softmax<axis = -1>(small)
   seen = MatMul(weights, x) heads = Reshape(seen, parted) turned = Transpose<perm = [0, 2, 1, 3]>(heads)
   {nodes} }}"""
_ROTATED = "r = com.microsoft.RotaryEmbedding(rest, first, cos, sin) joined = Concat<axis = 2>(prefix, r)"
_SPLIT = f"prefix, rest = Split<axis = 2>(turned, sizes) {_ROTATED}"
_SLICED = f"prefix = Slice(turned, first, two, axis) rest = Slice(turned, two, end, axis) {_ROTATED}"
_BACK = "back = Transpose<perm = [0, 2, 1, 3]>(joined) y = Reshape(back, flat)"
_FLAT, _HEADS = "float[b, 7, 16] y", "float[b, 2, 7, 8] joined"


def model_of(nodes: str, outputs: str = _FLAT) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_TEXT.format(nodes=nodes, outputs=outputs, inputs=""))
    angles = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    for name, array in {"cos": np.cos(angles), "sin": np.sin(angles), "scale": np.float32(0.35)}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def same(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    x = np.random.default_rng(1).standard_normal((3, 7, 16)).astype(np.float32)
    wanted, found = run(before, {"x": x}), run(after, {"x": x})
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [_SPLIT, _SLICED], ids=["Split", "Slice"])
def test_all_tokens_are_rotated_where_they_lie(cut: str) -> None:
    before = model_of(f"{cut} {_BACK}")
    after = optimized(before)
    assert [counts(after)[op] for op in ("Split", "Slice", "Transpose", "RotaryEmbedding")] == [0, 0, 0, 1]
    same(before, after)
    assert counts(onnx_attnfuse.optimize(after, ep="cuda").model) == counts(after)


def test_heads_in_front_stay_there_where_they_are_read() -> None:
    before = model_of(f"{_SPLIT} {_BACK}", f"{_FLAT}, {_HEADS}")
    after = optimized(before)
    assert [counts(after)[op] for op in ("Split", "Transpose", "RotaryEmbedding")] == [0, 2, 1]
    same(before, after)


@pytest.mark.parametrize(
    ("nodes", "ep"),
    [
        pytest.param(f"{_SPLIT} {_BACK}", "cpu", id="a CPU"),
        pytest.param(f"{_SPLIT} {_BACK}".replace("rest, first", "rest, shifted"), "cuda", id="positions do not begin at 0"),
        pytest.param(f"{_SPLIT} {_BACK}".replace("(prefix, r)", "(r, prefix)"), "cuda", id="the last tokens"),
        pytest.param(
            f"{_SPLIT} {_BACK}".replace("(prefix, r)", "(changed, r)").replace("r =", "changed = Neg(prefix) r ="),
            "cuda",
            id="the first tokens change",
        ),
        pytest.param(
            f"{_SLICED} {_BACK}".replace("rest = Slice(turned, two", "rest = Slice(turned, three").replace(
                "{0, 0, 16}", "{0, 6, 16}"
            ),
            "cuda",
            id="a token is left out",
        ),
    ],
)
def test_what_is_cut_otherwise_stays(nodes: str, ep: str) -> None:
    outputs = "float[b, 6, 16] y" if "three" in nodes else _FLAT
    before = model_of(nodes, outputs)
    after = optimized(before, ep)
    assert counts(after)["Concat"] == 1
    same(before, after)
