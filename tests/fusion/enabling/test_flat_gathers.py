"""Indices of Gather on an execution provider that is wrong where they have many axes, and parts of a Concat without elements."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import Array, run
from tests.support.small_models import parsed

TEXT = """<ir_version: 9, opset_import: ["" : 18]>
attention (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v, bool[b, s] mask) => (float[b, 2, s, 4] out)
<float scale = {0.5}, float low = {-3.4e38}, float zero = {0}, int64[1] last = {-1}, int64[4] laid = {2, 1, 1, 3},
 int64[6] places = {2, 1, 0, 5, 4, 3}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(q, kt)
    scaled = Mul(product, scale)
    rows = Reshape<allowzero = 0>(places, laid)
    column = Flatten<axis = 2>(mask)
    gathered = Gather<axis = 0>(column, rows)
    seen = Squeeze(gathered, last)
    added = Where(seen, zero, low)
    scores = Add(scaled, added)
    weights = Softmax<axis = -1>(scores)
    out = MatMul(weights, v)
}"""
FEW_AXES = (
    TEXT.replace("{2, 1, 1, 3}", "{2, 3}")
    .replace("int64[4] laid", "int64[2] laid")
    .replace(
        "added = Where(seen, zero, low)",
        "added2 = Where(seen, zero, low)\n    middle = Constant<value_ints = [1, 2]>()\n    added = Unsqueeze(added2, middle)",
    )
)
EMPTY = """<ir_version: 9, opset_import: ["" : 18]>
attention (float[b, 2, s, 4] q, float[b, 2, s, 4] k, float[b, 2, s, 4] v) => (float[b, 2, s, 4] out)
<float scale = {0.5}, int64[1] first = {0}, int64[1] begin = {FROM}, int64[1] far = {1000}, int64[1] last = {-1}>
{
    turned = Slice(q, first, begin, last)
    rest = Slice(q, begin, far, last)
    other = Neg(turned)
    whole = Concat<axis = -1>(other, rest)
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(whole, kt)
    scaled = Mul(product, scale)
    weights = Softmax<axis = -1>(scaled)
    out = MatMul(weights, v)
}"""
SIZES = {"b": 2, "s": 3}


def inputs(model: onnx.ModelProto) -> dict[str, Array]:
    """Drawn inputs with padding."""
    random = np.random.default_rng(0)
    found: dict[str, Array] = {name: random.normal(size=(2, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    found["mask"] = np.asarray([[False, True, True], [True, True, False]])
    return {entry.name: found[entry.name] for entry in model.graph.input}


def written(text: str, ep: str) -> onnx.ModelProto:
    """What is written for an execution provider, which gives what the source gives."""
    source = parsed(text)
    model = onnx_attnfuse.optimize(source, ep=ep, dim=SIZES).model
    np.testing.assert_allclose(run(model, inputs(source))["out"], run(source, inputs(source))["out"], atol=1e-6)
    return model


def ranks_of_indices(model: onnx.ModelProto) -> set[int]:
    """How many axes the indices of each Gather have."""
    known = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: len(value.type.tensor_type.shape.dim) for value in (*known.value_info, *known.input)}
    shapes |= {item.name: len(item.dims) for item in known.initializer}
    return {shapes[node.input[1]] for node in known.node if node.op_type == "Gather"}


@pytest.mark.parametrize("ep", ["qnn", "qnn,cpu"])
def test_indices_of_many_axes_are_laid_flat(ep: str) -> None:
    assert ranks_of_indices(written(TEXT, ep)) == {1}


def test_those_of_two_axes_stay() -> None:
    assert ranks_of_indices(written(FEW_AXES, "qnn")) == {2}


def test_other_providers_get_them_as_they_are() -> None:
    assert ranks_of_indices(written(TEXT, "openvino")) == {4}


def test_a_part_without_elements_is_taken_out_of_a_concat() -> None:
    model = written(EMPTY.replace("FROM", "4"), "qnn")
    assert "Concat" not in {node.op_type for node in model.graph.node}


def test_a_part_of_one_channel_stays() -> None:
    assert "Concat" in {node.op_type for node in written(EMPTY.replace("FROM", "3"), "qnn").graph.node}


def test_where_sizes_are_not_fixed_nothing_is_taken_out() -> None:
    model = onnx_attnfuse.optimize(parsed(EMPTY.replace("FROM", "4")), ep="qnn").model
    assert "Concat" in {node.op_type for node in model.graph.node}
