"""Caches that do not lie as (batch, heads, positions, channels), or of which keys and values are one input, as a buffer."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import assert_same_at_tokens, buffered, grown, steps
from tests.support.decoders import UNPADDED, decoder
from tests.support.interfaces import Interface, turned

_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_GPT2 = pathlib.Path(__file__).parent / "exports" / "gpt2_past__ts17__eager.onnx"
_PADDINGS = {"none": [[1] * 6] * 2, "left": [[0, 0, 1, 1, 1, 1], [1] * 6], "holes": [[1, 0, 1, 1, 0, 1], [1] * 6]}


def _flat(path: pathlib.Path) -> onnx.ModelProto:
    """Every cache (batch, positions, heads times channels)."""
    made = Interface(path)
    for item in (*made.pasts, *made.presents):
        batch, heads, positions, channels = made.dims(item)
        assert isinstance(heads, int)
        assert isinstance(channels, int)
        front, name = item in made.pasts, f"{item.name}_flat"
        made.replace([item], name, [batch, positions, heads * channels])
        if front:
            made.node("Reshape", [name, made.number(f"{name}_shape", 0, 0, heads, channels)], f"{name}_wide")
            made.node("Transpose", [f"{name}_wide"], item.name, perm=[0, 2, 1, 3])
        else:
            made.node("Transpose", [item.name], f"{name}_wide", front=False, perm=[0, 2, 1, 3])
            made.node("Reshape", [f"{name}_wide", made.number(f"{name}_shape", 0, 0, -1)], name, front=False)
    return made.done()


def _stacked(path: pathlib.Path) -> onnx.ModelProto:
    """Keys and values of each layer as one input and one output (2, batch, heads, positions, channels)."""
    made = Interface(path)
    first = made.number("first_axis", 0)
    for layer in range(len(made.pasts) // 2):
        pair = made.pasts[2 * layer : 2 * layer + 2]
        made.replace(pair, f"past_{layer}", [2, *made.dims(pair[0])])
        for place, item in enumerate(pair):
            made.node("Gather", [f"past_{layer}", _scalar(made, f"{item.name}_place", place)], item.name, axis=0)
        pair = made.presents[2 * layer : 2 * layer + 2]
        made.replace(pair, f"present_{layer}", [2, *made.dims(pair[0])])
        for item in pair:
            made.node("Unsqueeze", [item.name, first], f"{item.name}_row", front=False)
        made.node("Concat", [f"{item.name}_row" for item in pair], f"present_{layer}", front=False, axis=0)
    return made.done()


def _wide_mask(path: pathlib.Path) -> onnx.ModelProto:
    """The mask (batch, 1, 1, positions), as models for a fixed attention have it."""
    made = Interface(path)
    mask = next(item for item in made.model.graph.input if item.name == "attention_mask")
    batch, positions = made.dims(mask)
    for node in made.model.graph.node:
        node.input[:] = ["whole_numbers" if name == mask.name else name for name in node.input]
    made.replace([mask], mask.name, [batch, 1, 1, positions], onnx.TensorProto.BOOL)
    made.node("Squeeze", [mask.name, made.number("between", 1, 2)], "truth")
    made.node("Cast", ["truth"], "whole_numbers", to=onnx.TensorProto.INT64)
    return made.done()


def _scalar(made: Interface, name: str, number: int) -> str:
    made.model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [], [number]))
    return name


_LAYOUTS: dict[str, Callable[[pathlib.Path], onnx.ModelProto]] = {
    "b t n h": turned(0, 2, 1, 3),
    "t b n h": turned(2, 0, 1, 3),
    "b n h t": turned(0, 1, 3, 2),
    "b t (n h)": _flat,
    "2 b n t h": _stacked,
    "mask b 1 1 t": _wide_mask,
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("path", [_LLAMA, _GPT2], ids=lambda path: path.stem)
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_what_is_served_gives_what_the_source_does(layout: str, path: pathlib.Path) -> None:
    result = onnx_attnfuse.optimize(_LAYOUTS[layout](path), ep="cpu", cache="shared")
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert any("cache layout changed" in note for note in result.report.notes)
    onnx.checker.check_model(result.model)
    assert found.past_keys == ("past_key_values.0.key", "past_key_values.1.key")
    shapes = {item.name: Interface.dims(item) for item in result.model.graph.input}
    assert shapes[found.past_values[1]][1:] == [found.kv_heads, "max_sequence_length", found.head_size]
    assert all(shapes[name][0] == shapes[found.input_ids][0] for name in found.past_keys)
    for padding in _PADDINGS.values():
        fed = steps(padding, (1, 1, 1))
        assert_same_at_tokens(grown(onnx.load(path), found, fed), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("layout", [name for name in _LAYOUTS if "mask" not in name])
def test_the_interface_stays_where_the_cache_does_not_become_a_buffer(layout: str) -> None:
    """An output of the earlier keys themselves: somebody looks at them."""
    model = _LAYOUTS[layout](_LLAMA)
    given = next(item for item in model.graph.input if "past" in item.name)
    before = [item.name for item in model.graph.input]
    model.graph.node.append(onnx.helper.make_node("ReduceMax", [given.name], ["largest"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("largest", onnx.TensorProto.FLOAT, []))
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared")
    assert result.report.decoder is None
    assert [item.name for item in result.model.graph.input] == before
    assert result.report.fused == 2


def test_an_output_that_has_the_keys_twice_stays() -> None:
    model = _stacked(_LLAMA)
    node = next(node for node in model.graph.node if node.output[0] == "present_0")
    node.input.append(node.input[0])
    model.graph.output[1].type.tensor_type.shape.dim[0].dim_value = 3
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared")
    assert result.report.decoder is None


def test_operators_with_a_past_are_spelled_out_first() -> None:
    model = decoder(seen=UNPADDED)
    fused = onnx_attnfuse.optimize(model, ep="cpu", target="onnx.Attention")
    assert [site.op for site in fused.report.sites] == ["Attention"] * 2
    result = onnx_attnfuse.optimize(fused.model, ep="cpu", cache="shared")
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert "decomposed, so that their cache can be one buffer: 2 ai.onnx.Attention" in result.report.notes
    fed = steps(_PADDINGS["none"], (1, 1, 1))
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


def test_a_buffer_that_is_one_already_stays() -> None:
    once = onnx_attnfuse.optimize(onnx.load(_LLAMA), ep="cpu", cache="shared").model
    again = onnx_attnfuse.optimize(once, ep="cpu", cache="shared")
    assert again.report.decoder is None
    assert any("start from the model as it was exported" in note for note in again.report.notes)
    assert [node.op_type for node in again.model.graph.node] == [node.op_type for node in once.graph.node]
