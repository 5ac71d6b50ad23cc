"""What stands around attentions is made ready for ONNX Runtime's own fusions, also where their cache became a buffer."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED
from tests.support.decoders import decoder

_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")


@pytest.mark.parametrize("cache", ["as-is", "shared"])
def test_normalizations_are_made_ready_as_often_as_with_a_cache_that_grows(cache: str) -> None:
    result = onnx_attnfuse.optimize(onnx.load(_LLAMA), ep="cpu", cache=cache)
    assert (result.report.decoder is not None) == (cache == "shared")
    counts = Counter(node.op_type for node in result.model.graph.node)
    assert (counts["Div"], counts["Reciprocal"]) == (5, 0)


def test_a_decoder_without_normalizations_has_nothing_of_that_done() -> None:
    result = onnx_attnfuse.optimize(decoder(), ep="cpu", cache="shared")
    assert result.report.decoder is not None
    assert not [note for note in result.report.notes if "normalization" in note]
