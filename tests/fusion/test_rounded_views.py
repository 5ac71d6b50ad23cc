"""Roundings beside attentions that change places with views and factors: bit for bit the same, and only where they may."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnx_attnfuse
from tests.support.bundled import Array, cases, run
from tests.support.graph_builder import GraphBuilder
from tests.support.quantised import quantised, source

Grid = tuple[Array, Array]
BYTES: Grid = np.asarray(0.03, np.float32), np.asarray(3, np.int8)
OTHER: Grid = np.asarray(0.04, np.float32), np.asarray(3, np.int8)
HEADS: Grid = np.asarray([0.03, 0.05, 0.02], np.float32), np.zeros(3, np.int8)
DIMS: list[str | int] = [2, 5, 24]


def rounded(graph: GraphBuilder, value: str, grid: Grid = BYTES, **attributes: int) -> str:
    codes = graph.op("QuantizeLinear", value, *grid, **attributes)
    return graph.op("DequantizeLinear", codes, *grid, **attributes)


def attention(
    *,
    key: Sequence[Grid | float | str] = (),
    inside: bool = False,
    dtype: int = onnx.TensorProto.FLOAT,
) -> onnx.ModelProto:
    """Attention of 3 heads, with steps behind the keys' Reshape: grids, factors, and `turn`, their Transpose to (b, n, h, t)."""
    graph = GraphBuilder(21)
    query, keys, values = (graph.op("Reshape", graph.given(name, DIMS, dtype), [2, 5, 3, 8]) for name in "qkv")
    for step in key:
        if isinstance(step, tuple):
            keys = rounded(graph, keys, step, **({"axis": 2} if step[0].ndim else {}))
        elif step == "turn":
            keys = graph.op("Transpose", keys, perm=[0, 2, 3, 1])
        else:
            keys = graph.op("Mul", keys, np.asarray(step, np.float32))
    query, values = (graph.op("Transpose", value, perm=[0, 2, 1, 3]) for value in (query, values))
    scores = graph.op("MatMul", query, keys)
    weights = graph.op("Softmax", rounded(graph, scores) if inside else scores, axis=-1)
    result = graph.op("Transpose", graph.op("MatMul", weights, values), perm=[0, 2, 1, 3])
    graph.gives(graph.op("Reshape", result, [2, 5, 24]), "out", DIMS)
    return graph.model()


def feeds(scale: float = 1.0) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {name: (random.normal(0, scale, (2, 5, 24))).astype(np.float32) for name in "qkv"}


def before_product(model: onnx.ModelProto) -> list[str]:
    """The operators between the given keys and the product, last first."""
    loaded = ir.from_proto(model)
    (product,) = (node for node in loaded.graph if node.op_type == "Softmax")
    value = product.inputs[0]
    while value is not None and (node := value.producer()) is not None and node.op_type != "MatMul":
        value = node.inputs[0]
    found: list[str] = []
    node = None if value is None else value.producer()
    value = None if node is None else node.inputs[1]
    while value is not None and (node := value.producer()) is not None:
        found.append(node.op_type)
        value = node.inputs[0]
    return found


@pytest.mark.parametrize("key", [(BYTES, "turn"), (BYTES, "turn", BYTES), ("turn", BYTES)])
def test_views_of_a_fused_attention_go_behind_its_roundings(key: tuple[Grid | str, ...]) -> None:
    model = attention(key=key)
    result = onnx_attnfuse.optimize(model, ep="cpu", always=True)
    (site,) = result.report.sites
    assert (site.status, site.layout.key) == ("fused", None)
    operators = [node.op_type for node in result.model.graph.node]
    assert operators.count("Transpose") == 0
    assert operators.count("QuantizeLinear") == 1
    assert np.allclose(run(model, feeds())["out"], run(result.model, feeds())["out"], atol=1e-5)


def test_heads_that_are_repeated_are_repeated_behind_their_roundings_so_that_they_need_not_be() -> None:
    model = quantised("llama_past__dyn18__sdpa")
    report = onnx_attnfuse.optimize(model, ep="cpu", dequantise_attention=True).report
    assert {(site.status, site.num_heads, site.kv_num_heads) for site in report.sites} == {("fused", 4, 2)}


def test_roundings_to_different_grids_are_both_kept() -> None:
    result = onnx_attnfuse.optimize(attention(key=(BYTES, "turn", OTHER)), ep="cpu", always=True)
    assert sum(node.op_type == "QuantizeLinear" for node in result.model.graph.node) == 2


