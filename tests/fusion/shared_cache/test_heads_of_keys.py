"""How many heads keys and values have, where the cache of a decoder is to be one buffer."""

from __future__ import annotations

import pytest

import onnx_attnfuse
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, operators, steps
from tests.support.decoders import decoder

_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}


@pytest.mark.parametrize("padding", _PADDINGS)
def test_all_queries_may_share_one_head_of_keys_and_values(padding: str) -> None:
    model = decoder(heads=(1, 1))
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared")
    found = result.report.decoder
    assert found is not None
    assert (found.num_heads, found.kv_heads) == (4, 1)
    assert not {"Expand", "Transpose"} & operators(result.model)
    fed = steps(_PADDINGS[padding], (1, 1, 1))
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("cache", ["as-is", "shared"])
def test_one_head_of_keys_is_handed_over_once(cache: str) -> None:
    result = onnx_attnfuse.optimize(decoder(heads=(1, 1)), ep="cpu", cache=cache)
    assert [site.status for site in result.report.sites] == ["fused"] * 2
    assert "Expand" not in operators(result.model)


@pytest.mark.parametrize("heads", [(1, 2), (2, 1)])
def test_keys_and_values_of_other_numbers_of_heads_keep_their_cache(heads: tuple[int, int]) -> None:
    result = onnx_attnfuse.optimize(decoder(heads=heads), ep="cpu", cache="shared")
    assert result.report.decoder is None
    assert any("is not laid out as batch, heads, positions, channels" in note for note in result.report.notes)
