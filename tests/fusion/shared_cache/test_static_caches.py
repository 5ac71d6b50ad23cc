"""Decoders that write into a cache of a fixed length: what they give with a buffer of any length, and what is left as it was."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion.shared_cache import lengths, share
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.serving.decoder import ServedDecoder
from tests.support.decoder_loops import Array, Fed, assert_same_at_tokens, buffered, named, session, steps
from tests.support.decoders import decoder
from tests.support.interfaces import turned

_EXPORTS = sorted((pathlib.Path(__file__).parent / "static_exports").glob("*.onnx"))
"""Exports by `python -m models.export --only NAME`, without the lines of Python that nodes are from."""
_LENGTH = 32
_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
    "holes": [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6],
}


def _shared(model: onnx.ModelProto, **choices: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", **choices})


def _exported(name: str = "gpt2_static__dyn18__sdpa") -> onnx.ModelProto:
    return onnx.load(next(path for path in _EXPORTS if path.stem == name))


def _written(model: onnx.ModelProto, served: ServedDecoder, fed: Sequence[Fed]) -> list[Array]:
    """The logits of the source in each step, with buffers that begin with numbers of no meaning."""
    started = session(model)
    rng, batch, outputs = np.random.default_rng(2), len(fed[0].tokens), [item.name for item in started.get_outputs()]
    cache = {
        given.name: (7 * rng.standard_normal((batch, given.shape[1], _LENGTH, given.shape[3]))).astype(np.float32)
        for given in started.get_inputs()
        if len(given.shape) == 4
    }
    rest = {given.name: given.shape for given in started.get_inputs() if len(given.shape) != 4}
    logits: list[Array] = []
    for step in fed:
        total, new = step.mask.shape[1], step.tokens.shape[1]
        mask = np.pad(step.mask, ((0, 0), (0, _LENGTH - total)))
        feeds = {**named(served, step), "attention_mask": mask, "cache_position": np.arange(total - new, total)}
        found = dict(zip(outputs, started.run(outputs, {name: feeds[name] for name in rest} | cache), strict=True))
        logits.append(found[served.logits])
        cache = dict(zip(cache, [array for name, array in found.items() if name.startswith("present")], strict=True))
    return logits


def _assert_serves(model: onnx.ModelProto, result: onnx_attnfuse.Result, padding: list[list[int]], more: tuple[int, ...]) -> None:
    found = result.report.decoder
    assert found is not None, result.report.notes
    fed = steps(padding, more)
    assert_same_at_tokens(_written(model, found, fed), buffered(result.model, found, fed), fed)


def test_the_exports_are_those_that_were_meant() -> None:
    assert [path.stem for path in _EXPORTS] == [
        "gemma2_static__dyn18__eager",
        "gpt2_static__dyn18__sdpa",
        "llama_static__ts17__eager",
    ]


@pytest.mark.parametrize("path", _EXPORTS, ids=lambda path: path.stem)
def test_real_exports_give_the_same_in_a_loop(path: pathlib.Path) -> None:
    model = onnx.load(path)
    result = _shared(model)
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all(site.verified is not None for site in result.report.sites)
    for name, padding in _PADDINGS.items():
        if not path.stem.startswith("gemma2") or name in {"none", "left"}:
            _assert_serves(model, result, padding, (1, 1, 1))
    _assert_serves(model, result, [[1, 1, 1, 1]], (3, 1, 2, 1))


@pytest.mark.parametrize("path", [path for path in _EXPORTS if not path.stem.startswith("gemma2")], ids=lambda path: path.stem)
@pytest.mark.parametrize("perm", [(0, 2, 1, 3), (2, 0, 1, 3)], ids=["b t n h", "t b n h"])
def test_buffers_in_another_layout_are_laid_out_anew(path: pathlib.Path, perm: tuple[int, ...]) -> None:
    result = _shared(turned(*perm)(path))
    assert any("cache layout changed" in note for note in result.report.notes)
    for padding in _PADDINGS.values():
        _assert_serves(onnx.load(path), result, padding, (1, 1))


def test_the_interface_is_that_of_a_cache_that_grew() -> None:
    result = _shared(_exported("llama_static__ts17__eager"))
    found = result.report.decoder
    assert found is not None
    assert [item.name for item in result.model.graph.input] == [
        "input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value", "past_key_values.1.key",
        "past_key_values.1.value",
    ]  # fmt: skip
    shapes = {
        item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in result.model.graph.input
    }
    assert shapes["past_key_values.0.key"] == ["batch", 2, "max_sequence_length", 8]
    assert shapes["attention_mask"] == ["batch", "total_sequence_length"]
    assert {site.mask for site in result.report.sites} == {"padding_causal_bottom_right"}
    onnx.checker.check_model(result.model)


@pytest.mark.parametrize("path", _EXPORTS, ids=lambda path: path.stem)
def test_a_buffer_may_be_longer_than_that_of_the_source(path: pathlib.Path) -> None:
    result = _shared(onnx.load(path))
    found = result.report.decoder
    assert found is not None
    fed = steps([[1] * 30] * 2, (1,) * 5)
    assert [array.shape[1] for array in buffered(result.model, found, fed, room=40)] == [30, 1, 1, 1, 1, 1]


def test_windows_and_soft_caps_go_into_the_operator() -> None:
    result = _shared(_exported("gemma2_static__dyn18__eager"))
    nodes = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    attributes = [{item.name: onnx.helper.get_attribute_value(item) for item in node.attribute} for node in nodes]
    assert [found["local_window_size"] for found in attributes] == [4, -1]
    assert [found["softcap"] for found in attributes] == [5.0, 5.0]


def test_a_mask_that_is_read_elsewhere_is_as_long_as_the_buffer_there() -> None:
    model = _exported()
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["attention_mask"], ["tokens"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, []))
    model.graph.node.append(onnx.helper.make_node("Shape", ["attention_mask"], ["whole"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("whole", onnx.TensorProto.INT64, [2]))
    result = _shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    past = np.zeros((1, found.kv_heads, 40, found.head_size), np.float32)
    feeds = dict.fromkeys((*found.past_keys, *found.past_values), past)
    feeds |= {"input_ids": np.array([[5, 7, 9]]), "attention_mask": np.array([[0, 1, 1]])}
    tokens, whole = session(result.model).run(["tokens", "whole"], feeds)
    assert (int(tokens), whole.tolist()) == (2, [1, _LENGTH])


def _by_tensor_scatter(model: onnx.ModelProto, first: str) -> None:
    """New keys and values are written by the operator of opset 24, `first` a value (b) with the first place of each entry."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    for place, write in enumerate(_of(model, "ScatterND")):
        (present,) = (node for node in model.graph.node if write.output[0] in node.input)
        past, turned = made_by[write.input[0]].input[0], f"new{place}"
        new = onnx.helper.make_node("Transpose", [write.input[2]], [turned], perm=[1, 2, 0, 3])
        written = onnx.helper.make_node(
            "TensorScatter", [past, turned, first], list(present.output), axis=2, name=f"write{place}"
        )
        at = list(model.graph.node).index(present)
        model.graph.node.remove(present)
        model.graph.node.insert(at, written)
        model.graph.node.insert(at, new)
        model.graph.node.remove(write)
    model.opset_import[0].version = 24


