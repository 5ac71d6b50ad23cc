"""Attentions of quantised models: found whatever the quantiser's settings, left as they are where something is rounded inside."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

import onnx_attnfuse
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.verify.quantised.stated_error import check_dequantised
from tests.support.bundled import cases, run
from tests.support.graph_builder import GraphBuilder
from tests.support.quantised import SETTINGS, dynamically_quantised, quantised, source, with_small_weights

SYMMETRIC = pytest.param("symmetric", marks=pytest.mark.newest)  # the quantiser of onnxruntime 1.28 writes scales that are inf
SITES = {
    "bert__dyn18__sdpa": 2,
    "bert__ts17__eager": 2,
    "gpt2__ts17__eager": 2,
    "llama_past__dyn18__sdpa": 2,
    "swin__dyn18__sdpa": 4,
    "t5__dyn18__eager": 6,
    "vit__dyn18__sdpa": 2,
    "whisper_decoder__dyn18__sdpa": 4,
}
"""Models with attention spelled out, and how many they have."""


def round_trip(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as it is written again: both names of the standard's domain are one then."""
    return ir.to_proto(ir.from_proto(model))


@pytest.mark.sampled
@pytest.mark.parametrize("setting", [*(name for name in SETTINGS if name != "symmetric"), SYMMETRIC, "qnn"])
@pytest.mark.parametrize("name", SITES)
def test_every_attention_is_found_and_stays_as_it_is(name: str, setting: str) -> None:
    model = quantised(name, setting)
    result = onnx_attnfuse.optimize(model)
    assert (result.report.candidates, result.report.skipped) == (SITES[name], SITES[name])
    for site in result.report.sites:
        assert [reason.code for reason in site.reasons] == ["quantized"]
        assert site.num_heads is not None
        places = {item.place for item in site.roundings}
        assert "scores" in places
        assert {"weights", "guarded"} & places
    before, after = ({node.name: node for node in item.graph.node} for item in (round_trip(model), result.model))
    inside = {
        name
        for site in result.report.sites
        for item in site.nodes
        if item.role not in {"mask_input", "view"}
        for name in item.names
    }
    assert len(inside) >= (6 if setting != "operators on quantised numbers" else 4) * SITES[name]
    for node in inside:
        assert before[node] == after[node]


@pytest.mark.parametrize("name", SITES)
def test_all_are_fused_where_their_nodes_were_left_alone(name: str) -> None:
    model = quantised(name, spared=True)
    assert {"DequantizeLinear", "QuantizeLinear"} <= {node.op_type for node in model.graph.node}
    report = onnx_attnfuse.optimize(model).report
    assert (report.fused, report.candidates) == (SITES[name], SITES[name])
    assert not [item for site in report.sites for item in site.roundings if item.place not in {"query", "key", "value", "output"}]


def test_without_that_none_is() -> None:
    assert onnx_attnfuse.explain(quantised("bert__dyn18__sdpa")).fused == 0


@pytest.mark.parametrize("setting", ["defaults", "per channel", "16 bits"])
def test_one_that_is_an_operator_already_is_fused_between_its_roundings(setting: str) -> None:
    model = quantised("bert__dyn23__sdpa", setting)
    result = onnx_attnfuse.optimize(model)
    assert result.report.fused == 2
    assert {item.place for item in result.report.sites[0].roundings} == {"query", "key", "value", "output"}
    assert "QuantizeLinear" in {node.op_type for node in result.model.graph.node}
    verdict = check_dequantised(ir.from_proto(model), ir.from_proto(result.model))
    assert verdict.equal, verdict.detail


def test_projections_by_integers_leave_attention_in_floats() -> None:
    model = dynamically_quantised("bert__dyn18__sdpa")
    assert "MatMulInteger" in {node.op_type for node in model.graph.node}
    report = onnx_attnfuse.optimize(model).report
    assert report.fused == 2
    assert all(not site.roundings for site in report.sites)


@pytest.mark.parametrize(("form", "op"), [("QOperator", "MatMulNBits"), ("QDQ", "DequantizeLinear")])
@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", "llama_past__dyn18__sdpa"])
def test_weights_of_four_bits_leave_attention_in_floats(name: str, form: str, op: str) -> None:
    model = with_small_weights(name, form)
    count = sum(node.op_type == op for node in model.graph.node)
    assert count >= 12
    result = onnx_attnfuse.optimize(model)
    assert (result.report.fused, result.report.candidates) == (2, 2)
    assert sum(node.op_type == op for node in result.model.graph.node) == count
    assert all(not site.roundings for site in result.report.sites)


