"""What stands before a normalization on an execution provider that merges it in and is wrong then."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import Array, run
from tests.support.small_models import parsed

RMS = """<ir_version: 9, opset_import: ["" : 18]>
norm (float[b, s, 8] x) => (float[b, s, 8] out)
<float two = {2}, float small = {1e-6}, int64[1] last = {-1}, float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}>
{
    square = Pow(x, two)
    mean = ReduceMean<keepdims = 1>(square, last)
    shifted = Add(mean, small)
    root = Sqrt(shifted)
    inverse = Reciprocal(root)
    normal = Mul(x, inverse)
    out = Mul(weight, normal)
}"""
TABLE = """<ir_version: 9, opset_import: ["" : 18]>
norm (float[b, s, 8] x, float[t, s, 8] table) => (float[b, s, 8] out)
<float[8] weight = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] bias = {0, 1, 2, 3, 4, 5, 6, 7}>
{
    total = Add(table, x)
    between = Mul(total, weight)
    out = LayerNormalization<axis = -1>(between, weight, bias)
}"""
SIZES = {"b": 2, "s": 3, "t": 1}


def written(text: str, ep: str = "qnn", sizes: dict[str, int] = SIZES) -> onnx.ModelProto:
    """What is written for an execution provider, which gives what the source gives and is left alone the second time."""
    source = parsed(text)
    random = np.random.default_rng(0)
    dims = {
        entry.name: [item.dim_param or item.dim_value for item in entry.type.tensor_type.shape.dim]
        for entry in source.graph.input
    }
    feeds: dict[str, Array] = {
        name: random.normal(size=[sizes.get(dim, dim) for dim in found]).astype(np.float32) for name, found in dims.items()
    }
    model = onnx_attnfuse.optimize(source, ep=ep, dim=sizes).model
    np.testing.assert_allclose(run(model, feeds)["out"], run(source, feeds)["out"], rtol=1e-6)
    again = onnx_attnfuse.optimize(model, ep=ep, dim=sizes).model
    assert operators(again) == operators(model)
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of a model in their order."""
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("ep", ["qnn", "qnn,cpu"])
def test_the_reciprocal_of_a_root_becomes_a_quotient(ep: str) -> None:
    found = operators(written(RMS, ep))
    assert "Reciprocal" not in found
    assert found.count("Div") == 1


def test_another_reciprocal_stays() -> None:
    assert "Reciprocal" in operators(written(RMS.replace("Sqrt(", "Exp(")))


def test_a_table_of_all_entries_is_repeated_before_a_normalization() -> None:
    found = written(TABLE)
    assert operators(found).count("Expand") == 1
    table = next(node for node in found.graph.node if node.op_type == "Expand")
    assert table.input[0] == "table"
    assert next(node for node in found.graph.node if node.op_type == "Add").input[0] == table.output[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mul(total, weight)", "Relu(total)"),
        ("LayerNormalization<axis = -1>(between, weight, bias)", "Softmax<axis = -1>(between)"),
        ("float[t, s, 8] table", "float[t, t, 8] table"),
        ("float[t, s, 8] table", "float[b, s, 8] table"),
        ("float[t, s, 8] table", "float[8] table"),
        ("Add(table, x)", "Sub(table, x)"),
    ],
)
def test_where_it_is_right_nothing_is_repeated(old: str, new: str) -> None:
    assert "Expand" not in operators(written(TABLE.replace(old, new)))


def test_one_entry_needs_no_repeating() -> None:
    assert "Expand" not in operators(written(TABLE, sizes={**SIZES, "b": 1}))


@pytest.mark.parametrize("text", [RMS, TABLE])
def test_other_providers_get_both_as_they_are(text: str) -> None:
    assert operators(written(text, "openvino")) == operators(parsed(text))


def test_rms_normalization_is_spelled_out() -> None:
    text = TABLE.replace('"" : 18', '"" : 23').replace(
        "LayerNormalization<axis = -1>(between, weight, bias)", "RMSNormalization<axis = -1>(between, weight)"
    )
    found = operators(written(text))
    assert not {"RMSNormalization", "Reciprocal"} & set(found)
    assert "RMSNormalization" in operators(written(text, "coreml"))
