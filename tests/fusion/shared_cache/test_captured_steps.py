"""Captured steps of a decoder: all sizes are fixed, and the text stands at one end of a mask as long as the buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.serving.decoder import StepSizes
from tests.support.decoder_loops import Fed, assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import UNPADDED, decoder

ROOM = 12
SIZES = {"b": 2, "s": 1, "total": ROOM, "max_sequence_length": ROOM}


def captured(sizes: dict[str, int], **choices: str) -> onnx_attnfuse.Result:
    """A decoder in float16 whose steps can be captured."""
    model = decoder(dtype="float16")
    return onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", cuda_graph=True, dim=sizes, **choices)


@dataclasses.dataclass(frozen=True)
class Aligned(Fed):
    """A step whose mask is as long as the buffer."""

    text: Fed

    @property
    def positions(self) -> np.ndarray:
        return self.text.positions


def aligned(fed: Sequence[Fed], *, at_end: bool) -> list[Fed]:
    """The same steps with masks as long as the buffer, the text at their end or at their beginning."""
    rests = [np.zeros((len(step.mask), ROOM - step.mask.shape[1]), np.int64) for step in fed]
    masks = [
        np.concatenate([rest, step.mask] if at_end else [step.mask, rest], axis=1) for rest, step in zip(rests, fed, strict=True)
    ]
    return [Aligned(step.tokens, mask, step) for step, mask in zip(fed, masks, strict=True)]


@pytest.mark.parametrize("first", [[[1], [1]], [[0], [1]]], ids=["tokens", "padding in front of a row"])
def test_a_captured_step_gives_what_the_source_gives(first: list[list[int]]) -> None:
    fed = steps(first, more=(1, 1, 1, 1))
    result = captured(SIZES)
    told = result.report.decoder
    assert told is not None
    assert all(site.verified is not None for site in result.report.sites)
    assert {node.op_type for node in result.model.graph.node}.isdisjoint({"If", "Shape", "ScatterElements"})
    old = grown(decoder(dtype="float16"), told, fed)
    new = buffered(result.model, told, aligned(fed, at_end=True), ROOM)
    assert_same_at_tokens(old, new, fed, atol=5e-2)


def test_a_mask_with_its_text_at_the_beginning_is_another_mask() -> None:
    fed = steps([[1], [1]], more=(1, 1, 1, 1))
    result = captured(SIZES)
    told = result.report.decoder
    assert told is not None
    old = grown(decoder(dtype="float16"), told, fed)
    new = buffered(result.model, told, aligned(fed, at_end=False), ROOM)
    with pytest.raises(AssertionError):
        assert_same_at_tokens(old, new, fed, atol=5e-2)


@pytest.mark.parametrize("padding", ["assume-right", "assume-none"])
@pytest.mark.parametrize("at_end", [True, False], ids=["text at the end", "text at the beginning"])
def test_without_padding_that_comes_later_the_text_may_stand_at_either_end(padding: str, *, at_end: bool) -> None:
    fed = steps([[1], [1]], more=(1, 1, 1, 1))
    result = captured(SIZES, padding=padding)
    told = result.report.decoder
    assert told is not None
    assert told.mask_ends_anywhere
    assert told.sizes == StepSizes(batch=2, new=1, total=ROOM, max_length=ROOM)
    old = grown(decoder(dtype="float16"), told, fed)
    new = buffered(result.model, told, aligned(fed, at_end=at_end), ROOM)
    assert_same_at_tokens(old, new, fed, atol=5e-2)


PROMPTS = {"one": [[1, 1, 1, 1, 1]], "padded": [[1, 1, 1, 0, 0], [1] * 5]}


@pytest.mark.parametrize("padding", ["assume-right", "assume-none"])
def test_a_prompt_others_on_top_and_steps_with_masks_as_onnxruntime_genai_captures(padding: str) -> None:
    """One mask as long as the buffer for prompt and steps; ones come into the zeros after the text."""
    fed = steps(PROMPTS["one"], more=(1, 3, 1, 1))
    result = onnx_attnfuse.optimize(decoder(), ep="cpu", cache="shared", padding=padding)
    told = result.report.decoder
    assert told is not None
    assert told.mask_ends_anywhere
    assert told.sizes is None
    old = grown(decoder(), told, fed)
    assert_same_at_tokens(old, buffered(result.model, told, aligned(fed, at_end=False), ROOM), fed)


def test_steps_after_a_prompt_that_is_padded_on_the_right_may_have_the_text_at_the_beginning() -> None:
    """A prompt of several entries has a mask of its own length, as the operator's rule is."""
    fed = steps(PROMPTS["padded"], more=(1, 1, 1))
    result = onnx_attnfuse.optimize(decoder(), ep="cpu", cache="shared", padding="assume-right")
    told = result.report.decoder
    assert told is not None
    old = grown(decoder(), told, fed)
    for given in (fed, [fed[0], *aligned(fed, at_end=False)[1:]]):
        assert_same_at_tokens(old, buffered(result.model, told, given, ROOM), fed)


@pytest.mark.parametrize(
    ("model", "padding"),
    [
        (decoder(), "exact"),
        (decoder(given=False), "assume-right"),
        (decoder(seen=UNPADDED), "assume-right"),
    ],
    ids=["padding may come with every step", "positions are counted by the length of the mask", "the mask tells its length"],
)
def test_a_mask_that_is_asked_where_it_ends_has_its_text_at_the_end(model: onnx.ModelProto, padding: str) -> None:
    fed = steps(PROMPTS["one"], more=(1, 1))
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared", padding=padding)
    told = result.report.decoder
    assert told is not None
    assert not told.mask_ends_anywhere
    old = grown(model, told, fed)
    with pytest.raises(AssertionError):
        assert_same_at_tokens(old, buffered(result.model, told, aligned(fed, at_end=False), ROOM), fed)


def test_the_size_of_the_buffer_has_to_be_told() -> None:
    with pytest.raises(OptionError, match="max_sequence_length"):
        captured({name: size for name, size in SIZES.items() if name != "max_sequence_length"})