def test_a_rounding_along_an_axis_stays_where_it_is() -> None:
    model = attention(key=(HEADS, "turn"))
    result = onnx_attnfuse.optimize(model, ep="cpu", always=True)
    (site,) = result.report.sites
    assert site.status == "fused"
    assert {(item.place, item.axis) for item in site.roundings} == {("key", 2)}
    (node,) = (node for node in result.model.graph.node if node.op_type == "QuantizeLinear")
    assert onnx.helper.get_node_attr_value(node, "axis") == 2
    assert np.allclose(run(model, feeds())["out"], run(result.model, feeds())["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ((BYTES, "turn"), ["DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape"]),
        ((BYTES, 0.125, "turn"), ["DequantizeLinear", "QuantizeLinear", "Mul", "Transpose", "Reshape"]),
        ((BYTES, "turn", 0.125), ["DequantizeLinear", "QuantizeLinear", "Mul", "Transpose", "Reshape"]),
        ((0.3, BYTES, "turn"), ["DequantizeLinear", "QuantizeLinear", "Mul", "Transpose", "Reshape"]),
        ((BYTES, 0.3, "turn"), ["Mul", "DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape"]),
        ((BYTES, "turn", BYTES), ["DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape"]),
        ((HEADS, "turn"), ["Transpose", "DequantizeLinear", "QuantizeLinear", "Reshape"]),
    ],
)
def test_roundings_go_to_the_products_of_a_provider_that_wants_them_there(
    key: tuple[Grid | float | str, ...], wanted: list[str]
) -> None:
    model = attention(key=key, inside=True)
    result = onnx_attnfuse.optimize(model, ep="tensorrt")
    assert before_product(result.model) == wanted
    for scale in (1e-3, 1.0, 100.0):
        before, after = run(model, feeds(scale)), run(result.model, feeds(scale))
        assert np.array_equal(before["out"], after["out"])


def test_a_rounding_whose_scale_took_a_factor_is_still_one_of_the_source() -> None:
    model = attention(key=(BYTES, 0.125, "turn"), inside=True)
    result = onnx_attnfuse.optimize(model, ep="tensorrt", dequantise_attention=True, verify="model")
    assert result.report.dequantised is not None
    scales = {item.name: numpy_helper.to_array(item) for item in result.model.graph.initializer}
    (node,) = (node for node in result.model.graph.node if node.op_type == "QuantizeLinear")
    assert scales[node.input[1]] == BYTES[0] / 8
    assert onnx_attnfuse.verify_models(model, result.model).equal


def test_a_scale_that_would_leave_the_type_takes_no_factor() -> None:
    tiny = np.asarray(2.0**-110, np.float32), np.asarray(0, np.int8)
    model = attention(key=(tiny, 2.0**-14, "turn"), inside=True)
    result = onnx_attnfuse.optimize(model, ep="tensorrt")
    assert before_product(result.model)[0] == "Mul"


@pytest.mark.parametrize("ep", ["qnn", "tensorrt", "openvino"])
@pytest.mark.parametrize(("name", "setting"), [("bert__ts17__eager", "defaults"), ("vit__dyn18__sdpa", "qnn")])
def test_providers_keep_every_rounding_and_every_bit(name: str, setting: str, ep: str) -> None:
    model = quantised(name, setting)
    result = onnx_attnfuse.optimize(model, ep=ep)
    assert result.report.fused == 0
    inputs = cases(source(name))["example"]
    before, after = run(model, inputs), run(result.model, inputs)
    for output, array in before.items():
        assert np.array_equal(array, after[output])
    assert not result.report.failures
    again = onnx_attnfuse.optimize(result.model, ep=ep)
    assert [node.op_type for node in again.model.graph.node] == [node.op_type for node in result.model.graph.node]


def test_an_attention_as_a_provider_wants_it_is_none_the_less_so_for_roundings() -> None:
    for ep, status in (("qnn", "decomposed"), ("cpu", "skipped")):
        (site,) = onnx_attnfuse.explain(attention(key=("turn", BYTES), inside=True), ep=ep).sites
        assert site.status == status
    (site,) = onnx_attnfuse.explain(quantised("vit__dyn18__sdpa"), ep="qnn").sites[:1]
    assert (site.status, [reason.code for reason in site.reasons]) == ("skipped", ["quantized"])