def _first_of_all(model: onnx.ModelProto) -> None:
    """The place of the first new entry, the same for all entries of the batch."""
    batch = onnx.helper.make_node("Shape", ["input_ids"], ["entries"], start=0, end=1)
    model.graph.node.insert(0, onnx.helper.make_node("Expand", ["first", "entries"], ["places"]))
    model.graph.node.insert(0, onnx.helper.make_node("Gather", ["cache_position", "zeroth"], ["first"]))
    model.graph.node.insert(0, batch)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "zeroth"))


def test_a_cache_that_tensor_scatter_writes() -> None:
    model = _exported()
    _first_of_all(model)
    _by_tensor_scatter(model, "places")
    result = _shared(model)
    assert [(site.op, site.verified is None) for site in result.report.sites] == [("GroupQueryAttention", False)] * 2
    for padding in _PADDINGS.values():
        _assert_serves(_exported(), result, padding, (1, 1))


def test_a_cache_with_places_of_their_own_for_each_entry_is_left_as_it_was() -> None:
    model = _exported()
    model.graph.input.append(onnx.helper.make_tensor_value_info("places", onnx.TensorProto.INT64, ["batch"]))
    _by_tensor_scatter(model, "places")
    result = _shared(model)
    assert result.report.decoder is None
    assert "cache-kept" in {reason.code for site in result.report.sites for reason in site.reasons}


