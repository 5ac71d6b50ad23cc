"""A matrix that is repeated for each entry is multiplied as it is, where the product broadcasts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

import onnx_attnfuse

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
relative (float[b, 6, 8] x) => (float[b, 2, 6, 4] y)
<int64[4] split = {{0, 0, 2, 4}}, int64[3] stack = {{-1, 6, 4}}, int64[4] apart = {{-1, 2, 6, 6}}, int64[1] one = {{1}}>
{{ by_head = Reshape(x, split) q = Transpose<perm = [0, 2, 1, 3]>(by_head) k = Transpose<perm = [0, 2, 3, 1]>(by_head)
   rows = Reshape(q, stack) count = Shape<start = 0, end = 1>(x) two = Add(one, one) times = Concat<axis = 0>({times})
   copies = Tile(places, times) {turned} scores = MatMul(rows, right) bias = Reshape(scores, apart) qk = MatMul(q, k)
   sum = Add(qk, bias) weights = Softmax<axis = -1>(sum) y = MatMul(weights, q) }}"""
_TURNED, _PLAIN = "right = Transpose<perm = [0, 2, 1]>(copies)", "right = Identity(copies)"


def model_of(places: tuple[int, ...] = (2, 6, 4), times: str = "count, one, one", turned: str = _TURNED) -> onnx.ModelProto:
    """An attention of two heads whose bias is a product with places that are repeated for each entry."""
    model = onnx.parser.parse_model(_TEXT.format(times=times, turned=turned))
    array = np.random.default_rng(0).standard_normal(places).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, "places"))
    return model


def results(model: onnx.ModelProto) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    return [session.run(None, {"x": random.standard_normal((b, 6, 8)).astype(np.float32)})[0] for b in (1, 3)]


def repeated(result: onnx_attnfuse.Result) -> int:
    return sum(node.op_type == "Tile" for node in result.model.graph.node)


@pytest.mark.parametrize("model", [model_of(), model_of((2, 4, 6), turned=_PLAIN)], ids=["turned", "as it is"])
def test_the_matrix_is_not_repeated(model: onnx.ModelProto) -> None:
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    assert (result.report.fused, repeated(result)) == (1, 0)
    assert any("without their copies" in note for note in result.report.notes)
    for old, new in zip(results(model), results(result.model), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)
    assert not onnx_attnfuse.optimize(result.model, ep="cpu").report.notes


@pytest.mark.parametrize(
    "model",
    [
        model_of((2, 6, 2), "count, one, two"),
        model_of((2, 3, 4), "count, two, one"),
        model_of((2, 4, 3), "count, one, two", _PLAIN),
    ],
    ids=["more columns", "more rows", "more columns, as it is"],
)
def test_a_matrix_that_is_repeated_along_its_own_axes_stays(model: onnx.ModelProto) -> None:
    result = onnx_attnfuse.optimize(model, ep="cpu", verify="sites")
    assert repeated(result) == 1
    for old, new in zip(results(model), results(result.model), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)


def test_it_stays_where_that_was_not_measured() -> None:
    assert repeated(onnx_attnfuse.optimize(model_of(), ep="cuda", verify="sites")) == 1
