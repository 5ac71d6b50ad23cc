"""Models whose sizes are fixed: what is left out, and what has to stay so that a session loads them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.fixed_sizes import fold_sizes
from tests.support.bundled import run

_BRANCHES = """
    doubled = Add(x, x)
    y = If(test) <then_branch = yes () => (float[2] p) { p = Identity(doubled) },
                  else_branch = no () => (float[2] q) { inner = Identity(doubled) turned = Neg(inner) q = Identity(turned) }>
    z = Identity(y)
"""
_TWICE = """
    y = Neg(x)
    z = Identity(y)
"""
_OF_AN_INPUT = """
    y = Identity(x)
    middle = Identity(x)
    z = Neg(middle)
"""


@pytest.mark.parametrize(
    ("body", "stay"),
    [
        pytest.param(_BRANCHES, 2, id="a branch gives out what is not its own"),
        pytest.param(_TWICE, 1, id="given out twice"),
        pytest.param(_OF_AN_INPUT, 1, id="an input"),
    ],
)
def test_an_identity_stays_that_a_session_needs(body: str, stay: int) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float[2] x, bool test) => (float[2] y, float[2] z) {{{body}}}'
    source = onnx.parser.parse_model(text)
    model = ir.from_proto(source)
    fold_sizes(model, Assumed.of([]))
    nodes = [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]
    assert nodes.count("Identity") == stay
    for test in (True, False):
        feeds = {"x": np.asarray([1, -2], np.float32), "test": np.asarray(test)}
        expected, found = run(source, feeds), run(ir.to_proto(model), feeds)
        assert list(found) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
