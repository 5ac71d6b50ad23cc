"""The cache of a decoder as one buffer: what it gives in a loop, with padding anywhere, and what is left as it was."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.fusion.shared_cache import lengths, share
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS
from onnx_attnfuse.graph.build import Builder
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import assert_same_at_tokens, assert_serves, buffered, grown, session, shared, steps
from tests.support.decoders import LOGITS, PADDED, SINKS, UNPADDED, WINDOWED, decoder

_EXPORTS = sorted((pathlib.Path(__file__).parent / "exports").glob("*.onnx"))
"""Exports by `python -m models.export --only NAME`, without the lines of Python that nodes are from."""
_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_WINDOWED = ("mistral", "gemma2")
_FULL, _LEFT, _RIGHT = [[1] * 6] * 2, [[0, 0, 1, 1, 1, 1], [1] * 6], [[1, 1, 1, 1, 0, 0], [1] * 6]
_HOLES = [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1], [1] * 6]
_PADDINGS = {"none": _FULL, "left": _LEFT, "right": _RIGHT, "holes": _HOLES}


@pytest.mark.parametrize("path", [_LLAMA, *_EXPORTS], ids=lambda path: path.stem)
def test_real_exports_give_the_same_in_a_loop(path: pathlib.Path) -> None:
    model = onnx.load(path)
    result = shared(model)
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all("shared buffer" in (site.mask_form or "") for site in result.report.sites)
    assert "If" not in {node.op_type for node in result.model.graph.node}
    windowed = path.stem.startswith(_WINDOWED)
    for name, padding in _PADDINGS.items():
        if not windowed or name in {"none", "left"}:
            assert_serves(model, result, padding, (1, 1, 1))
    assert_serves(model, result, [[1, 1, 1, 1]], (3, 1, 2, 1))


def test_the_exports_are_those_that_were_meant() -> None:
    assert [path.stem for path in _EXPORTS] == [
        "gemma2_past__ts17__eager", "gpt2_past__ts17__eager", "llama_past__ts17__sdpa", "mistral_past__dyn18__sdpa",
        "opt_past__ts17__sdpa",
    ]  # fmt: skip


def test_windows_and_soft_caps_go_into_the_operator() -> None:
    result = shared(onnx.load(_EXPORTS[0]))
    nodes = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    attributes = [{item.name: onnx.helper.get_attribute_value(item) for item in node.attribute} for node in nodes]
    assert [found["local_window_size"] for found in attributes] == [4, -1]
    assert [found["softcap"] for found in attributes] == [5.0, 5.0]
    assert result.report.sites[0].assumptions[-2:] == ("padded-rows-unused", "padding-at-the-ends")
    assert result.report.sites[1].assumptions[-1:] == ("padded-rows-unused",)


def test_padding_in_a_mask_that_goes_on_counts_in_no_later_step() -> None:
    """A row that has ended, and is fed padding while others go on."""
    model = onnx.load(_LLAMA)
    result = shared(model)
    fed = steps(_LEFT, (1, 1, 1, 1))
    for step in fed[2:]:
        step.mask[0, 7] = 0
    found = result.report.decoder
    assert found is not None
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


def test_padding_within_tokens_that_are_added_to_a_cache() -> None:
    model = onnx.load(_LLAMA)
    result = shared(model)
    fed = steps([[0, 1, 1, 1]], (4, 1, 3, 1))
    for step in fed[1:]:
        step.mask[0, [5, 7]] = 0
    found = result.report.decoder
    assert found is not None
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)


@pytest.mark.parametrize("given", [True, False], ids=["positions are given", "positions are counted"])
@pytest.mark.parametrize("padding", _PADDINGS)
def test_rotations_are_those_of_the_source(padding: str, *, given: bool) -> None:
    model = decoder(given=given)
    assert_serves(model, shared(model), _PADDINGS[padding], (1, 1, 1))


def test_rotations_go_into_the_operator_where_each_token_has_its_own_position_there() -> None:
    model = decoder(dtype="float16")
    (gpu, cpu) = (shared(model, ep=name, arch="sm90" if name == "cuda" else None) for name in ("cuda", "cpu"))
    assert {site.mask_form for site in gpu.report.sites} == {"GroupQueryAttention causal, shared buffer, do_rotary, packed qkv"}
    assert {site.mask_form for site in cpu.report.sites} == {"GroupQueryAttention causal, shared buffer"}
    assert "RotaryEmbedding" not in {node.op_type for node in gpu.model.graph.node}
    assert all(site.verified is not None for site in (*gpu.report.sites, *cpu.report.sites))


def test_on_a_cpu_they_do_where_positions_count_up_for_all_entries() -> None:
    model = decoder(seen=UNPADDED, given=False)
    result = shared(model)
    assert {site.mask_form for site in result.report.sites} == {"GroupQueryAttention causal, shared buffer, do_rotary"}
    assert_serves(model, result, _FULL, (1, 1))


def test_a_model_without_a_mask_gets_one_that_tells_lengths() -> None:
    model = decoder(seen=UNPADDED, rotated=False)
    result = shared(model)
    found = result.report.decoder
    assert found is not None
    assert found.attention_mask == "attention_mask"
    assert any("an input that was added" in note for note in result.report.notes)
    assert_serves(model, result, _FULL, (1, 1, 1))
    assert_serves(model, result, [[1, 1, 1]], (2, 1))


def test_a_window_counts_tokens() -> None:
    model = decoder(seen=WINDOWED)
    result = shared(model)
    assert {site.mask_form for site in result.report.sites} == {"GroupQueryAttention causal, local_window_size 4, shared buffer"}
    assert_serves(model, result, _LEFT, (1, 1, 1))


@pytest.mark.parametrize("cast", [False, True], ids=["as they are", "cast to the type that they have"])
def test_sinks_go_into_the_operator(cast: bool) -> None:
    more = SINKS["more"].replace("Concat<axis=-1>(masked{i}, wide_sink{i})", "Concat<axis=-1>(masked{i}, same{i})")
    more = more.replace("both{i}", "same{i} = Cast<to=1>(wide_sink{i}) both{i}")
    traits: dict[str, Any] = SINKS | {"more": more} if cast else SINKS
    model = decoder(**traits)
    result = shared(model)
    nodes = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    assert [bool(node.input[11]) for node in nodes] == [True, True]
    for padding in _PADDINGS.values():
        assert_serves(model, result, padding, (1, 1))


def test_a_decoder_of_embeddings() -> None:
    model = decoder(embedded=True)
    result = shared(model)
    found = result.report.decoder
    assert found is not None
    assert (found.input_ids, found.inputs_embeds, found.hidden_size) == ("", "inputs_embeds", 64)
    assert_serves(model, result, _LEFT, (1, 1))


@pytest.mark.parametrize("given", [True, False], ids=["positions are given", "positions are counted"])
@pytest.mark.parametrize("fixed", [{"b": 1}, {"s": 1}, {"total": "past + s"}], ids=str)
def test_axes_of_a_fixed_length_and_a_mask_whose_length_is_a_sum(fixed: dict[str, int | str], *, given: bool) -> None:
    model = decoder(given=given)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            size = fixed.get(dim.dim_param)
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size
    result = shared(model)
    prompt = [[1]] if "s" in fixed else [[0, 1, 1, 0, 1]]
    assert_serves(model, result, prompt, (1, 1) if "s" in fixed else (3, 1))


_EXPERTS = """flat = Reshape(y0, rows_of) one_more = Unsqueeze(flat, zeros) each = Expand(one_more, experts)
   deep = Tanh(each) mean = ReduceMean<keepdims=0>(deep, zeros) whole = Shape(y0) next = Reshape(mean, whole) """
_TURNED = """turned = Transpose<perm=[1, 0, 2]>(y0) deep = Tanh(turned) same = Einsum<equation="ijk->ijk">(deep)
   next = Transpose<perm=[1, 0, 2]>(same) """
_ACROSS = "most = ReduceMax(y0, first) next = Sub(y0, most) "


@pytest.mark.parametrize("between", [_EXPERTS, _TURNED], ids=["experts", "positions first, and what is not known"])
def test_between_attentions_tokens_are_in_any_layout_or_in_the_order_of_the_source(between: str) -> None:
    model = decoder(between=between)
    for name, numbers in {"rows_of": [-1, 64], "experts": [3, 1, 1]}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(numbers), name))
    result = shared(model)
    for padding in _PADDINGS.values():
        assert_serves(model, result, padding, (1, 1))


def test_other_inputs_of_new_tokens_are_rearranged_with_them() -> None:
    model = decoder(inputs=", int64[b, s] segment", between="kind = Gather(kinds, segment) next = Add(y0, kind) ")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(2, 64, dtype=np.float32), "kinds"))
    result = shared(model)
    assert result.report.decoder is not None, result.report.notes
    moved = [node for node in result.model.graph.node if node.op_type == "GatherElements"]
    assert "segment" in {node.input[0] for node in moved}


def test_positions_of_several_kinds_are_fed_and_rearranged() -> None:
    """As multimodal rotations have them: a row of positions for time, height and width."""
    seen = PADDED + " chosen = ReduceMax<keepdims=0>(many, zeros)"
    model = decoder(seen=seen, inputs=", int64[3, b, s] many", given=False)
    for node in model.graph.node:
        node.input[:] = ["chosen" if name == "rows1" else name for name in node.input]
    result = shared(model)
    assert result.report.decoder is not None, result.report.notes
    assert result.report.decoder.position_ids is None


def test_a_model_in_which_tokens_look_at_padding_is_found_to_differ() -> None:
    model = decoder(between=_ACROSS)
    result = shared(model)
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"differs"}
    assert result.report.differing == 1
    assert_serves(model, shared(model, padding="assume-none"), _FULL, (1, 1))


def test_outputs_of_the_last_token_are_those_of_the_last_token_of_the_source() -> None:
    end = "tail = Slice(y1, last, far, first) logits = MatMul(tail, head)"
    model = decoder(end=end)
    result = shared(model)
    found = result.report.decoder
    assert found is not None
    fed = steps(_LEFT, (1, 1))
    for left, right in zip(grown(model, found, fed), buffered(result.model, found, fed), strict=True):
        np.testing.assert_allclose(right, left, atol=2e-4)


def test_padding_that_is_vouched_for_is_not_rearranged() -> None:
    model = decoder()
    anywhere, right, none = (shared(model, padding=choice) for choice in ("auto", "assume-right", "assume-none"))
    assert ["TopK" in {node.op_type for node in result.model.graph.node} for result in (anywhere, right, none)] == [
        True, False, False,
    ]  # fmt: skip
    assert_serves(model, right, _RIGHT, (1, 1))
    assert_serves(model, none, _FULL, (1, 1))


def test_what_differs_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer whose lengths are one too long, as a mistake of ours would make them."""
    model = decoder()
    whole = lengths.read_lengths

    def longer(builder: Builder, *given: Any, **named: Any) -> lengths.Lengths:
        found = whole(builder, *given, **named)
        one = builder.constant(np.asarray(1, np.int32))
        last = builder.elementwise("Sub", [found.buffered.last, one], ir.DataType.INT32)
        return dataclasses.replace(found, buffered=dataclasses.replace(found.buffered, last=last))

    monkeypatch.setattr(share, "read_lengths", longer)
    result = shared(model)
    assert result.report.decoder is None
    assert {reason.code for site in result.report.sites for reason in site.reasons} == {"differs"}
    assert result.report.differing == 1
    assert {site.op for site in result.report.sites} == {"Attention"}
    usual = onnx_attnfuse.optimize(decoder(), ep="cpu").model
    assert [node.op_type for node in result.model.graph.node] == [node.op_type for node in usual.graph.node]
    assert [item.name for item in result.model.graph.input] == [item.name for item in usual.graph.input]


