"""What is written is a model that loads: each fault that a rewrite could leave is found before a file is there."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.parser
import pytest

from onnx_attnfuse.errors import InternalError, ModelError
from onnx_attnfuse.graph.validity import check, check_written

_TEXT = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "own" : 1]>
g (float[b,s,4] x, bool flag) => (float[b,s,4] y) <float[4] w = {1, 2, 3, 4}> {
  a = own.scaled(x)
  c = Add(a, w)
  d = If (flag) <then_branch = yes () => (float[b,s,4] t) { t = Relu(c) },
                 else_branch = no () => (float[b,s,4] e) { e = Identity(c) }>
  y = com.microsoft.Gelu(d)
}
<domain: "own", opset_import: ["" : 18]> scaled (i) => (o) { two = Constant<value_float = 2.0>() o = Mul(i, two) }"""


def _lost_constant(model: onnx.ModelProto) -> None:
    del model.functions[0].node[0]


def _lowered_opset(model: onnx.ModelProto) -> None:
    model.graph.node.insert(1, onnx.helper.make_node("Attention", ["a", "a", "a"], ["unused"]))
    model.opset_import[0].version = 18


def _lowered_opset_of_a_function(model: onnx.ModelProto) -> None:
    model.functions[0].node.append(onnx.helper.make_node("RMSNormalization", ["i", "i"], ["unused"]))


def _out_of_order(model: onnx.ModelProto) -> None:
    model.graph.node.append(model.graph.node[0])
    del model.graph.node[0]


def _lowered_opset_of_a_branch(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute[1].g.node[0].op_type = "Swish"


def _lost_weight(model: onnx.ModelProto) -> None:
    del model.graph.initializer[:]


def test_a_model_that_loads_is_written() -> None:
    model = onnx.parser.parse_model(_TEXT)
    onnx.checker.check_model(model, skip_opset_compatibility_check=True)
    check_written(model)


def test_an_operator_of_the_runtime_in_the_standard_s_domain_is_no_fault() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[a,4] x, float[4] w) => (float[a,4] y) {
        y = SimplifiedLayerNormalization(x, w) }"""
    check_written(onnx.parser.parse_model(text))


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (_lost_constant, "reads 'two', which nothing computes"),
        (_lost_weight, "reads 'w', which nothing computes"),
        (_lowered_opset, "the Attention of 'unused' is not in opset 18"),
        (_lowered_opset_of_a_function, "the RMSNormalization of 'unused' is not in opset 18"),
        (_out_of_order, "reads 'a' before it is computed"),
        (_lowered_opset_of_a_branch, "the Swish of 'e' is not in opset 23"),
    ],
)
def test_a_model_that_would_not_load_is_none(harm: Callable[[onnx.ModelProto], None], what: str) -> None:
    model = onnx.parser.parse_model(_TEXT)
    harm(model)
    with pytest.raises(InternalError, match=what):
        check_written(model)


def test_a_source_whose_exporter_could_not_convert_it_is_the_user_s() -> None:
    """torch leaves Attention in a model of opset 18 when it is asked for an opset that it cannot convert to."""
    model = onnx.parser.parse_model(_TEXT)
    assert check(model, "model.onnx") is None
    _lowered_opset(model)
    with pytest.raises(
        ModelError, match=r"^model\.onnx: the Attention of 'unused' is not in opset 18, which is imported; export"
    ):
        check(model, "model.onnx")
