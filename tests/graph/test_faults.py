"""Faults that a rewrite could add: each is found in a result, and none of those that the source came with."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import InternalError
from onnx_attnfuse.graph import faults, io
from onnx_attnfuse.graph.ops import CONTRIB

_TEXT = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "own" : 1, "acme" : 1]>
g (float[b,s,4] x, bool flag, float[2] roi, int64[3] sizes) =>
  (float[b,s,4] y, float[b,s,4] z, float[b,s,4] r) <float[4] w = {1, 2, 3, 4}> {
  a = own.scaled(x)
  c = Add(a, w)
  d = If (flag) <then_branch = yes () => (float[b,s,4] t) { t = Relu(c) },
                 else_branch = no () => (float[b,s,4] e) { e = Identity(c) }>
  y = com.microsoft.SkipLayerNormalization(d, c, w)
  z = acme.Anything(y, y, y)
  r = Resize(x, , , sizes)
}
<domain: "own", opset_import: ["" : 18]> scaled (i) => (o) { two = Constant<value_float = 2.0>() o = Mul(i, two) }"""


def _model() -> ir.Model:
    return io.from_any(onnx.parser.parse_model(_TEXT))[0]


def _node(model: ir.Model, op: str) -> ir.Node:
    return next(node for part in (model.graph, *model.functions.values()) for node in part.all_nodes() if node.op_type == op)


def _add(model: ir.Model, op: str, count: int, domain: str = "", results: int = 1) -> None:
    x = model.graph.inputs[0]
    model.graph.append(ir.node(op, [x] * count, domain=domain, num_outputs=results, name="new"))


def _lost_import(model: ir.Model) -> None:
    del model.opset_imports[CONTRIB]


def _lost_function(model: ir.Model) -> None:
    del model.functions[("own", "scaled", "")]


def _input_of_a_function(model: ir.Model) -> None:
    _add(model, "scaled", 2, "own")


def _input_of_a_branch(model: ir.Model) -> None:
    relu = _node(model, "Relu")
    relu.resize_inputs(2)
    relu.replace_input_with(1, relu.inputs[0])


def _lost_input_of_a_function_s_node(model: ir.Model) -> None:
    _node(model, "Mul").resize_inputs(1)


def _hole(model: ir.Model) -> None:
    _node(model, "Add").replace_input_with(1, None)


def _untyped_output(model: ir.Model) -> None:
    model.graph.outputs[0].type = None


def _declared(model: ir.Model) -> None:
    model.graph.initializers["w"].type = ir.TensorType(ir.DataType.INT64)


def _two_types(model: ir.Model) -> None:
    model.graph.append(ir.node("Mul", [model.graph.inputs[0], model.graph.inputs[3]], name="new"))


def _no_data(model: ir.Model) -> None:
    model.graph.initializers["w"].const_value = None


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (_lost_import, "of the domain 'com.microsoft', of which no opset is imported"),
        (_lost_function, "the scaled of 'a' is of no operator and no function of the model"),
        (lambda model: _add(model, "NoSuchAttention", 3, CONTRIB), "NoSuchAttention 'new' is of no operator"),
        (lambda model: _add(model, "Upsample", 2), "Upsample 'new' is of no operator"),
        (_input_of_a_function, "scaled 'new' has 2 inputs, and takes 0 to 1"),
        (_input_of_a_branch, "the Relu of 't' has 2 inputs, and takes 1"),
        (_lost_input_of_a_function_s_node, "the Mul of 'o' has 1 inputs, and takes 2"),
        (lambda model: _add(model, "MultiHeadAttention", 11, CONTRIB), "has 11 inputs, and takes 0 to 10"),
        (lambda model: _add(model, "GroupQueryAttention", 6, CONTRIB), "GroupQueryAttention 'new' lacks an input"),
        (lambda model: _add(model, "Relu", 1, results=2), "Relu 'new' has 2 outputs, and takes 1"),
        (lambda model: _add(model, "Concat", 0), "Concat 'new' has 0 inputs, and takes at least 1"),
        (_hole, "the Add of 'c' lacks an input"),
        (_untyped_output, "the graph output 'y' has no type"),
        (_declared, "the initializer 'w' of type FLOAT is declared INT64"),
        (_two_types, "Mul 'new' takes operands of one type, and has float32 'x' and int64 'sizes'"),
        (_no_data, "the initializer 'w' has no data"),
    ],
)  # fmt: skip
def test_what_a_rewrite_breaks_is_found(harm: Callable[[ir.Model], None], what: str, tmp_path: pathlib.Path) -> None:
    model = _model()
    faults.check_faults(model)
    harm(model)
    with pytest.raises(InternalError, match=what):
        faults.check_faults(model)
    with pytest.raises(InternalError):
        io.to_kind(model, io.ModelKind("proto"))
    with pytest.raises(InternalError):
        io.save(model, tmp_path / "result.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "harmless",
    [
        lambda model: _add(model, "Concat", 40),
        lambda model: _add(model, "MultiHeadAttention", 10, CONTRIB),
        lambda model: _add(model, "GroupQueryAttention", 7, CONTRIB, 3),
        lambda model: _add(model, "scaled", 1, "own"),
        lambda model: _add(model, "Something", 9, "acme", 4),
        lambda model: _add(model, "Clip", 1),
    ],
)  # fmt: skip
def test_what_a_runtime_takes_is_no_fault(harmless: Callable[[ir.Model], None]) -> None:
    model = _model()
    harmless(model)
    faults.check_faults(model)


_ATTENTION = """q, k, v = Split<axis = 0, num_outputs = 3>(qkv)
  t = Transpose<perm = [0, 1, 3, 2]>(k)
  s = MatMul(q, t)
  p = Softmax<axis = -1>(s)
  y = MatMul(p, v)"""


@pytest.mark.parametrize(
    "extra",
    [
        "z = never.imported.Operator(y)",
        "z = com.microsoft.NotYetKnown(y)",
        "z = NotOfTheStandard(y)",
        "z = com.microsoft.BiasGelu(y)",
        "z = Relu(y, y)",
        "w = Mul(y, half) z = Relu(w)",
    ],
)
@pytest.mark.parametrize("as_ir", [False, True])
def test_what_the_source_has_already_is_left(extra: str, as_ir: bool) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
    g (float[3,2,5,8] qkv, float16[8] half) => (float[1,2,5,8] z) {{ {_ATTENTION.replace(chr(10), " ")} {extra} }}"""
    proto = onnx.parser.parse_model(text)
    result = onnx_attnfuse.optimize(ir.from_proto(proto) if as_ir else proto, verify="none")
    assert result.report.fused == 1
    faults.check_faults(result._ir)  # pyright: ignore[reportPrivateUsage]
