"""Shapes of what a Loop carries on, where its body does not declare them."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.facts import Facts

_TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, s, 4] x, int64 n) => (float[o, p, q] y) <bool go = {{1}}> {{
    y = Loop (n, go, x) <body = body (int64 i, bool c, float[] v) => (bool d, float[] w) {{ d = Identity(c) {step} }}>
}}"""


@pytest.mark.parametrize(
    ("step", "carried", "after"),
    [
        ("w = Exp(v)", "b s 4", "b s 4"),
        ("w = Concat<axis = 1>(v, v)", "b v.1 4", "b 2*v.1 4"),
        ("t = Transpose<perm = [1, 0, 2]>(v) w = Exp(t)", "v.0 v.1 4", "v.1 v.0 4"),
        ("w = ReduceSum<keepdims = 0>(v)", "None", "None"),
    ],
)
def test_a_state_keeps_the_lengths_that_an_iteration_keeps(step: str, carried: str, after: str) -> None:
    model = ir.from_onnx_text(_TEXT.format(step=step))
    body = model.graph[0].attributes["body"].as_graph()
    for value in (body.inputs[2], body.outputs[1]):
        value.shape = None
    facts = Facts(model.graph)
    told = [facts.dims(value) for value in (body.inputs[2], body.outputs[1])]
    assert [str(dims) if dims is None else " ".join(map(str, dims)) for dims in told] == [carried, after]
