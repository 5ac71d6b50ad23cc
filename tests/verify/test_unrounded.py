"""Whole quantised models: a rounding that falls the other way is no difference, and hides none."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.quantised.roundings import added_roundings, same_roundings, without_roundings
from tests.support.bundled import run
from tests.support.quantised import dynamically_quantised, quantised

_PRODUCTS = {
    "MatMulInteger": (
        "float[r, 2] x",
        "float[r, 3] y",
        "n = MatMulInteger(codes, w, point, w_point)",
        np.uint8([[9, 200, 31], [250, 7, 90]]),
    ),
    "ConvInteger": (
        "float[1, 2, r, 3] x",
        "float[1, 2, r, 3] y",
        "n = ConvInteger<pads = [1, 1, 1, 1]>(codes, w, point, w_point)",
        np.arange(36, dtype=np.uint8).reshape(2, 2, 3, 3) * 7,
    ),
}
_MODEL = """<ir_version: 8, opset_import: ["" : 17]>
model ({given}) => ({result}) {{
    {near} {before} codes, scale, point = DynamicQuantizeLinear(near) {product}
    floats = Cast<to = 1>(n) both = Mul(scale, w_scale) y = Mul(floats, both) }}"""
_NEAR = {"MatMulInteger": "near = Mul(x, factor)", "ConvInteger": "near = Identity(x)"}
_COARSE = "step = Constant<value = float {0.03125}> () c = QuantizeLinear(near, step) nearer = DequantizeLinear(c, step)"
_W_POINT, _W_SCALE = np.uint8(100), np.float32(0.01)


def model(factor: float, op: str = "MatMulInteger", before: str = "") -> onnx.ModelProto:
    """A product of integers that are rounded at run time, of inputs whose first column has a factor."""
    given, result, product, weights = _PRODUCTS[op]
    found = onnx.parser.parse_model(_MODEL.format(given=given, result=result, product=product, before=before, near=_NEAR[op]))
    if before:
        (quantize,) = (node for node in found.graph.node if node.output[0] == "codes")
        quantize.input[0] = "nearer"
    numbers = {"factor": np.float32([factor, 1]), "w": weights, "w_point": _W_POINT, "w_scale": _W_SCALE}
    found.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in numbers.items())
    return found


@pytest.mark.parametrize("op", _PRODUCTS)
def test_a_product_of_integers_is_one_of_floats_without_the_rounding(op: str) -> None:
    given = np.random.default_rng(0).standard_normal((4, 2) if op == "MatMulInteger" else (1, 2, 4, 3)).astype(np.float32)
    bare = ir.to_proto(without_roundings(ir.from_proto(model(1.0, op))))
    assert op not in {node.op_type for node in bare.graph.node}
    weights = (_PRODUCTS[op][3].astype(np.float64) - 100) * 0.01
    if op == "MatMulInteger":
        expected = given @ weights
    else:
        padded = np.pad(given, [(0, 0), (0, 0), (1, 1), (1, 1)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        expected = np.einsum("nchwij,ocij->nohw", windows, weights)
    np.testing.assert_allclose(run(bare, {"x": given})["y"], expected, atol=1e-5)
    assert np.abs(run(model(1.0, op), {"x": given})["y"] - expected).max() > 1e-4


@pytest.mark.parametrize("op", _PRODUCTS)
def test_one_whose_numbers_are_read_as_integers_stays(op: str) -> None:
    found = model(1.0, op)
    found.graph.output.append(onnx.helper.make_tensor_value_info("n", onnx.TensorProto.INT32, None))
    bare = without_roundings(ir.from_proto(found))
    assert op in {node.op_type for node in bare.graph}
    assert not same_roundings(ir.from_proto(found), ir.from_proto(found))


def _rows(factor: float, before: str = "") -> onnx.ModelProto:
    """The model with 4,000 rows, of which some have a number that a factor of 1.00001 takes to the next step."""
    found = model(factor, before=before)
    found.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4000
    found.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4000
    return found


def test_roundings_that_fall_the_other_way_are_no_difference() -> None:
    verdict = check_models(_rows(1.0), _rows(1.00001))
    assert verdict.equal, verdict.detail
    assert "but for roundings that fall the other way" in verdict.detail
    assert 0 < verdict.max_abs_error < 1e-3
    found = onnx_attnfuse.verify_models(_rows(1.0), _rows(1.00001))
    assert found.equal, found.detail


@pytest.mark.parametrize(
    ("factor", "before"),
    [
        pytest.param(1.004, "", id="a factor as small as a step"),
        pytest.param(1.0, _COARSE, id="one rounding more"),
        pytest.param(1.00001, "lower = Constant<value = float {-2.0}> () nearer = Max(near, lower)", id="cut off"),
    ],
)
def test_they_hide_no_difference_as_small(factor: float, before: str) -> None:
    other = _rows(factor, before)
    assert not check_models(_rows(1.0), other).equal
    assert not onnx_attnfuse.verify_models(_rows(1.0), other).equal


@pytest.mark.parametrize("name", ["swin__dyn18__sdpa", "bert__dyn18__sdpa"])
def test_a_wrong_rewrite_of_a_quantised_model_is_found(name: str) -> None:
    source = dynamically_quantised(name)
    fused = onnx_attnfuse.optimize(source, target="MultiHeadAttention", verify="model").model
    assert check_models(source, fused).equal
    node = next(node for node in fused.graph.node if node.op_type == "MultiHeadAttention")
    scale = next(item for item in node.attribute if item.name == "scale")
    scale.f *= 1.2
    assert not check_models(source, fused).equal


def test_roundings_are_the_same_in_both_directions() -> None:
    static = ir.from_proto(quantised("vit__dyn18__sdpa", spared=True))
    dynamic = ir.from_proto(dynamically_quantised("vit__dyn18__sdpa"))
    assert same_roundings(static, static)
    assert same_roundings(dynamic, dynamic)
    bare = without_roundings(dynamic)
    assert not added_roundings(dynamic, bare)
    assert added_roundings(bare, dynamic)
    assert not same_roundings(dynamic, bare)
    assert not same_roundings(bare, bare)
