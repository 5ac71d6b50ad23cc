"""Operators on quantised numbers: what they mean in floats, held against ONNX Runtime; put back they are what they were."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.graph.quantised_operators import DecomposedOperators, decompose_quantised
from onnx_attnfuse.graph.scopes import all_names
from tests.support.bundled import Array, run
from tests.support.graph_builder import GraphBuilder, Operand

SCALE, POINT, MS = np.float32(1 / 32), np.asarray(0, np.int8), "com.microsoft"
WEIGHT = np.float32(1 / 256)
LEAST = np.asarray(-128, np.int8)
GRID: tuple[Operand, ...] = (SCALE, POINT)


def attention(change: str = "") -> onnx.ModelProto:
    """An attention in QOperator format, with one thing that is otherwise."""
    graph = GraphBuilder(18)
    q, k, v = (graph.op("QuantizeLinear", graph.given(name, ["b", 2, "s", 8]), SCALE, POINT) for name in "qkv")
    keys = graph.op("Transpose", k, perm=[0, 1, 3, 2])
    row_scales = np.full(8, SCALE, np.float32)
    steps = (row_scales, np.zeros(8, np.int8)) if change == "a scale for each channel" else GRID
    scores = graph.op("QLinearMatMul", q, *steps, keys, *GRID, np.float32(1 / 4), POINT)
    factor = np.asarray(64, np.int8)
    scaled = graph.op("QLinearMul", scores, np.float32(1 / 4), POINT, factor, np.float32(1 / 256), POINT, SCALE, POINT, domain=MS)
    scaled = graph.op("Identity", scaled)
    if change == "chosen":
        keep = graph.given("keep", ["b", 1, "s", "s"], onnx.TensorProto.BOOL)
        masked = graph.op("QLinearWhere", keep, scaled, *GRID, LEAST, *GRID, *GRID, domain=MS)
    else:
        mask = graph.op("QuantizeLinear", graph.given("mask", ["b", 1, "s", "s"]), *GRID)
        point = None if change == "no zero point of the result" else POINT
        masked = graph.op("QLinearAdd", scaled, *GRID, mask, *GRID, SCALE, point, domain=MS)
    axis = 2 if change == "rows are normalised" else -1
    weights = graph.op("QLinearSoftmax", masked, *GRID, WEIGHT, LEAST, domain=MS, axis=axis, opset=18)
    if change == "no product":
        graph.gives(graph.op("DequantizeLinear", weights, WEIGHT, LEAST), "y", ["b", 2, "s", "s"])
        return graph.model()
    result = graph.op("QLinearMatMul", weights, WEIGHT, LEAST, v, *GRID, *GRID)
    flat = graph.op("Reshape", graph.op("Transpose", result, perm=[0, 2, 1, 3]), [0, 0, 16])
    graph.gives(graph.op("DequantizeLinear", flat, *GRID), "y", ["b", "s", 16])
    if change == "its scores are an output":
        graph.gives(scores, "scores", ["b", 2, "s", "s"], onnx.TensorProto.INT8)
    return graph.model()


def inputs(model: onnx.ModelProto) -> dict[str, Array]:
    """Drawn inputs."""
    random = np.random.default_rng(0)
    found: dict[str, Array] = {name: random.normal(size=(3, 2, 5, 8)).astype(np.float32) for name in "qkv"}
    found["mask"] = np.where(random.random((3, 1, 5, 5)) < 0.3, -4, 0).astype(np.float32)
    found["keep"] = random.random((3, 1, 5, 5)) < 0.7
    return {entry.name: found[entry.name] for entry in model.graph.input}


def decomposed(proto: onnx.ModelProto) -> tuple[ir.Model, Builder, DecomposedOperators]:
    """A model whose operators on quantised numbers are spelled out, what built them, and what was done."""
    model = from_any(proto)[0]
    builder = Builder(model.graph, Facts(model.graph), 18, all_names(model))
    return model, builder, decompose_quantised(model.graph, builder.facts, builder)


@pytest.mark.parametrize("change", ["", "chosen"])
def test_a_spelling_is_right_to_a_step(change: str) -> None:
    proto = attention(change)
    model, _, done = decomposed(proto)
    assert len(done.operators) == 5
    left = {node.op_type for node in model.graph if "QLinear" in node.op_type}
    assert not left
    feeds = inputs(proto)
    before, after = run(proto, feeds)["y"], run(ir.to_proto(model), feeds)["y"]
    steps = np.abs(before - after) / SCALE
    assert steps.max() <= 2
    assert steps.mean() < 0.2
    assert np.abs(before).max() > 10 * SCALE


def test_what_is_put_back_is_what_it_was() -> None:
    proto = ir.to_proto(from_any(attention())[0])
    model, builder, done = decomposed(proto)
    assert done.put_back(builder) == len(done.operators)
    back = ir.to_proto(model)
    assert sorted(map(str, back.graph.node)) == sorted(map(str, proto.graph.node))
    assert {item.name for item in back.graph.initializer} == {item.name for item in proto.graph.initializer}
    assert sorted(map(str, back.graph.value_info)) == sorted(map(str, proto.graph.value_info))


def test_what_was_changed_since_is_not_put_back() -> None:
    model, builder, done = decomposed(attention())
    changed = next(item for item in done.operators if item.op.op_type == "Add")
    changed.op.replace_input_with(0, changed.op.inputs[1])
    assert done.put_back(builder) == len(done.operators) - 1
    assert "QLinearAdd" not in {node.op_type for node in model.graph}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("a scale for each channel", {"QLinearMatMul"}),
        ("no zero point of the result", {"QLinearAdd"}),
        ("rows are normalised", {"QLinearSoftmax"}),
        ("no product", {"QLinearAdd", "QLinearMatMul", "QLinearMul", "QLinearSoftmax"}),
    ],
)
def test_what_cannot_be_spelled_stays(change: str, left: set[str]) -> None:
    model, _, _ = decomposed(attention(change))
    assert {node.op_type for node in model.graph if "QLinear" in node.op_type} == left


def test_an_attention_of_such_operators_is_told_and_stays() -> None:
    model = attention()
    result = onnx_attnfuse.optimize(model)
    (site,) = result.report.sites
    names = {node.op_type: node.name for node in model.graph.node}
    (reason,) = site.reasons
    first = next(node.name for node in model.graph.node if node.op_type == "QLinearMatMul")
    assert (reason.code, reason.node) == ("quantized", first)
    assert (site.name, site.num_heads) == (names["QLinearSoftmax"], 2)
    assert [item.place for item in site.roundings if item.place in {"scores", "scaled", "masked", "weights"}] == [
        "scores",
        "scaled",
        "masked",
        "weights",
    ]
    assert {node.name for node in result.model.graph.node} == {node.name for node in model.graph.node}
    roles = {item.role: item.names for item in site.nodes}
    assert roles["mask"] == (names["QLinearAdd"],)
    assert roles["scale"] == (names["QLinearMul"],)


def test_it_is_fused_where_that_is_asked_for_and_held_to_it() -> None:
    model = attention()
    result = onnx_attnfuse.optimize(model, dequantise_attention=True)
    assert result.report.fused == 1
    assert not {node.op_type for node in result.model.graph.node if "QLinear" in node.op_type}
    found = onnx_attnfuse.verify_models(model, result.model)
    assert found.equal, found.detail


@pytest.mark.parametrize("change", ["its scores are an output", "a scale for each channel", "rows are normalised"])
def test_one_that_cannot_be_read_is_not_fused(change: str) -> None:
    model = attention(change)
    result = onnx_attnfuse.optimize(model, dequantise_attention=True)
    assert result.report.fused == 0
    assert {node.name for node in result.model.graph.node} == {node.name for node in model.graph.node}