def _cast_behind(model: onnx.ModelProto, to: int, more: str = "") -> onnx.ModelProto:
    """A cast between keys with the new ones and what reads them, as GPT-J by TorchScript has it."""
    for at, node in reversed(list(enumerate(model.graph.node))):
        if node.output[0].startswith("present_key_"):
            name, node.output[0] = node.output[0], f"joined_{node.output[0]}"
            model.graph.node.insert(at + 1, onnx.helper.make_node("Cast", [node.output[0]], [name], to=to))
            if more:
                model.graph.node.append(onnx.helper.make_node(more, [node.output[0]], [f"more_{name}"]))
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(f"more_{name}"))
    return model


def test_keys_that_are_cast_to_the_type_they_have_share_a_buffer() -> None:
    model = _cast_behind(decoder(), to=1)
    result = shared(model)
    assert_serves(model, result, _HOLES, (1, 1))
    assert not [node for node in result.model.graph.node if node.op_type == "Concat" and "past" in " ".join(node.input)]


@pytest.mark.parametrize(
    ("dtype", "to", "more"),
    [("float16", 1, ""), ("float", 1, "Neg"), ("float", 1, "Shape")],
    ids=["to another type", "read elsewhere too", "whose shape is asked for"],
)
def test_a_cast_that_is_more_than_a_copy_keeps_the_cache(dtype: str, to: int, more: str) -> None:
    model = _cast_behind(decoder(dtype=dtype), to, more)
    if dtype == "float16":  # attention goes on in float16, behind what is given out
        for node in model.graph.node:
            if node.op_type == "Unsqueeze" and node.input[0].startswith("present_key_"):
                node.input[0] = f"joined_{node.input[0]}"
        for item in model.graph.output:
            if item.name.startswith("present_key_"):
                item.type.tensor_type.elem_type = to
    assert shared(model, verify="none").report.decoder is None