def test_what_differs_in_the_loop_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer whose lengths are one too short, as a mistake of ours would make them."""
    whole = lengths.read_lengths

    def shorter(builder: Builder, *given: Any, **named: Any) -> lengths.Lengths:
        found = whole(builder, *given, **named)
        one = builder.constant(np.asarray(1, np.int32))
        last = builder.elementwise("Sub", [found.buffered.last, one], ir.DataType.INT32)
        return dataclasses.replace(found, buffered=dataclasses.replace(found.buffered, last=last))

    monkeypatch.setattr(share, "read_lengths", shorter)
    model = _exported()
    result = _shared(model)
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"differs"}
    assert result.report.differing == 1
    assert [item.name for item in result.model.graph.input] == [item.name for item in model.graph.input]
    _assert_same_model(model, result.model)


def _assert_same_model(model: onnx.ModelProto, other: onnx.ModelProto) -> None:
    rng = np.random.default_rng(4)
    feeds: dict[str, Array] = {"input_ids": rng.integers(2, 99, (2, 3)), "cache_position": np.arange(4, 7)}
    feeds["attention_mask"] = (np.arange(_LENGTH)[None] < 7).repeat(2, 0).astype(np.int64)
    started = session(model)
    for given in started.get_inputs():
        if given.name not in feeds:
            feeds[given.name] = rng.standard_normal((2, *given.shape[1:])).astype(np.float32)
    feeds = {given.name: feeds[given.name] for given in started.get_inputs()}
    for left, right in zip(started.run(None, feeds), session(other).run(None, feeds), strict=True):
        np.testing.assert_allclose(right, left, atol=2e-4, rtol=1e-3)


def _of(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op]


def _later(model: onnx.ModelProto, writes: slice) -> None:
    """Entries are written one position further than the mask and the caller take them to be."""
    one = onnx.numpy_helper.from_array(np.array(1), "one_more")
    model.graph.initializer.append(one)
    for place, node in enumerate(_of(model, "ScatterND")[writes]):
        moved = onnx.helper.make_node("Add", [node.input[1], "one_more"], [f"later{place}"])
        node.input[1] = f"later{place}"
        model.graph.node.insert([item.output[0] for item in model.graph.node].index(node.output[0]), moved)


def _keys_and_values_later(model: onnx.ModelProto) -> None:
    _later(model, slice(None))


def _values_later(model: onnx.ModelProto) -> None:
    _later(model, slice(1, None, 2))


def _without_itself(model: onnx.ModelProto) -> None:
    (node,) = _of(model, "LessOrEqual")
    node.op_type = "Less"


def _beyond_itself(model: onnx.ModelProto) -> None:
    (node,) = _of(model, "LessOrEqual")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "one_more"))
    place = [item.output[0] for item in model.graph.node].index(node.output[0])
    model.graph.node.insert(place, onnx.helper.make_node("Add", [node.input[1], "one_more"], ["next"]))
    node.input[1] = "next"


def _values_read_before_they_are_written(model: onnx.ModelProto) -> None:
    """The first attention takes its values from the buffer as it came in."""
    for node in model.graph.node:
        node.input[:] = ["past_value_0" if name == "present_value_0" else name for name in node.input]


def _all_read_before_it_is_written(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.input[:] = [name.replace("present", "past") if name.endswith("_0") else name for name in node.input]


def _given_out_elsewhere(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["present_value_1"], ["total"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))


def _past_used_elsewhere(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.helper.make_node("ReduceSum", ["past_key_0"], ["total"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("total", onnx.TensorProto.FLOAT, []))


def _added_to(model: onnx.ModelProto) -> None:
    for node in _of(model, "ScatterND"):
        node.attribute.append(onnx.helper.make_attribute("reduction", "add"))


def _no_output(model: onnx.ModelProto) -> None:
    kept = [item for item in model.graph.output if item.name != "present_key_1"]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def _of_the_model(model: onnx.ModelProto) -> None:
    """A buffer that is a weight, as where it is registered with the module."""
    kept = [item for item in model.graph.input if item.name != "past_key_1"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((2, 4, _LENGTH, 8), np.float32), "past_key_1"))


_NEAR_MISSES: dict[Callable[[onnx.ModelProto], None], str] = {
    _keys_and_values_later: "cache-kept",
    _values_later: "cache-kept",
    _without_itself: "cache-kept",
    _beyond_itself: "cache-kept",
    _values_read_before_they_are_written: "cache-kept",
    _all_read_before_it_is_written: "cache-kept",
    _given_out_elsewhere: "cache-used",
    _past_used_elsewhere: "cache-used",
    _added_to: "cache-kept",
    _no_output: "cache-kept",
    _of_the_model: "cache-kept",
}


@pytest.mark.parametrize("spoil", _NEAR_MISSES, ids=lambda spoil: spoil.__name__.strip("_"))
def test_near_misses_are_left_as_they_were(spoil: Callable[[onnx.ModelProto], None]) -> None:
    model = _exported()
    spoil(model)
    result = _shared(model)
    assert result.report.decoder is None
    assert _NEAR_MISSES[spoil] in {reason.code for site in result.report.sites for reason in site.reasons}
    assert any(note.startswith("the cache is as it was: ") for note in result.report.notes)
    assert [item.name for item in result.model.graph.output] == [item.name for item in model.graph.output]
    _assert_same_model(model, result.model)


_IN_PLACE = """heads = Unsqueeze(y0, first) keys = ScatterND(heads, corner, nought) turned = Transpose<perm=[0, 1, 3, 2]>(keys)
   products = MatMul(heads, turned) mixing = Softmax<axis=-1>(products) mixed = MatMul(mixing, heads)
   next = Squeeze(mixed, first)"""


def test_keys_that_are_changed_in_place_and_are_no_buffer_keep_no_other_cache() -> None:
    model = decoder(between=_IN_PLACE)
    for name, array in {"corner": np.zeros((1, 4), np.int64), "nought": np.zeros(1, np.float32)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result = _shared(model, padding="assume-none")
    assert result.report.decoder is not None, result.report.notes
    assert result.report.decoder.layers == 2
