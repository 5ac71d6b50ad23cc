"""Attentions fused without the roundings inside: right but for these, told with their cost, put back where nothing came of it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention, without_roundings
from onnx_attnfuse.verify.quantised.stated_error import check_dequantised
from tests.support.bundled import cases, run
from tests.support.graph_builder import GraphBuilder
from tests.support.quantised import quantised, source

MODELS = {"bert__dyn18__sdpa": 2, "bert__ts17__eager": 2, "gpt2__ts17__eager": 2, "swin__dyn18__sdpa": 4, "vit__dyn18__sdpa": 2}
SETTINGS = ["defaults", "products alone", "16 bits", "a pair for each reader", "operators on quantised numbers", "qnn"]


def fused(model: onnx.ModelProto, **options: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, dequantise_attention=True, **options)


def rounded_operators(model: onnx.ModelProto) -> int:
    """Halves of roundings; an operator on two quantised tensors stands for three."""
    halves = {"DequantizeLinear": 1, "QuantizeLinear": 1}
    return sum(halves.get(node.op_type, 3 * node.op_type.startswith("QLinear")) for node in model.graph.node)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_all_are_fused_and_equal_but_for_roundings(name: str, setting: str) -> None:
    model = quantised(name, setting)
    result = fused(model)
    assert (result.report.fused, result.report.candidates) == (MODELS[name], MODELS[name])
    told = result.report.dequantised
    assert told is not None
    assert told.sites == MODELS[name]
    assert told.roundings >= 2 * told.sites
    assert told.error is not None
    assert told.error.largest > 0
    assert told.source_error is not None
    assert told.result_error is not None
    assert told.result_error.mean <= told.source_error.mean * 1.05
    assert any(line.startswith("difference of the outputs by that: largest") for line in result.report.notes)
    assert rounded_operators(result.model) < rounded_operators(model)
    read = {name for node in result.model.graph.node for name in node.input}
    assert {item.name for item in result.model.graph.initializer} <= read
    verdict = check_dequantised(ir.from_proto(model), ir.from_proto(result.model))
    assert verdict.equal, verdict.detail


@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", "vit__dyn18__sdpa"])
def test_without_any_rounding_a_quantised_model_is_the_model_but_for_its_weights(name: str) -> None:
    """The oracle itself: the exporter's model, with the weights as the quantiser has rounded them."""
    plain = ir.to_proto(without_roundings(ir.from_proto(quantised(name, "16 bits"))))
    stored = {node.input[0] for node in plain.graph.node if node.op_type == "DequantizeLinear"}
    assert stored == {item.name for item in plain.graph.initializer if item.name in stored}
    feeds = cases(source(name))["example"]
    before, after = run(onnx.load(source(name)), feeds), run(plain, feeds)
    for output, array in before.items():
        assert np.abs(array - after[output]).mean() < 0.05 * array.std()


@pytest.mark.parametrize(
    ("name", "what"),
    [("bert__dyn18__sdpa", "error"), pytest.param("gpt2__ts17__eager", "result_error", marks=pytest.mark.exhaustive)],
)
def test_verifying_holds_the_result_to_what_was_stated(name: str, what: str) -> None:
    model = quantised(name)
    result = fused(model).model
    found = onnx_attnfuse.verify_models(model, result)
    assert found.equal
    assert any(note.startswith("stated: largest") for note in found.notes)
    (entry,) = (item for item in result.metadata_props if item.key == DequantisedAttention.KEY)
    record = json.loads(entry.value)
    record[what]["mean"] /= 10
    entry.value = json.dumps(record)
    found = onnx_attnfuse.verify_models(model, result)
    assert not found.equal
    assert "was stated" in found.detail


def test_a_scale_that_is_two_per_cent_off_is_no_rounding() -> None:
    model = quantised("bert__dyn18__sdpa")
    result = fused(model).model
    for node in result.graph.node:
        for attribute in node.attribute:
            if node.op_type == "MultiHeadAttention" and attribute.name == "scale":
                attribute.f *= 1.02
    found = onnx_attnfuse.verify_models(model, result)
    assert not found.equal
    assert "without roundings" in found.detail


