"""Several new tokens of several entries on top of a shared cache: chunks of prompts, checked drafts, chats that go on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion.shared_cache import lengths
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import Array, Fed, assert_same_at_tokens, buffered, grown, shared
from tests.support.decoders import PADDED, UNPADDED, WINDOWED, decoder

_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_PLAIN = ["111111/111111", "111/111", "11/11", "1/1"]
_LEFT = ["001111/111111/000001", "011/111/001", "01/11/11", "1/1/1"]
_RIGHT = ["111100/111111/100000", "110/111/100", "10/11/11", "1/1/1"]
_HOLES = ["101101/011011/111111", "101/010/111", "-3", "011/111/101", "10/11/01", "1/1/1"]
_BACK = ["111111/111111", "111/111", "-4", "11111/11111", "-2", "1/1", "11/11"]
_FIRST = ["001111/111111", "111/111", "-2", "11/11", "1/1"]
"""Only a prompt has padding, and that at its start, as windows want it."""

_shared = functools.partial(shared, onnxruntime="1.32")


def _drawn(chunks: Sequence[str]) -> tuple[list[Fed], list[Fed]]:
    """What a caller feeds in each step, and all tokens so far as one prompt; `-3` takes three positions back."""
    rng, batch = np.random.default_rng(0), chunks[0].count("/") + 1
    tokens, mask = np.zeros((batch, 0), np.int64), np.zeros((batch, 0), np.int64)
    fed, whole = list[Fed](), list[Fed]()
    for chunk in chunks:
        if chunk.startswith("-"):
            tokens, mask = (array[:, : int(chunk)] for array in (tokens, mask))
            continue
        new = np.array([list(map(int, row)) for row in chunk.split("/")])
        drawn = rng.integers(2, 99, new.shape)
        tokens, mask = np.concatenate([tokens, drawn], axis=1), np.concatenate([mask, new], axis=1)
        fed.append(Fed(drawn, mask))
        whole.append(Fed(tokens, mask))
    return fed, whole


def _assert_chunks(model: onnx.ModelProto, result: onnx_attnfuse.Result, chunks: Sequence[str]) -> None:
    """A decoder gives chunk by chunk what its source gives for all tokens at once, without a cache."""
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert found.takes_chunks
    fed, whole = _drawn(chunks)
    wanted: list[Array] = [
        grown(model, found, [text])[0][:, -step.tokens.shape[1] :] for step, text in zip(fed, whole, strict=True)
    ]
    assert_same_at_tokens(wanted, buffered(result.model, found, fed), fed)


@pytest.mark.newest
@pytest.mark.parametrize("chunks", [_PLAIN, _LEFT, _RIGHT, _HOLES, _BACK], ids=["plain", "left", "right", "holes", "back"])
@pytest.mark.parametrize("given", [True, False], ids=["positions are given", "positions are counted"])
def test_a_batch_takes_uneven_chunks(chunks: Sequence[str], *, given: bool) -> None:
    model = decoder(given=given)
    _assert_chunks(model, _shared(model), chunks)


@pytest.mark.newest
@pytest.mark.parametrize("chunks", [_LEFT, _RIGHT, _BACK], ids=["left", "right", "back"])
def test_a_real_export_takes_uneven_chunks(chunks: Sequence[str]) -> None:
    model = onnx.load(_LLAMA)
    _assert_chunks(model, _shared(model), chunks)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("traits", "chunks"),
    [
        ({"seen": WINDOWED}, _FIRST),
        ({"seen": UNPADDED, "given": False}, _BACK),
        ({"seen": UNPADDED, "rotated": False}, _PLAIN),
        ({"seen": PADDED, "rotated": False}, _HOLES),
    ],
    ids=["a window", "no mask, rotated inside", "no mask", "no rotation"],
)
def test_forms_of_attention(traits: dict[str, Any], chunks: Sequence[str]) -> None:
    model = decoder(**traits)
    _assert_chunks(model, _shared(model), chunks)


@pytest.mark.newest
def test_a_prompt_of_several_entries_may_have_a_mask_as_long_as_the_buffer() -> None:
    model = decoder(rotated=False)
    result = _shared(model, padding="assume-right")
    found = result.report.decoder
    assert found is not None
    assert found.mask_ends_anywhere
    fed, whole = _drawn(["111111/111100", "1/1"])
    long = [dataclasses.replace(fed[0], mask=np.pad(fed[0].mask, ((0, 0), (0, 18))))]
    assert_same_at_tokens(grown(model, found, whole[:1]), buffered(result.model, found, long), fed[:1])


@pytest.mark.newest
def test_a_wrong_number_of_new_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = lengths.read_lengths

    def wrong(builder: Any, *rest: Any, **options: Any) -> lengths.Lengths:
        found = read(builder, *rest, **options)
        assert found.buffered.counts is not None
        one = builder.constant(np.asarray(1, np.int32))
        counts = builder.elementwise("Max", [builder.elementwise("Sub", [found.buffered.counts, one]), one])
        return dataclasses.replace(found, buffered=dataclasses.replace(found.buffered, counts=counts))

    monkeypatch.setattr("onnx_attnfuse.fusion.shared_cache.share.read_lengths", wrong)
    result = _shared(decoder())
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} >= {"differs"}


@pytest.mark.parametrize("choices", [{"onnxruntime": "1.31"}, {"ep": "cuda", "arch": "sm90"}], ids=["older", "cuda"])
def test_elsewhere_a_batch_takes_one_new_token_at_a_time(choices: dict[str, Any]) -> None:
    result = _shared(decoder(dtype="float16"), **choices)
    found = result.report.decoder
    assert found is not None
    assert not found.takes_chunks
    assert any("takes one new token of each at a time" in note for note in result.report.notes)
    assert all(len(node.input) < 17 for node in result.model.graph.node if node.op_type == "GroupQueryAttention")


@pytest.mark.parametrize("name", ["b", "s"])
def test_nothing_is_said_or_counted_where_one_is_fixed(name: str) -> None:
    model = decoder()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == name:
                dim.dim_value = 1
    result = _shared(model)
    assert result.report.decoder is not None, result.report.notes
    assert not any("one new token" in note for note in result.report.notes)
    assert all(len(node.input) < 17 for node in result.model.graph.node if node.op_type == "GroupQueryAttention")


def test_the_runtime_that_judges_counts_whichever_distribution_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_attnfuse.verify.runtime.installed", lambda: "1.31.1")
    found = _shared(decoder()).report.decoder
    assert found is not None
    assert not found.takes_chunks
