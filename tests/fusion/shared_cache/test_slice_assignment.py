"""Caches of a fixed length written as `cache[:, :, p : p + s] = new`: a ScatterND at the places of a Slice, by TorchScript."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS
from tests.support.decoder_loops import Array, Fed, assert_same_at_tokens, buffered, operators, session, steps

_EXPORT = pathlib.Path(__file__).parent / "static_exports" / "by_hand" / "decoder_sliced__ts17.onnx"
"""Two layers written by hand in PyTorch: `cache[:, :, p : p + s] = k`, rows p to p + s, a mask (b, length of the buffer)."""
_LENGTH = 32
_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}


def _shared(model: onnx.ModelProto, **choices: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", **choices})


def _written(model: onnx.ModelProto, fed: list[Fed]) -> list[Array]:
    """The logits of the source in each step, with buffers that begin with numbers of no meaning."""
    started, rng, batch = session(model), np.random.default_rng(2), len(fed[0].tokens)
    pasts = [given for given in started.get_inputs() if len(given.shape) == 4]
    shapes = {given.name: (batch, given.shape[1], _LENGTH, given.shape[3]) for given in pasts}
    cache = {name: (7 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    logits: list[Array] = []
    for step in fed:
        total, new = step.mask.shape[1], step.tokens.shape[1]
        mask = np.pad(step.mask, ((0, 0), (0, _LENGTH - total)))
        feeds = {"input_ids": step.tokens, "attention_mask": mask, "cache_position": np.array(total - new)}
        found = started.run(["logits", *(name.replace("past", "present") for name in cache)], feeds | cache)
        logits.append(found[0])
        cache = dict(zip(cache, found[1:], strict=True))
    return logits


@pytest.mark.parametrize("padding", _PADDINGS)
def test_what_is_written_to_a_slice_is_a_buffer_of_any_length(padding: str) -> None:
    model = onnx.load(_EXPORT)
    result = _shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all("indices-in-range" in site.assumptions and site.verified is not None for site in result.report.sites)
    assert "cache_position" not in {item.name for item in result.model.graph.input}
    assert not {"ScatterND", "Expand"} & operators(result.model)
    fed = steps(_PADDINGS[padding], (1, 1, 1))
    assert_same_at_tokens(_written(model, fed), buffered(result.model, found, fed, room=40), fed)


def test_several_tokens_are_added_at_once() -> None:
    model = onnx.load(_EXPORT)
    result = _shared(model)
    found = result.report.decoder
    assert found is not None
    fed = steps([[1, 1, 1, 1]], (3, 1, 2, 1))
    assert_same_at_tokens(_written(model, fed), buffered(result.model, found, fed), fed)


def test_without_the_assumption_that_ranges_are_inside_of_the_buffer_it_stays() -> None:
    names = [name for name in ASSUMPTIONS if name not in {"indices-in-range", "wide-subgroups"}]
    assert _shared(onnx.load(_EXPORT), assume=names).report.decoder is None


@pytest.mark.parametrize(("what", "by"), [("start and end", 1), ("end", 1)])
def test_what_is_written_elsewhere_than_at_the_position_stays(what: str, by: int) -> None:
    """One place further on, or a slice that is longer than what is written, in the first of the two layers."""
    model = onnx.load(_EXPORT)
    graph = model.graph
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([by]), "further"))
    first = next(
        node for node in graph.node if node.op_type == "Slice" and node.input[0] != "past_key_0" and _is_of_range(graph, node)
    )
    for place in (1, 2) if what == "start and end" else (2,):
        moved = f"moved_{place}"
        graph.node.insert(list(graph.node).index(first), onnx.helper.make_node("Add", [first.input[place], "further"], [moved]))
        first.input[place] = moved
    assert _shared(model).report.decoder is None


def _is_of_range(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    return any(item.op_type == "Range" and item.output[0] == node.input[0] for item in graph.node)
