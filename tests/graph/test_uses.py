"""What values are computed from, branches included, and which nodes the outputs of a graph need."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.uses import live, reads_input, sources
from tests.support.small_models import parsed

MODEL = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[2] x, bool[] c) => (float[2] z) {
        constant = Constant<value = float[2] {1.0, 2.0}>()
        size = Shape(x)
        zeros = ConstantOfShape(size)
        twice = Add(constant, constant)
        dead = Neg(x)
        chosen = If(c)<then_branch = a () => (float[2] p) { p = Neg(x) }, else_branch = b () => (float[2] q) { q = Abs(twice) }>
        fixed = Greater(size, size)
        first = Squeeze(fixed)
        other = If(first)<then_branch = d () =>
            (float[2] r) { r = Abs(x) }, else_branch = e () => (float[2] s) { s = Abs(zeros) }>
        z = Add(chosen, zeros)
    }"""


def graph() -> tuple[ir.Graph, dict[str, ir.Value]]:
    found = ir.from_proto(parsed(MODEL)).graph
    return found, {value.name or "": value for node in found for value in node.outputs}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("chosen", True), ("dead", True), ("other", True), ("z", True), ("zeros", False), ("twice", False), ("constant", False)],
)
def test_a_value_reads_an_input_through_branches_and_not_through_a_shape(name: str, expected: bool) -> None:
    assert reads_input(graph()[1][name]) == expected


def test_sources_end_where_they_are_not_followed() -> None:
    values = graph()[1]
    names = [value.name for value in sources([values["zeros"]])]
    assert names == ["zeros", "size", "x"]
    ended = [value.name for value in sources([values["zeros"]], lambda _, node: node.op_type != "Shape")]
    assert ended == ["zeros", "size"]


def test_nodes_are_live_that_outputs_need_with_those_in_their_branches() -> None:
    found, _ = graph()
    assert sorted(node.op_type for node in live(found)) == sorted(
        ["Add", "If", "Neg", "Abs", "Add", "Constant", "ConstantOfShape", "Shape"]
    )
    assert {node.outputs[0].name for node in found if node not in live(found)} == {"dead", "fixed", "first", "other"}
