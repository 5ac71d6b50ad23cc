"""A product or quotient with one number is read as such, and the factor is what NumPy says the result is of the tensor."""

from __future__ import annotations

import numpy as np
import onnx.reference
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scaling import Scaling, read_scaling
from tests.support.small_models import parsed

GRAPH = """<ir_version: 10, opset_import: ["" : 18]>
g (float[2, 3] x, float[n] any) => (float[?, ?] y) <float c = {{0.25}}, float[1] zero = {{0}}, float[3] row = {{1, 2, 3}},
    float[1, 1, 1] deep = {{2}}> {{
    y = {}
}}
"""


def read(node: str) -> tuple[Scaling | None, np.ndarray, np.ndarray]:
    """What is read in a node, a tensor, and the result of the node on it."""
    proto = parsed(GRAPH.format(node))
    model = ir.from_proto(proto)
    x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    (y,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x, "any": np.array([2, 4, 8], np.float32)})
    return read_scaling(model.graph[0], Facts(model.graph)), x, y


@pytest.mark.parametrize("node", ["Mul(x, c)", "Mul(c, x)", "Div(x, c)"])
def test_a_number_on_either_side_of_a_product_and_below_a_quotient_is_a_factor(node: str) -> None:
    scaling, x, y = read(node)
    assert scaling is not None
    assert scaling.tensor.name == "x"
    assert np.array_equal(x * scaling.of(1.0), y)
    assert scaling.of(3.0) == 3.0 * scaling.of(1.0)


@pytest.mark.parametrize("node", ["Div(c, x)", "Mul(x, row)", "Mul(x, zero)", "Mul(x, any)", "Mul(x, deep)", "Add(x, c)"])
def test_what_is_no_product_with_one_number_or_has_another_rank_is_no_scaling(node: str) -> None:
    assert read(node)[0] is None


def test_a_number_that_is_taken_back_leaves_the_factor_it_was() -> None:
    """49 · (1 / 49) is not 1 in floats, 49 / 49 is."""
    scaling = Scaling(ir.Value(name="x"), ir.Value(name="c"), 49.0, is_quotient=True)
    assert scaling.of(49.0) == 1.0
