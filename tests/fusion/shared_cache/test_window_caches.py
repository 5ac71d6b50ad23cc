"""Buffers that keep no more than the window of their layer, so that old keys and values are dropped."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.fusion.shared_cache import lengths
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, shared, steps
from tests.support.decoders import UNPADDED, WINDOWED, decoder

_EXPORTS = {path.stem: path for path in (pathlib.Path(__file__).parent / "exports").glob("*.onnx")}
_FULL, _LEFT, _RIGHT = [[1] * 6] * 3, [[0, 0, 1, 1, 1, 1], [1] * 6, [0] * 5 + [1]], [[1, 1, 1, 1, 0, 0], [1] * 6, [1] + [0] * 5]
_LONG = (1, 1, 1, 3, 1, 2, 5, 1, 1)

_shared = functools.partial(shared, onnxruntime="1.32", window_cache=True)


def _assert_serves(
    model: onnx.ModelProto, result: onnx_attnfuse.Result, padding: Sequence[Sequence[int]], more: Sequence[int], slack: int
) -> None:
    found = result.report.decoder
    assert found is not None, result.report.notes
    fed = steps(padding, more)
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed, room=40, slack=slack), fed)


@pytest.mark.newest
@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("padding", [_FULL, _LEFT], ids=["none", "left"])
@pytest.mark.parametrize("given", [True, False], ids=["positions are given", "positions are counted"])
def test_what_is_out_of_the_window_is_dropped(padding: Sequence[Sequence[int]], slack: int, *, given: bool) -> None:
    model = decoder(seen=WINDOWED, given=given)
    result = _shared(model)
    found = result.report.decoder
    assert found is not None
    assert found.cache_windows == (4, 4)
    _assert_serves(model, result, padding, _LONG, slack)


@pytest.mark.newest
def test_padding_does_not_drive_tokens_out() -> None:
    model = decoder(seen=WINDOWED)
    _assert_serves(model, _shared(model, padding="assume-right"), _RIGHT, (), 0)
    _assert_serves(model, _shared(model, padding="assume-right"), _FULL, _LONG, 0)
    _assert_serves(model, _shared(model, padding="assume-none"), _FULL, _LONG, 2)


@pytest.mark.newest
def test_rows_that_are_not_written_reach_nothing() -> None:
    """Rows of padding are zeros and not what memory held."""
    for padding, rows in (("exact", _LEFT), ("assume-right", _RIGHT)):
        result = _shared(decoder(seen=WINDOWED), padding=padding)
        found = result.report.decoder
        assert found is not None
        assert [node.op_type for node in result.model.graph.node].count("Where") == 2
        for logits in buffered(result.model, found, steps(rows, ())):
            assert np.isfinite(logits).all()


@pytest.mark.newest
@pytest.mark.parametrize(("name", "windows"), [("gemma2_past__ts17__eager", (4, None)), ("mistral_past__dyn18__sdpa", (4, 4))])
def test_real_exports_keep_a_window_in_layers_that_have_one(name: str, windows: tuple[int | None, ...]) -> None:
    model = onnx.load(_EXPORTS[name])
    result = _shared(model)
    found = result.report.decoder
    assert found is not None
    assert found.cache_windows == windows
    lengths = {
        value.name: value.type.tensor_type.shape.dim[2].dim_param for value in result.model.graph.input if "past" in value.name
    }
    wanted = ["max_sequence_length" if window is None else f"window_{window}_length" for window in windows]
    assert [lengths[key] for key in found.past_keys] == wanted
    assert any("no token can be taken back" in note for note in result.report.notes)
    for padding in (_FULL, _LEFT):
        _assert_serves(model, result, padding, _LONG, 1)


@pytest.mark.newest
def test_layers_without_a_window_keep_all() -> None:
    model = decoder(seen=UNPADDED, given=False)
    result = _shared(model)
    assert result.report.decoder is not None
    assert result.report.decoder.cache_windows == (None, None)
    assert any("none keeps less" in note for note in result.report.notes)


@pytest.mark.newest
def test_padding_that_enters_a_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = lengths.read_lengths

    def wrong(*given: Any, **options: Any) -> lengths.Lengths:
        found = read(*given, **options)
        buffered = found.buffered
        assert buffered.evicting is not None
        assert buffered.counts is not None
        evicting = dataclasses.replace(buffered.evicting, last=buffered.last, counts=buffered.counts)
        return dataclasses.replace(found, buffered=dataclasses.replace(buffered, evicting=evicting))

    monkeypatch.setattr("onnx_attnfuse.fusion.shared_cache.share.read_lengths", wrong)
    result = _shared(decoder(seen=WINDOWED))
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} >= {"differs"}


@pytest.mark.parametrize(
    "choices",
    [{"onnxruntime": "1.31"}, {"ep": "cuda", "arch": "sm90"}, {"context_length": 4}],
    ids=["older", "cuda", "no text is longer than the window"],
)
def test_elsewhere_all_positions_are_kept(choices: dict[str, Any]) -> None:
    result = _shared(decoder(seen=WINDOWED, dtype="float16"), verify="none", **choices)
    found = result.report.decoder
    assert found is not None
    assert found.cache_windows == (None, None)
    assert any("none keeps less" in note for note in result.report.notes)


@pytest.mark.parametrize(
    "choices", [{"cache": "as-is"}, {"kv_cache": "int8"}, {"ep": "cuda", "cuda_graph": True, "dim": {"b": 1}}]
)
def test_options_that_do_not_go_together(choices: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="window_cache"):
        _shared(decoder(seen=WINDOWED), **choices)
