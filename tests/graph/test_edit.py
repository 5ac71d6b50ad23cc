"""A graph as it was: what is removed from it, bodies included, is put back."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from onnx_attnfuse.graph.edit import Snapshot
from onnx_attnfuse.graph.sweep import drop_inner_copies, sweep

_TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (float[n] x, bool go) => (float[n] y) <float[1] w = {2}> {
  long = Constant<value = int64 {3}>()
  other = Neg(x)
  a = Loop(long, go, x)<body = t (int64 i, bool c, float[n] p) => (bool d, float[n] q) {
    d = Identity(c)
    r = Mul(p, w)
    q = Add(r, other) }>
  y = Identity(a)
}"""


def test_a_removed_loop_takes_what_its_body_read_and_comes_back_with_it() -> None:
    model = ir.from_proto(onnx.parser.parse_model(_TEXT))
    before, text = Snapshot(model.graph), ir.to_proto(model).SerializeToString(deterministic=True)
    (output,) = model.graph.outputs
    looped = next(node for node in model.graph if node.op_type == "Loop").outputs[0]
    node = output.producer()
    assert node is not None
    node.replace_input_with(0, model.graph.inputs[0])
    assert sweep([looped]) == 3
    assert [node.op_type for node in model.graph] == ["Identity"]
    assert not model.graph.initializers
    before.restore()
    assert ir.to_proto(model).SerializeToString(deterministic=True) == text


def test_a_node_that_gives_its_only_input_goes() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[n] x) => (float[m] y, float[n] z) { a = Concat<axis = 0>(x) b = Sum(a) c = Max(b, b) d = Concat<axis = 0>(c, b)
      y = Neg(d) z = Identity(x) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert drop_inner_copies(model.graph) == 2
    assert [node.op_type for node in model.graph] == ["Max", "Concat", "Neg", "Identity"]
    assert {value.name for value in next(iter(model.graph)).inputs if value is not None} == {"x"}
