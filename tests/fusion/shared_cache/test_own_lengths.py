"""Decoders whose layers have pasts of lengths of their own, as transformers' exporter writes its cache of windows."""

from __future__ import annotations

import pathlib

import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS
from tests.support.decoder_loops import assert_serves, shared

_GEMMA = pathlib.Path(__file__).parent / "exports" / "own_lengths" / "gemma3_past__transformers__sdpa.onnx"
"""A layer with a window and one without, exported with transformers 5.24's OnnxExporter and its usual cache."""
_IDLE = ("past_key_values.layers.0._sliding_window_tensor", "cache.layers.0._sliding_window_tensor")


def _as_loops_call_it(model: onnx.ModelProto) -> onnx.ModelProto:
    """The source without its idle state, and with numbers of heads and channels as numbers."""
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    for values in (alone.graph.input, alone.graph.output):
        kept = [item for item in values if item.name not in _IDLE]
        del values[:]
        values.extend(kept)
    for dim in (dim for item in alone.graph.input for dim in item.type.tensor_type.shape.dim):
        if dim.dim_param.isdigit():
            dim.dim_value = int(dim.dim_param)
    idle = next(node for node in alone.graph.node if node.output[0] == _IDLE[1])
    alone.graph.node.remove(idle)
    return alone


def test_caches_that_grow_by_the_same_tokens_are_one_buffer() -> None:
    model = onnx.load(_GEMMA)
    result = shared(model)
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all("equal-pasts" in site.assumptions for site in result.report.sites)
    for padding in ([[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6]):
        assert_serves(_as_loops_call_it(model), result, padding, (1, 1, 1, 1))


def test_without_the_assumption_their_lengths_may_differ() -> None:
    left = shared(onnx.load(_GEMMA), assume=tuple(name for name in ASSUMPTIONS if name not in {"equal-pasts", "wide-subgroups"}))
    assert left.report.decoder is None
    assert "caches-differ" in {reason.code for site in left.report.sites for reason in site.reasons}


def test_where_caches_stay_no_lengths_are_taken_to_be_equal() -> None:
    result = onnx_attnfuse.optimize(onnx.load(_GEMMA), ep="cpu")
    assert [site.status for site in result.report.sites] == ["fused"] * 2
    assert not any("equal-pasts" in site.assumptions for site in result.report.sites)


@pytest.mark.parametrize("is_read", [False, True])
def test_an_input_that_only_becomes_an_output_goes_with_it(is_read: bool) -> None:
    model = onnx.load(_GEMMA)
    given, out = _IDLE
    if is_read:
        logits = next(node for node in model.graph.node if "logits" in node.output)
        logits.output[0] = "plain"
        model.graph.node.append(onnx.helper.make_node("Cast", [given], ["factor"], to=onnx.TensorProto.FLOAT))
        model.graph.node.append(onnx.helper.make_node("Mul", ["plain", "factor"], ["logits"]))
    result = shared(model)
    assert result.report.decoder is not None
    assert (given in result.report.decoder.others) == is_read
    assert any(f"'{given}', which only became an output, is gone" in note for note in result.report.notes) != is_read
    assert [any(item.name == name for item in values) for name, values in (
        (given, result.model.graph.input), (out, result.model.graph.output),
    )] == [is_read, is_read]  # fmt: skip