def test_the_whole_model_is_judged_in_a_loop_when_all_is_done() -> None:
    result = shared(onnx.load(_LLAMA), verify="model")
    assert any(note.startswith("whole model verified in 16 loops, largest error ") for note in result.report.notes)


def test_names_that_are_taken_by_other_layers_are_given_in_order() -> None:
    model = onnx.load(_LLAMA)
    swapped = {f"past_{part}_{i}": f"past_key_values.{1 - i}.{part}" for i in (0, 1) for part in ("key", "value")}
    for node in model.graph.node:
        node.input[:] = [swapped.get(name, name) for name in node.input]
    for value in model.graph.input:
        value.name = swapped.get(value.name, value.name)
    found = shared(model).report.decoder
    assert found is not None
    assert found.past_keys == ("past_key_values.0.key", "past_key_values.1.key")


def test_what_fails_is_taken_back_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(share, "finish_interface", broken)
    result = shared(decoder(seen=UNPADDED, rotated=False))
    assert result.report.decoder is None
    assert [failure.kind for failure in result.report.failures] == ["defect"]
    assert {site.op for site in result.report.sites} == {"Attention"}
    assert "attention_mask" not in {item.name for item in result.model.graph.input}
    session(result.model)


@pytest.mark.parametrize("assume", [("none",), ("named-sizes", "nonempty-axes", "large-fills", "bounded-scores")])
def test_what_a_buffer_takes_for_granted_can_be_taken_back(assume: tuple[str, ...]) -> None:
    result = shared(decoder(), assume=assume)
    assert result.report.decoder is None


