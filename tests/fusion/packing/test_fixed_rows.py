"""Encoders packed into a fixed number of rows, as a CUDA graph has: the same tokens for any padding, or NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from numpy.typing import NDArray

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.verify.references import OPERATORS
from tests.fusion.packing.encoders import CAUSAL, MEAN, PADDING, SLOPED, encoder, feeds_for, operators, padded_right, run_source

_MASKS: dict[str, NDArray[Any]] = {
    "right": padded_right(),
    "left": padded_right()[:, ::-1].copy(),
    "holes": np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]),
}


def _packed(model: onnx.ModelProto, room: int = 14, **choices: Any) -> onnx_attnfuse.Result:
    given = {"ep": "cuda", "arch": "sm90", "cuda_graph": True, "dim": {"b": 3, "s": 7}, "target": "packed", **choices}
    result = onnx_attnfuse.optimize(model, packed_tokens=room, **given)
    assert result.report.capture is not None
    assert result.report.capture.possible
    return result


def _run(model: onnx.ModelProto, mask: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS)).run(None, feeds_for(mask))[0])


def _assert_same_tokens(model: onnx.ModelProto, packed: onnx.ModelProto, mask: NDArray[Any]) -> None:
    found, kept = _run(packed, mask), mask.astype(bool)
    np.testing.assert_allclose(found[kept], run_source(model, feeds_for(mask))[0][kept], atol=2e-5, equal_nan=False)
    assert not found[~kept].any()


@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_tokens_are_those_of_the_source_for_any_padding(mask: NDArray[Any]) -> None:
    model = encoder()
    result = _packed(model)
    ops = operators(result.model)
    assert (ops["PackedMultiHeadAttention"], ops["RemovePadding"], ops["NonZero"], ops["If"]) == (2, 0, 0, 0)
    assert all(site.verified is not None for site in result.report.sites)
    _assert_same_tokens(model, result.model, mask)


@pytest.mark.parametrize("bias", [CAUSAL, SLOPED], ids=["a triangle", "something added"])
@pytest.mark.parametrize("mask", _MASKS.values(), ids=_MASKS)
def test_attentions_that_are_more_than_padding_get_padded_operands(bias: str, mask: NDArray[Any]) -> None:
    model = encoder(bias=bias)
    result = _packed(model)
    assert operators(result.model)["MultiHeadAttention"] == 2
    assert operators(result.model)["ScatterElements"] == 1
    _assert_same_tokens(model, result.model, mask)


@pytest.mark.parametrize("bias", [PADDING, CAUSAL], ids=["padding", "a triangle"])
@pytest.mark.parametrize(("room", "fits"), [(14, True), (13, False), (1, False), (100, True)])
def test_everything_is_nan_where_there_are_more_tokens_than_rows(bias: str, room: int, fits: bool) -> None:
    mask = padded_right()
    assert mask.sum() == 14
    found = _run(_packed(encoder(bias=bias), room).model, mask)
    assert np.isnan(found).all() if not fits else np.isfinite(found).all()


def test_nan_reaches_what_is_pooled() -> None:
    model = encoder(end="out = ReduceMean<keepdims=0>(y1, positions)")
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["b", 16]))
    assert np.isnan(_run(_packed(model, 13).model, padded_right())).all()


def test_an_output_that_cannot_be_nan_keeps_its_padding() -> None:
    model = encoder(end="few = Greater(y1, open) out = Cast<to=1>(few) yes = Not(few)", outputs=", bool[b, s, 16] yes")
    result = _packed(model)
    assert operators(result.model)["PackedMultiHeadAttention"] == operators(result.model)["ScatterElements"] == 0


@pytest.mark.parametrize("choices", [{"assume": ("nonempty-axes",)}, {}], ids=["not assumed", "tokens are mixed"])
def test_padding_stays_where_its_rows_are_needed(choices: dict[str, Any]) -> None:
    model = encoder() if choices else encoder(between=MEAN, after="other{i}")
    assert operators(_packed(model, **choices).model)["ScatterElements"] == 0


@pytest.mark.parametrize("choices", [{}, {"cuda_graph": True, "dim": {"b": 3, "s": 7}}, {"target": "packed"}])
def test_rows_are_for_packed_graphs_that_are_captured(choices: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="packed_tokens is given, which is for cuda_graph with target 'packed'"):
        onnx_attnfuse.optimize(encoder(), ep="cuda", arch="sm90", packed_tokens=3, **choices)
