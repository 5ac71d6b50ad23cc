"""Captured steps of a decoder: all sizes are fixed, and the text stands at the end of a mask as long as the buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

import onnx_attnfuse
from onnx_attnfuse.errors import OptionError
from tests.support.decoder_loops import Fed, assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import decoder

ROOM = 12
SIZES = {"b": 2, "s": 1, "total": ROOM, "max_sequence_length": ROOM}


def captured(sizes: dict[str, int]) -> onnx_attnfuse.Result:
    """A decoder in float16 whose steps can be captured."""
    model = decoder(dtype="float16")
    return onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared", cuda_graph=True, dim=sizes)


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


def test_the_size_of_the_buffer_has_to_be_told() -> None:
    with pytest.raises(OptionError, match="max_sequence_length"):
        captured({name: size for name, size in SIZES.items() if name != "max_sequence_length"})
