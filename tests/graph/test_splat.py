"""Values that are one number throughout, held against what ONNX's reference computes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnx_attnfuse.graph.facts import Facts

_TEXT = """<ir_version: 10, opset_import: ["" : 18]> one (float[a, b] x) => ({result}[c, d] y)
<int64[2] sizes = {{2, 3}}, int64[1] first = {{0}}, int64[1] last = {{1}}, float low = {{-3.4e38}},
 float big = {{-1e9}}, float half = {{0.5}}, float[2, 3] twos = {{2, 2, 2, 2, 2, 2}},
 float[2, 3] mixed = {{2, 2, 2, 2, 2, 3}}>
{{ {nodes} }}"""
KNOWN = {
    "repeated": "y = Expand(big, sizes)",
    "a constant": "y = Identity(twos)",
    "a part": "y = Slice(twos, first, last)",
    "filled": "y = ConstantOfShape<value = float[1] {1.5}>(sizes)",
    "zeros added": "s = Shape(x) z = ConstantOfShape(s) y = Add(big, z)",
    "zeros by way of truth": "s = Shape(x) z = ConstantOfShape(s) t = Cast<to = 9>(z) w = Cast<to = 1>(t) y = Add(w, big)",
    "a truth value": "e = Expand(half, sizes) t = Cast<to = 9>(e) y = Cast<to = 1>(t)",
    "cut to an integer": "d = Add(twos, half) t = Cast<to = 7>(d) y = Cast<to = 1>(t)",
    "arithmetic": "a = Mul(twos, half) b = Sub(a, big) c = Div(b, twos) y = Neg(c)",
    "nothing of a truth value": "g = Greater(x, twos) t = Cast<to = 1>(g) s = Shape(x) z = ConstantOfShape(s) y = Mul(t, z)",
    "rounded by its type": "a = Add(twos, big) y = Sub(a, big)",
}
UNKNOWN = {
    "two numbers": "y = Identity(mixed)",
    "an input": "y = Add(x, twos)",
    "nothing times an input": "s = Shape(x) z = ConstantOfShape(s) y = Mul(x, z)",
    "sums behind sums": "a = Add(twos, half) "
    + " ".join(f"{after} = Add({before}, half)" for before, after in zip("abcde", "bcdef", strict=True))
    + " y = Add(f, half)",
}


def model(nodes: str, result: str = "float") -> onnx.ModelProto:
    return onnx.parser.parse_model(_TEXT.format(nodes=nodes, result=result))


def number(proto: onnx.ModelProto) -> float | None:
    graph = ir.from_proto(proto).graph
    return Facts(graph).number(graph.outputs[0])


@pytest.mark.parametrize("nodes", KNOWN.values(), ids=list(KNOWN))
def test_every_element_is_the_number_that_is_told(nodes: str) -> None:
    found, proto = number(model(nodes)), model(nodes)
    (computed,) = ReferenceEvaluator(proto).run(None, {"x": np.zeros((2, 3), np.float32)})
    assert found is not None
    np.testing.assert_array_equal(computed, np.full_like(computed, found))


@pytest.mark.parametrize("nodes", UNKNOWN.values(), ids=list(UNKNOWN))
def test_what_is_not_one_number_is_none(nodes: str) -> None:
    assert number(model(nodes)) is None


def test_the_lowest_of_float32_is_infinite_in_types_of_half_the_size() -> None:
    assert number(model("y = Cast<to = 10>(low)", "float16")) == -np.inf
    assert number(model("e = Expand(low, sizes) y = Cast<to = 10>(e)", "float16")) == -np.inf
    assert number(model("y = Cast<to = 16>(low)", "bfloat16")) == -np.inf
