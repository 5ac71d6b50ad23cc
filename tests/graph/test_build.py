"""What a builder emits for a value in another shape."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused
from tests.support.bundled import run
from tests.support.small_models import parsed

TEXT = """<ir_version: 9, opset_import: ["" : 18]>
views (float[SHAPE] x) => (float[SHAPE] same) { same = Identity(x) }"""


@pytest.mark.parametrize(
    ("shape", "dims", "opset", "op"),
    [
        ("1, b, 4, s", [1, 2, 3], 18, "Squeeze"),
        ("1, 1, b, s", [2, 3], 18, "Squeeze"),
        ("1, b, 4, s", [1, 2, 3], 12, "Reshape"),  # axes are an attribute there
        ("1, 3, 4, s", [1, 2, 3], 18, "Reshape"),  # its shape is a constant
        ("b, 1, 4, s", [0, 2, 3], 18, "Reshape"),  # the axis is no leading one
        ("1, b, 4, s", [1, 3, 2], 18, "Reshape"),  # and what is left takes other places
    ],
)
def test_leading_axes_of_length_1_go_without_a_shape_that_is_computed(shape: str, dims: list[int], opset: int, op: str) -> None:
    model = ir.from_proto(parsed(TEXT.replace("SHAPE", shape)))
    facts = Facts(model.graph)
    builder = Builder(model.graph, facts, opset, set())
    same = model.graph.outputs[0].producer()
    assert same is not None
    builder.at(same)
    value = model.graph.inputs[0]
    old = facts.dims(value)
    assert old is not None
    found = builder.reshape(value, [old[axis] for axis in dims])
    node = found.producer()
    assert node is not None
    assert node.op_type == op
    if opset == 18:
        model.graph.outputs[0] = found
        lengths = [{"b": 3, "s": 5}.get(item) or int(item) for item in shape.split(", ")]
        x = np.random.default_rng(0).standard_normal(lengths).astype(np.float32)
        (result,) = run(ir.to_proto(model), {"x": x}).values()
        np.testing.assert_array_equal(result, x.reshape([x.shape[axis] for axis in dims]))


@pytest.mark.parametrize(("entries", "is_kept"), [(sizes.symbol("other"), True), (3, False)])
def test_a_shape_that_differs_in_one_unknown_length_is_the_same(entries: Dim, is_kept: bool) -> None:
    """All the elements are there, so the other length has the same number; a -1 for it fails where an axis is empty."""
    model = ir.from_proto(parsed(TEXT.replace("SHAPE", "b, 2, past, 4")))
    facts = Facts(model.graph)
    builder = Builder(model.graph, facts, 18, set())
    same = model.graph.outputs[0].producer()
    assert same is not None
    builder.at(same)
    value = model.graph.inputs[0]
    _, *others = facts.dims(value) or ()
    assert (builder.reshape(value, [entries, *others]) is value) == is_kept


@pytest.mark.parametrize("opset", [11, 12])
def test_an_operator_that_the_opset_lacks_is_refused(opset: int) -> None:
    model = ir.from_proto(parsed(TEXT.replace("SHAPE", "b, s")))
    builder = Builder(model.graph, Facts(model.graph), opset, set())
    builder.at(model.graph[0])
    x = model.graph.inputs[0]
    if opset == 12:
        assert builder.node("Einsum", [x, x], {"equation": "bs,bs->b"}).producer() is model.graph[0]
        return
    assert builder.node("SimplifiedLayerNormalization", [x, x]).producer() is model.graph[0]  # of ONNX Runtime, in any opset
    with pytest.raises(Refused, match="Einsum is not in opset 11"):
        builder.node("Einsum", [x, x], {"equation": "bs,bs->b"})
    assert len(model.graph) == 2


@pytest.mark.parametrize(
    ("dtype", "factor", "op", "number"),
    [
        ("float16", 1 / 3.46484375, "Div", 3.46484375),
        ("float16", 0.5, "Mul", 0.5),
        ("float16", 3.46484375, "Mul", 3.46484375),
        ("float", 1 / 3.46484375, "Mul", np.float32(1 / 3.46484375)),
    ],
    ids=["the inverse of what the type has", "a power of two", "what the type has", "a type with digits enough"],
)
def test_a_factor_keeps_its_digits(dtype: str, factor: float, op: str, number: float) -> None:
    model = ir.from_proto(parsed(TEXT.replace("SHAPE", "s").replace("float[", f"{dtype}[")))
    builder = Builder(model.graph, Facts(model.graph), 18, set())
    builder.at(next(iter(model.graph)))
    made = builder.times(model.graph.inputs[0], factor).producer()
    assert made is not None
    constant = made.inputs[1]
    assert constant is not None
    assert constant.const_value is not None
    assert (made.op_type, float(constant.const_value.numpy())) == (op, number)
    assert builder.times(model.graph.inputs[0], 1.0) is model.graph.inputs[0]


@pytest.mark.parametrize("multiple", [1, 3, 11])
def test_a_length_filled_up_to_a_multiple_is_computed_as_it_is_known(multiple: int) -> None:
    model = ir.from_proto(parsed(TEXT.replace("SHAPE", "s")))
    facts = Facts(model.graph)
    builder = Builder(model.graph, facts, 18, set())
    builder.at(model.graph[0])
    (size,) = facts.dims(model.graph.inputs[0]) or ()
    gap = sizes.floor_quotient(size * -1, multiple) * -multiple
    found = builder.shape([gap])
    model.graph.outputs[0] = found
    for length in (0, 1, 2, 3, 10, 11, 12):
        (result,) = run(ir.to_proto(model), {"x": np.zeros(length, np.float32)}).values()
        assert result.tolist() == [-(-length // multiple) * multiple]