def test_a_rounding_that_the_source_has_not_is_a_difference() -> None:
    model = quantised("bert__dyn18__sdpa")
    result = fused(model).model
    scale = next(item for item in result.graph.initializer if item.name == "linear_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.asarray(0.5, np.float32), scale.name))
    found = onnx_attnfuse.verify_models(model, result)
    assert not found.equal
    assert "not in the first" in found.detail


def test_a_result_may_be_no_further_from_what_nothing_rounds_than_its_source() -> None:
    """The finest and the coarsest grid change places: each rounding is one of the source's, and no difference was stated."""
    model = quantised("bert__dyn18__sdpa")
    result = fused(model).model
    scales = {item.name: float(onnx.numpy_helper.to_array(item)) for item in result.graph.initializer if item.dims == []}
    used = {node.input[1] for node in result.graph.node if node.op_type == "QuantizeLinear"}
    grids = sorted(
        {(scales[node.input[1]], *node.input[1:]) for node in result.graph.node if node.input[1:2] and node.input[1] in used}
    )
    (_, *fine), (_, *coarse) = grids[0], grids[-1]
    for node in result.graph.node:
        if list(node.input[1:]) in (fine, coarse):
            node.input[1:] = coarse if list(node.input[1:]) == fine else fine
    (entry,) = (item for item in result.metadata_props if item.key == DequantisedAttention.KEY)
    entry.value = json.dumps({**json.loads(entry.value), "error": None, "result_error": None})
    found = onnx_attnfuse.verify_models(model, result)
    assert not found.equal
    assert "further from those without roundings" in found.detail


def test_a_record_that_cannot_be_read_is_told() -> None:
    with pytest.raises(ModelError, match="make the model again"):
        DequantisedAttention.read({DequantisedAttention.KEY: "[]"})


@pytest.mark.parametrize("name", ["bert__dyn18__sdpa", "bert__ts17__eager"])
def test_where_no_operator_takes_them_roundings_are_put_back(name: str) -> None:
    model = quantised(name)
    result = fused(model, target="GroupQueryAttention")
    assert (result.report.fused, result.report.dequantised) == (0, None)
    assert "not-causal" in {reason.code for site in result.report.sites for reason in site.reasons}
    wanted, found = (Counter(node.op_type for node in item.graph.node) for item in (model, result.model))
    for op in ("DequantizeLinear", "QuantizeLinear", "Softmax", "MatMul", "Transpose", "Reshape"):
        assert wanted[op] == found[op]
    assert {item.name for item in model.graph.initializer} == {item.name for item in result.model.graph.initializer}
    feeds = cases(source(name))["example"]
    before, after = run(model, feeds), run(result.model, feeds)
    for output, array in before.items():
        assert np.array_equal(array, after[output])
    assert not [item for item in result.model.metadata_props if item.key == DequantisedAttention.KEY]


def test_nothing_is_measured_where_nothing_is_verified() -> None:
    told = fused(quantised("bert__dyn18__sdpa"), verify="none").report.dequantised
    assert told is not None
    assert told.error is None
    assert "not measured" in told.lines()[1]


def test_the_whole_model_is_judged_without_roundings() -> None:
    notes = fused(quantised("bert__dyn18__sdpa"), verify="model").report.notes
    assert any(note.startswith("whole model verified on") and "without roundings" in note for note in notes)


def test_what_rounds_nothing_inside_is_as_ever() -> None:
    result = fused(quantised("bert__dyn18__sdpa", spared=True))
    assert (result.report.fused, result.report.dequantised) == (2, None)


def spelled(*, weights_used: bool = False, far_mask: bool = False) -> onnx.ModelProto:
    """An attention whose scores and weights are rounded, with a mask that is rounded before it is laid out."""
    graph = GraphBuilder()
    query, key, value = (graph.given(name, [2, 3, 5, 8]) for name in "qkv")

    def rounded(x: str, step: float) -> str:
        scale, point = np.float32(step), np.asarray(0, np.int8)
        return graph.op("DequantizeLinear", graph.op("QuantizeLinear", x, scale, point), scale, point)

    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
    if far_mask:
        mask = rounded(graph.given("mask", [2, 5]), 0.5)
        scores = graph.op("Add", scores, graph.op("Unsqueeze", mask, [1, 2]))
    weights = rounded(graph.op("Softmax", rounded(scores, 0.25), axis=-1), 1 / 128)
    graph.gives(graph.op("MatMul", weights, value), "out", [2, 3, 5, 8])
    if weights_used:
        graph.gives(weights, "weights", [2, 3, 5, 5])
    return graph.model()


def test_rounded_weights_that_are_used_elsewhere_stay_rounded_there() -> None:
    model = spelled(weights_used=True)
    random = np.random.default_rng(0)
    feeds = {name: random.normal(0, 1, (2, 3, 5, 8)).astype(np.float32) for name in "qkv"}
    assert fused(model).report.fused == 0
    result = fused(model, keep_outputs=True)
    assert result.report.fused == 1
    steps = run(result.model, feeds)["weights"] * 128
    assert np.array_equal(steps, np.rint(steps))
    unquantised = run(ir.to_proto(without_roundings(ir.from_proto(model))), feeds)["out"]
    assert np.allclose(run(result.model, feeds)["out"], unquantised, atol=1e-5)


def test_a_mask_that_is_laid_out_behind_its_rounding_stays_rounded() -> None:
    model = spelled(far_mask=True)
    result = fused(model)
    assert result.report.fused == 1
    assert rounded_operators(result.model) == 2
    random = np.random.default_rng(0)
    feeds = {name: random.normal(0, 1, (2, 3, 5, 8)).astype(np.float32) for name in "qkv"}
    feeds["mask"] = random.normal(0, 1, (2, 5)).astype(np.float32)
    near = {**feeds, "mask": np.rint(feeds["mask"] * 2) / 2}
    assert np.array_equal(run(result.model, feeds)["out"], run(result.model, near)["out"])


def test_a_rounded_mask_of_two_attentions_stays_for_the_one_that_is_not_fused() -> None:
    graph = GraphBuilder()
    scale, point = np.float32(0.5), np.asarray(0, np.int8)
    given = graph.given("mask", [2, 1, 5, 5])
    mask = given
    for step in (np.float32(0.3), scale):
        mask = graph.op("DequantizeLinear", graph.op("QuantizeLinear", mask, step, point), step, point)
    for number, capped in enumerate((True, False)):
        query, key, value = (graph.given(f"{name}{number}", [2, 3, 5, 8]) for name in "qkv")
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = graph.op("Tanh", scores) if capped else scores
        weights = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        weights = graph.op("DequantizeLinear", graph.op("QuantizeLinear", weights, scale, point), scale, point)
        graph.gives(graph.op("MatMul", weights, value), f"out{number}", [2, 3, 5, 8])
    model = graph.model()
    result = fused(model, target="MultiHeadAttention")
    assert [site.status for site in result.report.sites] == ["skipped", "fused"]
    random = np.random.default_rng(0)
    feeds = {entry.name: random.normal(0, 1, (2, 3, 5, 8)).astype(np.float32) for entry in model.graph.input}
    feeds["mask"] = random.normal(0, 1, (2, 1, 5, 5)).astype(np.float32)
    before, after = run(model, feeds), run(result.model, feeds)
    unquantised = run(ir.to_proto(without_roundings(ir.from_proto(model))), feeds)
    assert np.array_equal(before["out0"], after["out0"])
    assert np.allclose(unquantised["out1"], after["out1"], atol=1e-5)
    assert not np.allclose(before["out1"], after["out1"], atol=1e-2)
