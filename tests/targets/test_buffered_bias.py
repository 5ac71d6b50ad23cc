"""Biases of attentions whose cache is one buffer: in the order of the buffer wherever padding lies, or the cache is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnx_attnfuse.graph.assumptions import ASSUMPTIONS
from tests.support.decoder_loops import assert_serves, shared
from tests.support.decoders import PADDED, UNPADDED, decoder

_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}
_BIASED = {"more": "biased{i} = Add(masked{i}, added)", "scores": "biased{i}"}
_TEXT_POSITIONS = """{seen} counted = CumSum(attention_mask, one) places = Cast<to=1>(counted) spread = Unsqueeze(places, middle)
   added = Mul(spread, slopes)"""
"""ALiBi by the positions of real tokens, as BLOOM has it."""
_DISTANCES = """{seen} distances = Sub(i, j) behind = Max(distances, zero) near = Min(behind, reach)
   chosen = Gather(table_of, near) turned = Transpose<perm=[2, 0, 1]>(chosen) added = Unsqueeze(turned, zeros)"""
"""A table by distance in which padding counts, as T5 has it."""


def _decoder(added: str, seen: str = PADDED, fill: float = -60000.0, **traits: Any) -> onnx.ModelProto:
    model = decoder(seen=added.format(seen=seen), **(_BIASED | {"rotated": False} | traits))
    weights = {"slopes": -0.3 * np.arange(1, 5).reshape(1, 4, 1, 1), "table_of": np.random.default_rng(7).standard_normal((4, 4))}
    for name, array in weights.items():
        if name in added:
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    next(item for item in model.graph.initializer if item.name == "fill32").CopyFrom(
        onnx.numpy_helper.from_array(np.float32(fill), "fill32")
    )
    return model


@pytest.mark.parametrize("padding", _PADDINGS)
@pytest.mark.parametrize("added", [_TEXT_POSITIONS, _DISTANCES], ids=["positions of text", "distances"])
def test_a_bias_is_in_the_order_of_the_buffer(added: str, padding: str) -> None:
    model = _decoder(added)
    result = shared(model)
    assert {site.mask_form for site in result.report.sites} == {"GroupQueryAttention causal, shared buffer, attention_bias"}
    assert all("bounded-scores" in site.assumptions for site in result.report.sites)
    assert_serves(model, result, _PADDINGS[padding], (1, 1, 1))


@pytest.mark.parametrize(("added", "alike"), [(_TEXT_POSITIONS, False), (_DISTANCES, True)])
def test_distances_that_count_padding_are_those_of_all_entries(added: str, *, alike: bool) -> None:
    found = shared(_decoder(added), verify="none").report.decoder
    assert found is not None
    assert found.counts_alike == alike


def test_several_tokens_on_top_of_padding_get_their_own_rows_and_columns() -> None:
    model = _decoder(_DISTANCES)
    assert_serves(model, shared(model), [[0, 1, 0, 1]], (3, 1, 2, 1))


def test_a_bias_whose_mask_is_minus_infinity_leaves_no_nan_behind() -> None:
    guard = "nan{i} = IsNaN(weights{i}) kept{i} = Where(nan{i}, nothing, weights{i})"
    model = _decoder(_DISTANCES, fill=-np.inf, after=guard, weights="kept{i}")
    for padding in _PADDINGS.values():
        assert_serves(model, shared(model), padding, (1, 1))


def test_padding_that_is_vouched_for_leaves_rows_or_all_as_they_are() -> None:
    model = _decoder(_DISTANCES)
    counts = {
        choice: sum(node.op_type == "GatherND" for node in shared(model, padding=choice).model.graph.node)
        for choice in ("auto", "assume-right", "assume-none")
    }
    assert counts["auto"] > counts["assume-right"] > counts["assume-none"] == 0
    assert_serves(model, shared(model, padding="assume-right"), _PADDINGS["right"], (1, 1))
    assert_serves(model, shared(model, padding="assume-none"), _PADDINGS["none"], (1, 1))


def test_a_model_without_a_mask_hands_its_bias_over_as_it_is() -> None:
    model = _decoder(_DISTANCES, seen=UNPADDED)
    result = shared(model)
    assert not {"TopK", "GatherND"} & {node.op_type for node in result.model.graph.node}
    assert_serves(model, result, _PADDINGS["none"], (1, 1))
    assert_serves(model, result, [[1, 1, 1]], (2, 1))


@pytest.mark.parametrize(
    ("traits", "choices", "said"),
    [
        ({"fill": -3000.0}, {}, "keep a weight"),
        (
            {"fill": -3.4e38},
            {"assume": tuple(name for name in ASSUMPTIONS if name not in {"bounded-scores", "wide-subgroups"})},
            "so low",
        ),
        ({"inputs": ", float[1, 4, s, total] given", "added": "{seen} added = Identity(given)"}, {}, "a caller feeds"),
    ],
    ids=["a fill near the bias", "scores that may be anything", "a bias that is an input"],
)
def test_a_bias_that_may_mask_whole_rows_keeps_the_cache(traits: dict[str, Any], choices: dict[str, Any], said: str) -> None:
    assert shared(_decoder(_TEXT_POSITIONS)).report.decoder is not None
    result = shared(_decoder(**({"added": _TEXT_POSITIONS} | traits)), **choices)
    assert result.report.decoder is None
    assert any(said in reason.message for site in result.report.sites for reason in site.reasons)


def test_on_a_provider_that_is_not_known_to_add_it_the_cache_is_as_it_was() -> None:
    added = _DISTANCES.replace(
        "added = Unsqueeze(turned, zeros)", "added32 = Unsqueeze(turned, zeros) added = Cast<to=10>(added32)"
    )
    model = _decoder(added, dtype="float16")
    next(item for item in model.graph.initializer if item.name == "fill32").CopyFrom(
        onnx.numpy_helper.from_array(np.float32(-60000), "fill32")
    )
    assert shared(model).report.decoder is not None
    result = shared(model, ep="cuda", arch="sm90")
    assert result.report.decoder is None
    assert any(
        "a bias together with lengths on cuda" in reason.message for site in result.report.sites for reason in site.reasons
    )
