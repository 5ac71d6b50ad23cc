"""Attention of ai.onnx in a window of a cache: it gives 0 where a row sees no key, so the proof needs that each row sees one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.certify.certificate import certify

pytest.importorskip("z3")

_MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[B,4,S,8] q, float[B,2,S,8] kn, float[B,2,S,8] vn, float[B,2,P,8] pk, float[B,2,P,8] pv)
=> (float[B,S,32] y, float[B,2,T,8] k, float[B,2,T,8] v)
<int64[4] rep = {0, 0, 1, 1}, int64 two = {2}, int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}, int64 width = {3},
 float low = {-1e9}, int64[3] flat = {0, 0, 32}> {
    k = Concat<axis = 2>(pk, kn) v = Concat<axis = 2>(pv, vn)
    kr = Gather<axis = 1>(k, rep) vr = Gather<axis = 1>(v, rep)
    kt = Transpose<perm = [0, 1, 3, 2]>(kr) scores = MatMul(q, kt)
    ks = Shape(k) total = Gather<axis = 0>(ks, two) qs = Shape(q) length = Gather<axis = 0>(qs, two)
    j = Range(zero, total, one) first = Sub(total, length)
    rows = Range(zero, length, one) places = Add(rows, first) i = Unsqueeze(places, axis)
    earlier = LessOrEqual(j, i) distance = Sub(i, j) near = Less(distance, width) seen = And(earlier, near)
    masked = Where(seen, scores, low) weights = Softmax<axis = -1>(masked)
    o = MatMul(weights, vr) back = Transpose<perm = [0, 2, 1, 3]>(o) y = Reshape(back, flat)
}"""


def _of_width(model: onnx.ModelProto, width: int) -> onnx.ModelProto:
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    found = next(item for item in copy.graph.initializer if item.name == "width")
    found.CopyFrom(numpy_helper.from_array(np.asarray(width, np.int64), "width"))
    return copy


def _run(model: onnx.ModelProto) -> np.ndarray:
    random = np.random.default_rng(1)
    shapes = {"q": (2, 4, 3, 8), "kn": (2, 2, 3, 8), "vn": (2, 2, 3, 8), "pk": (2, 2, 5, 8), "pv": (2, 2, 5, 8)}
    given = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], given)[0])


@pytest.mark.parametrize(("width", "is_equal"), [(3, True), (1, True), (0, False)])
def test_a_window_is_proved_where_each_row_sees_a_key(width: int, is_equal: bool) -> None:
    before = onnx.parser.parse_model(_MODEL)
    after = onnx_attnfuse.optimize(before, verify="none").model
    assert any(node.op_type == "Attention" for node in after.graph.node)
    pair = _of_width(before, width), _of_width(after, width)
    found = certify(*map(ir.from_proto, pair))
    assert [claim.name for claim in found.open] == ([] if is_equal else ["y"])
    assert np.allclose(*map(_run, pair), atol=1e-5) == is_equal