def test_a_window_takes_it_that_padding_does_not_lie_between_tokens() -> None:
    names = tuple(name for name in ASSUMPTIONS if name != "padding-at-the-ends")
    left, served = shared(decoder(seen=WINDOWED), assume=names), shared(decoder(), assume=names)
    assert {reason.code for site in left.report.sites for reason in site.reasons} == {"padding-kept"}
    assert (left.report.decoder is None, served.report.decoder is None) == (True, False)


def test_a_second_run_finds_nothing_to_do() -> None:
    once = shared(decoder())
    again = shared(once.model)
    assert again.report.decoder is None
    assert {site.status for site in again.report.sites} == {"already-fused"}
    assert again.model.graph.node == once.model.graph.node


_SUM = "total_sum = ReduceSum<keepdims=0>({name})"


@pytest.mark.parametrize(
    ("near_miss", "code"),
    [
        ({"causal": "LessOrEqual(i, j)"}, "not-causal"),
        (
            {"more": "biased{i} = Add(masked{i}, slopes)", "scores": "biased{i}", "inputs": ", float[1, 4, 1, 1] slopes"},
            "mask-form",
        ),
        ({"end": LOGITS + _SUM.format(name="past_key_0"), "outputs": ", float[] total_sum"}, "cache-used"),
        ({"end": LOGITS + _SUM.format(name="present_value_1"), "outputs": ", float[] total_sum"}, "cache-used"),
        ({"seen": PADDED.replace("Cast<to=9>(attention_mask)", "Equal(attention_mask, reach)")}, "padding-unread"),
        (
            {"seen": PADDED.replace("(attention_mask)", "(input_ids)"), "inputs": ", int64[b, total] attention_mask"},
            "padding-unread",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_near_misses_are_left_as_they_were(near_miss: dict[str, Any], code: str) -> None:
    assert shared(decoder()).report.decoder is not None
    model = decoder(**near_miss)
    result = shared(model)
    assert result.report.decoder is None
    assert code in {reason.code for site in result.report.sites for reason in site.reasons}
    assert any(note.startswith("the cache is as it was: ") for note in result.report.notes)
    assert [item.name for item in result.model.graph.input] == [item.name for item in model.graph.input]
    assert [item.name for item in result.model.graph.output] == [item.name for item in model.graph.output]
    session(result.model)


def test_what_is_not_given_out_is_no_cache() -> None:
    model = decoder()
    for node in model.graph.node:
        if node.op_type == "Unsqueeze" and node.input[0].startswith("present_"):
            node.input[0] += "_kept"
    for at, node in reversed(list(enumerate(model.graph.node))):
        if node.output[0].startswith("present_"):
            given, node.output[0] = node.output[0], f"{node.output[0]}_kept"
            model.graph.node.insert(at + 1, onnx.helper.make_node("Neg", [node.output[0]], [given]))
    result = shared(model, verify="none")
    assert result.report.decoder is None
    assert {"cache-kept"} == {reason.code for site in result.report.sites for reason in site.reasons}


def _unnamed(model: onnx.ModelProto, *, named_apart: bool) -> onnx.ModelProto:
    """A model whose inputs have no names for axes, or another one for each axis; nothing else has a shape."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    del model.graph.value_info[:]
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_param"):
                dim.Clear()
                if named_apart:
                    dim.dim_param = f"{value.name}_axis_{axis}"
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.Clear()
    return model


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("named_apart", [True, False])
@pytest.mark.parametrize("path", [_LLAMA, *_EXPORTS], ids=lambda path: path.stem)
def test_axes_need_no_names(path: pathlib.Path, *, named_apart: bool) -> None:
    model = _unnamed(onnx.load(path), named_apart=named_apart)
    grown_result = onnx_attnfuse.optimize(model, ep="cpu")
    assert [site.status for site in grown_result.report.sites] == ["fused"] * 2
    result = shared(model)
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert all({"masks-fit", "equal-pasts"} <= set(site.assumptions) for site in result.report.sites)
    assert not any("named-sizes" in site.assumptions for site in result.report.sites)
    assert_serves(model, result, _PADDINGS["left"], (1, 1, 1))


@pytest.mark.parametrize("are_named", [True, False], ids=["numbers as names", "no numbers"])
def test_heads_and_channels_may_have_numbers_as_names_or_none(are_named: bool) -> None:
    model = onnx.load(_LLAMA)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim if value.name.startswith("past") else ():
            if dim.dim_value:
                dim.dim_param = str(dim.dim_value) if are_named else f"{value.name}_{dim.dim_value}"
    result = shared(model)
    assert [(site.op, site.status) for site in result.report.sites] == [("GroupQueryAttention", "fused")] * 2
    assert_serves(onnx.load(_LLAMA), result, _PADDINGS["left"], (1, 1, 1))


@pytest.mark.parametrize(("assumption", "code"), [("equal-pasts", "not-causal"), ("masks-fit", "wide-mask")])
def test_sizes_that_do_not_follow_are_assumed_to_be_equal_or_told_apart(assumption: str, code: str) -> None:
    model = _unnamed(decoder(other="earlier"), named_apart=True)
    result = shared(model)
    assert result.report.decoder is not None, result.report.notes
    assert all(assumption in site.assumptions for site in result.report.sites)
    assert_serves(model, result, _PADDINGS["left"], (1, 1))
    left = shared(model, assume=tuple(name for name in ASSUMPTIONS if name not in {assumption, "wide-subgroups"}))
    assert left.report.decoder is None
    assert code in {reason.code for site in left.report.sites for reason in site.reasons}


def _angles(model: onnx.ModelProto) -> set[str]:
    """What makes the angles of the cosines and sines in a model."""
    made = {name: node.op_type for node in model.graph.node for name in node.output}
    return {made[node.input[0]] for node in model.graph.node if node.op_type in {"Cos", "Sin"}}


def test_angles_that_stand_side_by_side_twice_are_computed_once() -> None:
    model = onnx.load(_LLAMA)
    assert _angles(model) == {"Concat"}
    assert _angles(shared(model).model) == {"Mul"}


def test_angles_in_other_parts_than_the_pairs_stay_side_by_side() -> None:
    model = decoder()
    halves = onnx.helper.make_node("Split", ["angles"], ["near", "distant"], axis=-1, num_outputs=2)
    place, both = next(
        (place, node) for place, node in enumerate(model.graph.node) if node.op_type == "Concat" and node.input[0] == "angles"
    )
    del both.input[:]
    both.input.extend(["near", "distant", "near", "distant"])
    model.graph.node.insert(place, halves)
    result = shared(model)
    assert _angles(result.model) == {"Concat"}
    assert_serves(model, result, _LEFT, (1, 1))
