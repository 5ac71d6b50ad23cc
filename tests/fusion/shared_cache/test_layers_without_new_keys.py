"""Layers that read the keys and values of an earlier layer, as the last ones of Gemma 3n and Gemma 4 do: one buffer for both."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import pytest

from tests.support.decoder_loops import assert_serves, shared
from tests.support.decoders import PADDED, UNPADDED, WINDOWED, decoder

_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}


def _following(*parts: str, **traits: Any) -> onnx.ModelProto:
    """A decoder whose second layer reads some of what the first one put together, and has no cache for that."""
    model = decoder(**traits)
    graph, gone = model.graph, {f"{where}_{part}_1" for part in parts for where in ("past", "present")}
    for node in graph.node:
        if node.op_type == "Unsqueeze" and node.input[0] in gone:
            node.input[0] = f"{node.input[0][:-1]}0"
    for values in (graph.input, graph.output):
        kept = [value for value in values if value.name not in gone]
        del values[:]
        values.extend(kept)
    nodes = [node for node in graph.node if not gone & set(node.output)]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


_shared = functools.partial(shared, onnxruntime="1.32")


@pytest.mark.newest
@pytest.mark.parametrize("padding", _PADDINGS)
@pytest.mark.parametrize("given", [True, False], ids=["positions are given", "positions are counted"])
def test_it_reads_the_buffer_without_new_keys(padding: str, *, given: bool) -> None:
    model = _following("key", "value", given=given)
    result = _shared(model)
    first, second = (node for node in result.model.graph.node if node.op_type == "GroupQueryAttention")
    assert (len(first.output), len(second.output)) == (3, 1)
    assert list(second.input[3:5]) == list(first.output[1:])
    found = result.report.decoder
    assert found is not None
    assert (found.layers, found.past_keys, found.present_values) == (1, ("past_key_values.0.key",), ("present.0.value",))
    assert_serves(model, result, _PADDINGS[padding], (1, 1, 1))


@pytest.mark.newest
@pytest.mark.parametrize("traits", [{"seen": WINDOWED}, {"seen": UNPADDED, "given": False}], ids=["a window", "no mask"])
def test_windows_and_models_without_a_mask(traits: dict[str, Any]) -> None:
    model = _following("key", "value", **traits)
    result = _shared(model)
    assert_serves(model, result, _PADDINGS["none"], (1, 1, 1))
    assert_serves(model, result, [[1, 1, 1]], (3, 1, 2))


@pytest.mark.newest
def test_the_buffer_is_not_quantised() -> None:
    result = _shared(_following("key", "value"), kv_cache="int8")
    assert any("without new keys, which is not quantised" in note for note in result.report.notes)
    assert_serves(_following("key", "value"), result, _PADDINGS["left"], (1, 1))


@pytest.mark.parametrize(
    ("parts", "choices", "said"),
    [
        (("key", "value"), {"onnxruntime": "1.30"}, "is not known to without new ones"),
        (("key",), {}, "append to the same past keys or values"),
        (("value",), {}, "append to the same past keys or values"),
    ],
    ids=["an older ONNX Runtime", "values of its own", "keys of its own"],
)
def test_near_misses_keep_their_cache(parts: tuple[str, ...], choices: dict[str, Any], said: str) -> None:
    result = _shared(_following(*parts), verify="none", **choices)
    assert result.report.decoder is None
    assert any(said in reason.message for site in result.report.sites for reason in site.reasons), result.report.notes


def test_a_layer_that_appends_its_own_to_the_same_past_keeps_the_cache() -> None:
    model = decoder(seen=PADDED)
    for node in model.graph.node:
        if node.op_type == "Concat":
            node.input[:] = [f"{name[:-1]}0" if name.startswith("past_") else name for name in node.input]
    result = _shared(model, verify="none")
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"cache-used"}