def test_nodes_are_told_by_what_they_do() -> None:
    path = source("llama_past__dyn18__sdpa")
    operators = {node.name: node.op_type for node in onnx.load(path).graph.node}
    sites = onnx_attnfuse.explain(path).sites
    assert len(sites) == 2
    for site in sites:
        found = {item.role: {operators[name] for name in item.names} for item in site.nodes}
        assert found["scores"] == found["result"] == {"MatMul"}
        assert (found["softmax"], found["scale"], found["mask"], found["guard"]) == (
            {"Softmax"},
            {"Mul"},
            {"Add"},
            {"IsNaN", "Where"},
        )
        assert {"Add", "Mul", "Neg", "Slice", "Concat"} == found["rotary"]
        assert "Where" in found["mask_input"]
        assert {"MatMul", "Gemm", "Add"}.isdisjoint(found["view"])
        assert len(site.node_names) == len(set(site.node_names))


def test_a_fused_attention_is_one_node() -> None:
    (first, _) = onnx_attnfuse.explain(source("bert__dyn23__sdpa")).sites
    assert [(item.role, item.names) for item in first.nodes] == [("attention", (first.name,))]


def test_a_softmax_that_is_no_attention_is_not_on_the_list() -> None:
    graph = GraphBuilder()
    graph.gives(graph.op("Softmax", graph.given("x", ["b", 8])), "y", ["b", 8])
    assert onnx_attnfuse.explain(graph.model()).attention_nodes == ()


def test_a_rounded_number_is_what_onnx_runtime_makes_of_it() -> None:
    random = np.random.default_rng(0)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16):
        levels = np.iinfo(dtype)
        for number in [*random.normal(0, 10, 20), 0.0, -1e9, 3.4e38, -np.inf, 2.5, -2.5]:
            graph = GraphBuilder(21)
            scale = np.float32(random.choice([0.5, 0.0371, 1.7, 2.7e36]))
            point = np.asarray(random.integers(levels.min, levels.max), dtype)
            codes = graph.op("QuantizeLinear", np.asarray(number, np.float32), scale, point)
            graph.gives(graph.op("DequantizeLinear", codes, scale, point), "y", [])
            model = graph.model()
            loaded = from_any(model)[0]
            value = loaded.graph.outputs[0].producer()
            assert value is not None
            assert value.inputs[0] is not None
            found = Facts(loaded.graph).number(value.inputs[0])
            assert np.float32(found) == run(model, {})["y"]


@pytest.mark.parametrize("way", ["argument", "target", "neither"])
def test_a_fused_decoder_is_quantised_as_documented(way: str, tmp_path: pathlib.Path) -> None:
    """Beside the source with the same products quantised; a runtime that reads the quantiser's mistake would be news."""
    path, fused, out, plain = source("llama_past__dyn18__sdpa"), *(tmp_path / name for name in ("fused", "out", "plain"))
    options = {"target": "MultiHeadAttention"} if way == "target" else {}
    chosen = {"op_types_to_quantize": ["MatMul", "Gather"]} if way == "argument" else {}
    result = onnx_attnfuse.optimize(path, **options)
    result.save(fused)
    quantize_dynamic(fused, out, **chosen)
    if way == "neither":
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidGraph, match="QAttention"):
            onnxruntime.InferenceSession(out)
        return
    quantize_dynamic(path, plain, **chosen)
    for feeds in cases(path).values():
        expected, found = (run(onnx.load(file), feeds) for file in (plain, out))
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=2e-2 * np.abs(array).max())


def test_numbers_that_differ_by_place_are_none() -> None:
    graph = GraphBuilder(21)
    steps = np.asarray([0.5, 0.25], np.float32)
    number = graph.op("DequantizeLinear", np.asarray([2, 2], np.int8), steps, np.zeros(2, np.int8), axis=0)
    graph.gives(number, "y", [2])
    loaded = from_any(graph.model())[0]
    value = loaded.graph.outputs[0].producer()
    assert value is not None
    assert value.inputs[0] is not None
    assert Facts(loaded.graph).number(value.inputs[0]) is None


def test_operators_of_onnx_runtime_have_the_types_of_their_scale_and_zero_point() -> None:
    graph = GraphBuilder()
    point = np.asarray(7, np.uint16)
    codes = graph.op("QuantizeLinear", graph.given("x", [2, 3]), np.float32(0.5), point, domain="com.microsoft")
    rounded = graph.op("DequantizeLinear", codes, np.float32(0.5), point, domain="com.microsoft")
    graph.gives(rounded, "y", [2, 3])
    model = graph.model()
    loaded = from_any(model)[0]
    facts = Facts(loaded.graph)
    found = {value.name: facts.dtype(value) for node in loaded.graph for value in node.outputs}
    assert (str(found[codes]), str(found[rounded])) == ("UINT16", "FLOAT")
    assert onnxruntime.InferenceSession(model.SerializeToString()).get_outputs()[0].type == "tensor(float)"
    assert numpy_helper.to_array(model.graph.initializer[1]).dtype == np.uint16
