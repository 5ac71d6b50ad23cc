"""Decoders with and without a past that an `If` merges: the one with a past is made one with a buffer, judged by both."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx_attnfuse
from tests.support.decoder_loops import Fed, assert_same_at_tokens, buffered, session, steps
from tests.support.decoders import PADDED, UNPADDED, decoder

_EXPORT = pathlib.Path(__file__).parent / "exports" / "merged" / "llama_merged__ts17__sdpa.onnx"
_PADDINGS = {
    "none": [[1] * 6] * 2,
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 1, 0, 0], [1] * 6],
}
_PASTS = [f"past_{part}_{layer}" for layer in range(2) for part in ("key", "value")]
_EMPTY = """<ir_version: 9, opset_import: ["" : 18]> empty (int64[b, s] input_ids) => (float[b, 2, past, 16] past)
   <int64[3] rest = {2, 0, 16}> {
   entries = Shape<start=0, end=1>(input_ids) sizes = Concat<axis=0>(entries, rest) past = ConstantOfShape(sizes) }"""


def _merged(
    model: onnx.ModelProto, *, flag: tuple[int, ...] = (1,), past_where: bool = True, same: bool = True
) -> onnx.ModelProto:
    """The form that Optimum gives two decoders: inputs and weights outside, one `If` whose branches are the decoders.

    Args:
        model: The decoder with a past.
        flag: The shape of the input that chooses.
        past_where: What it is where there is a past.
        same: The decoder without a past gives what the other gives with an empty one; else twice the logits.
    """
    with_past = onnx.helper.make_graph(list(model.graph.node), "with_past", [], list(model.graph.output))
    empty = onnx.parser.parse_model(_EMPTY)
    made = list(empty.graph.node)
    made += [onnx.helper.make_node("Identity", ["past"], [f"none_{name}"]) for name in _PASTS]
    for node in model.graph.node:
        copied = onnx.NodeProto.FromString(node.SerializeToString())
        for place, name in enumerate(copied.input):
            if name in _PASTS:
                copied.input[place] = f"none_{name}"
        made.append(copied)
    if not same:
        last = next(node for node in made if "logits" in node.output)
        last.output[0] = "plain"
        made.append(onnx.helper.make_node("Add", ["plain", "plain"], ["logits"]))
    without = onnx.helper.make_graph(made, "no_past", [], list(model.graph.output), initializer=list(empty.graph.initializer))
    branches = {"then_branch": with_past, "else_branch": without}
    if not past_where:
        branches = {"then_branch": without, "else_branch": with_past}
    names = [item.name for item in model.graph.output]
    merged = onnx.ModelProto.FromString(model.SerializeToString())
    del merged.graph.node[:]
    merged.graph.node.append(onnx.helper.make_node("If", ["use_cache_branch"], names, "merged", **branches))
    merged.graph.input.append(onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, flag))
    onnx.checker.check_model(merged)
    return merged


def _generated(model: onnx.ModelProto, fed: list[Fed], *, past_where: bool = True) -> list[np.ndarray]:
    """The logits of a merged decoder, called as Optimum calls it: for a prompt a past of one position stands in."""
    started: onnxruntime.InferenceSession = session(model)
    (shape,) = (given.shape for given in started.get_inputs() if given.name == "use_cache_branch")
    names = {given.name for given in started.get_inputs()}
    (heads, size) = next((given.shape[1], given.shape[3]) for given in started.get_inputs() if given.name == _PASTS[0])
    cache = {name: np.ones((len(fed[0].tokens), heads, 1, size), np.float32) for name in _PASTS}
    logits: list[np.ndarray] = []
    for index, step in enumerate(fed):
        flag = np.full(shape, (index > 0) == past_where)
        feeds = {"input_ids": step.tokens, "attention_mask": step.mask, "position_ids": step.positions, "use_cache_branch": flag}
        found = started.run(["logits", *(name.replace("past", "present") for name in _PASTS)], {
            name: array for name, array in (feeds | cache).items() if name in names
        })  # fmt: skip
        logits.append(found[0])
        cache = dict(zip(_PASTS, found[1:], strict=True))
    return logits


def _shared(model: onnx.ModelProto) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, ep="cpu", cache="shared")


@pytest.mark.parametrize("padding", _PADDINGS)
@pytest.mark.parametrize("past_where", [True, False])
def test_the_decoder_with_a_past_gives_what_both_give(padding: str, *, past_where: bool) -> None:
    model = _merged(decoder(), past_where=past_where)
    result = _shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all(site.verified is not None for site in result.report.sites)
    assert "If" not in {node.op_type for node in result.model.graph.node}
    assert "use_cache_branch" not in {item.name for item in result.model.graph.input}
    assert any("removed the input 'use_cache_branch'" in note for note in result.report.notes)
    fed = steps(_PADDINGS[padding], (1, 1, 1))
    assert_same_at_tokens(_generated(model, fed, past_where=past_where), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("padding", _PADDINGS)
def test_what_optimum_merges_of_two_real_exports(padding: str) -> None:
    """A tiny Llama of transformers with and without a past, exported by TorchScript, and `merge_decoders` of optimum-onnx 0.1."""
    model = onnx.load(_EXPORT)
    result = _shared(model)
    found = result.report.decoder
    assert found is not None, result.report.notes
    assert "If" not in {node.op_type for node in result.model.graph.node}
    fed = steps(_PADDINGS[padding], (1, 1, 1))
    assert_same_at_tokens(_generated(model, fed), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("flag", [(), (1,)])
def test_the_input_that_chooses_may_have_an_axis(flag: tuple[int, ...]) -> None:
    assert _shared(_merged(decoder(seen=UNPADDED), flag=flag)).report.decoder is not None


def test_shapes_of_inputs_may_be_those_of_the_decoder_without_a_past() -> None:
    """Its mask is as long as the new tokens, and Optimum takes what it finds first."""
    model = _merged(decoder())
    mask = next(item for item in model.graph.input if item.name == "attention_mask")
    mask.type.tensor_type.shape.dim[1].dim_param = "s"
    assert _shared(model).report.decoder is not None


def test_a_decoder_without_a_past_that_gives_something_else_is_seen() -> None:
    model = _merged(decoder(), same=False)
    result = _shared(model)
    assert result.report.decoder is None
    assert any("was tried alone: the cache is as it was" in note and "'logits' differs" in note for note in result.report.notes)
    assert "If" in {node.op_type for node in result.model.graph.node}
    assert [item.name for item in result.model.graph.input] == [item.name for item in model.graph.input]


def test_what_reads_an_input_of_its_own_in_each_branch_is_left() -> None:
    """As in encoder-decoders, where what the encoder made is read without a past, and keys and values of it with one."""
    model = _merged(decoder(seen=PADDED))
    without = next(item.g for item in model.graph.node[0].attribute if item.name == "else_branch")
    last = next(node for node in without.node if "logits" in node.output)
    last.output[0] = "plain"
    without.node.append(onnx.helper.make_node("Add", ["plain", "encoded"], ["logits"]))
    model.graph.input.append(onnx.helper.make_tensor_value_info("encoded", onnx.TensorProto.FLOAT, ["b", 1, 99]))
    result = _shared(model)
    assert result.report.decoder is None
    assert [note for note in result.report.notes if "in branches of 'merged'" in note] == [
        "the cache is as it was: attentions are in branches of 'merged', as where decoders with and without a past are merged; "
        "export only the one with a past"
    ]
