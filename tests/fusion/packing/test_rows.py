"""Encoders whose padding is removed by operators of the standard, for any padding, where no output depends on its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import onnx_attnfuse
from tests.fusion.packing.encoders import (
    CAUSAL,
    CONVOLVED,
    MEAN,
    PADDING,
    SLOPED,
    encoder,
    feeds_for,
    operators,
    padded_right,
    run_source,
)

_FIRST = "token = Gather<axis=1>(y1, first) out = Tanh(token)"
_SUM = "few = Mul(y1, some) out = ReduceSum<keepdims=0>(few, positions)"
_MAX = "few = Where(some, y1, closed) out = ReduceMax<keepdims=0>(few, positions)"
_BY_MASK = f"kept = Cast<to=1>(seen) some = Unsqueeze(kept, channels) {_SUM}"
_UNEVEN = f"given = Cast<to=1>(ids) some = Unsqueeze(given, channels) {_SUM}"
_MOST = f"some = Unsqueeze(seen, channels) {_MAX}"
_OTHERS = f"other = Not(seen) some = Unsqueeze(other, channels) {_MAX}"
_PLAIN = "out = ReduceMean<keepdims=0>(y1, positions)"
_WINDOW = """
   count = Squeeze(length) rows = Range(first, count, one) i = Unsqueeze(rows, positions) j = Unsqueeze(rows, zero)
   apart = Sub(i, j) far = Abs(apart) near2 = LessOrEqual(far, two) both = And(row, near2) bias = Where(both, open, closed)"""
_OFF = _WINDOW.replace("near2 = LessOrEqual(far, two)", "near2 = Greater(far, first)")
_MASKS: dict[str, NDArray[Any]] = {
    "right": padded_right(),
    "left": padded_right()[:, ::-1].copy(),
    "holes": np.array([[1, 0, 1, 1], [0, 1, 1, 0]]),
    "one entry without a key": np.array([[1, 1, 1], [0, 0, 0], [0, 1, 0]]),
    "no key": np.zeros((2, 5), np.int64),
    "none": np.ones((2, 5), np.int64),
}


def _pooled(end: str, bias: str = PADDING, between: str = "", after: str = "sum{i}") -> onnx.ModelProto:
    """Two layers of which each entry gives one row."""
    model = encoder(end=end, bias=bias, between=between, after=after)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, ["b", 16]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2), "two"))
    return model


def _optimized(model: onnx.ModelProto, target: str = "auto", assume: tuple[str, ...] = ()) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, ep="cpu", target=target, assume=assume)


def _is_packed(result: onnx_attnfuse.Result) -> bool:
    assert any("padding is removed" in note for note in result.report.notes) == ("NonZero" in operators(result.model))
    return "NonZero" in operators(result.model)


def _assert_equal(model: onnx.ModelProto, result: onnx_attnfuse.Result) -> None:
    for mask in _MASKS.values():
        feeds = feeds_for(mask)
        np.testing.assert_allclose(run_source(result.model, feeds)[0], run_source(model, feeds)[0], atol=2e-5, equal_nan=False)


@pytest.mark.parametrize(
    ("end", "bias"),
    [
        (_FIRST, PADDING),
        (_FIRST, SLOPED),
        (_FIRST, _WINDOW),
        (_FIRST, CAUSAL),
        (_BY_MASK, PADDING),
        (_BY_MASK, _WINDOW),
        (_BY_MASK, CAUSAL),
        (_MOST, PADDING),
    ],
)
def test_where_no_output_depends_on_padding_it_is_removed_by_default(end: str, bias: str) -> None:
    model = _pooled(end, bias)
    result = _optimized(model)
    ops = operators(result.model)
    assert _is_packed(result)
    assert (ops["MultiHeadAttention"], ops["Softmax"], ops["ScatterND"]) == (2, 0, 1)
    assert [site.name for site in result.report.sites] == ["weights0", "weights1"]
    assert result.report.fused == 2
    onnx.checker.check_model(result.model)
    _assert_equal(model, result)


@pytest.mark.parametrize(
    ("end", "bias", "between", "after"),
    [
        (_PLAIN, PADDING, "", "sum{i}"),
        (_OTHERS, PADDING, "", "sum{i}"),
        (_UNEVEN, PADDING, "", "sum{i}"),
        (_FIRST, _OFF, "", "sum{i}"),
        (_BY_MASK, _OFF, "", "sum{i}"),
        (_BY_MASK, "bias = Identity(open)", "", "sum{i}"),
        (_BY_MASK, PADDING, CONVOLVED, "other{i}"),
        (_BY_MASK, PADDING, MEAN, "other{i}"),
    ],
)
def test_near_misses_keep_their_padding(end: str, bias: str, between: str, after: str) -> None:
    model = _pooled(end, bias, between, after)
    result = _optimized(model)
    assert not _is_packed(result)
    _assert_equal(model, result)


@pytest.mark.parametrize("after", ["Mul(y1, some)", "Add(y1, some)"])
def test_rows_of_tokens_that_a_mask_multiplies_are_no_padding(after: str) -> None:
    model = encoder(end=f"kept = Cast<to=1>(seen) some = Unsqueeze(kept, channels) out = {after}")
    result = _optimized(model)
    assert _is_packed(result) == ("Mul" in after)
    _assert_equal(model, result)


def test_hidden_states_are_packed_only_on_request() -> None:
    model = encoder()
    assert not _is_packed(_optimized(model))
    assert not _is_packed(_optimized(model, "packed", ("named-sizes", "nonempty-axes", "bounded-scores", "large-fills")))
    result = _optimized(model, "packed")
    assert _is_packed(result)
    assert result.report.fused == 2
    for mask in _MASKS.values():
        feeds = feeds_for(mask)
        old, new = run_source(model, feeds)[0], run_source(result.model, feeds)[0]
        kept = mask.astype(bool) | ~mask.astype(bool).any(1, keepdims=True)
        np.testing.assert_allclose(new[kept], old[kept], atol=2e-5)
        assert not new[~kept].any()


def test_a_refusal_of_what_was_asked_for_is_reported() -> None:
    result = _optimized(_pooled(_FIRST, _OFF), "packed")
    assert any(note.startswith("padding stays: the mask is ") for note in result.report.notes)
    assert result.report.fused == 2


def test_without_its_assumptions_nothing_is_packed() -> None:
    assert not _is_packed(_optimized(_pooled(_BY_MASK), assume=("none",)))


def test_a_second_run_finds_nothing_to_do() -> None:
    once = _optimized(_pooled(_BY_MASK)).model
    again = _optimized(once)
    assert (again.report.fused, again.report.already_fused) == (0, 2)
    assert operators(again.model) == operators(once)
