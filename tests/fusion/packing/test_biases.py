"""Biases of projections around PackedMultiHeadAttention: which are left, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest

import onnx_attnfuse
from onnx_attnfuse.verify.references import OPERATORS
from tests.fusion.packing.encoders import SLOPED, encoder, feeds_for, padded_right, run_source

_BIASED = ("k", "v", "wide")


def _biased(biased: tuple[str, ...] = _BIASED, **choices: str) -> onnx.ModelProto:
    """An encoder with biases behind these products of both layers."""
    model = encoder(**choices)
    numbers = np.random.default_rng(1)
    for name in [f"{part}{layer}" for part in biased for layer in range(2)]:
        (place,) = (at for at, node in enumerate(model.graph.node) if node.output[0] == name)
        model.graph.node[place].output[0] = f"{name}_product"
        model.graph.node.insert(place + 1, onnx.helper.make_node("Add", [f"{name}_product", f"b_{name}"], [name]))
        array = numbers.standard_normal(16).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"b_{name}"))
    return model


def _packed(model: onnx.ModelProto) -> onnx.ModelProto:
    """What is written for it, verified, the same where there are tokens."""
    packed = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", target="packed", padding="assume-right").model
    feeds = feeds_for(padded_right())
    kept = feeds["mask"].astype(bool)
    found = onnx.reference.ReferenceEvaluator(packed, new_ops=list(OPERATORS)).run(None, feeds)
    np.testing.assert_allclose(np.asarray(found[0])[kept], run_source(model, feeds)[0][kept], atol=5e-5)
    return packed


def _constants(model: onnx.ModelProto) -> set[str]:
    return {item.name for item in model.graph.initializer}


def test_the_bias_of_keys_is_dropped_and_that_of_values_is_in_the_next_product() -> None:
    packed = _packed(_biased())
    made = {node.output[0]: node for node in packed.graph.node}
    attentions = [node for node in packed.graph.node if node.op_type == "PackedMultiHeadAttention"]
    assert len(attentions) == 2
    for node in attentions:
        assert [made[name].op_type for name in node.input[:3]] == ["Add", "MatMul", "MatMul"]
        (reader,) = (other for other in packed.graph.node if node.output[0] in other.input)
        assert reader.op_type == "FusedMatMul"
    assert not _constants(packed) & {"b_k0", "b_v0", "b_k1", "b_v1"}


def test_the_bias_of_values_is_added_behind_where_no_product_takes_it() -> None:
    packed = _packed(_biased(("v",)))
    for node in packed.graph.node:
        if node.op_type == "PackedMultiHeadAttention":
            (reader,) = (other for other in packed.graph.node if node.output[0] in other.input)
            assert (reader.op_type, reader.input[1][:3]) == ("Add", "b_v")


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_bias_that_is_not_finite_stays(number: float) -> None:
    model = _biased()
    for item in model.graph.initializer:
        if item.name == "b_k0":
            item.CopyFrom(onnx.numpy_helper.from_array(np.full(16, number, np.float32), "b_k0"))
    packed = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", target="packed", padding="assume-right", verify="none").model
    assert "b_k0" in _constants(packed)
    assert "b_k1" not in _constants(packed)


def test_biases_stay_beside_what_is_added_to_the_scores() -> None:
    assert _constants(_packed(_biased(bias=SLOPED))) >= {"b_k0", "b_v0", "b_k1", "b_v1"}


def test_a_bias_stays_where_something_else_reads_the_sum() -> None:
    end = "out = Add(y1, v1)"
    assert "b_v1" in _constants(_packed(_biased(end=end)))
