"""Shared caches in fewer bits: what is written, what it costs and is held to, and where it is refused."""

from __future__ import annotations

import json
import pathlib
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from google.protobuf.message import EncodeError
from onnx import numpy_helper

import onnx_attnfuse
from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError
from onnx_attnfuse.fusion import model_options
from onnx_attnfuse.graph import io
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify import float32_copy, model_session
from onnx_attnfuse.verify.quantised.cache import check_quantised
from onnx_attnfuse.verify.quantised.roundings import QuantisedCache
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import Array, Fed, grown, named, session, steps
from tests.support.decoders import SINKS, WINDOWED, decoder

_EXPORTS = sorted((pathlib.Path(__file__).parent.parent / "shared_cache" / "exports").glob("*.onnx"))
_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_STORED = {"int8": (np.int8, 1), "int4": (np.uint8, 2)}


def _quantised(model: onnx.ModelProto, kind: str = "int8", **choices: object) -> onnx_attnfuse.Result:
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", "kv_cache": kind, **choices})


def _buffered(model: onnx.ModelProto, found: ServedDecoder, fed: Sequence[Fed], kind: str) -> list[Array]:
    """The logits of a decoder in each step, whose buffer begins with bytes of no meaning."""
    started, dtype = session(model), _STORED[kind]
    shape = (len(fed[0].tokens), found.kv_heads, 24, found.head_size // dtype[1])
    cache = {name: np.full(shape, 77, dtype[0]) for name in (*found.past_keys, *found.past_values)}
    logits: list[Array] = []
    for step in fed:
        outputs = [found.logits, *found.present_keys, *found.present_values]
        first, *presents = started.run(outputs, named(found, step) | cache)
        logits.append(first)
        cache = dict(zip(cache, presents, strict=True))
    return logits


def _truth(model: onnx.ModelProto, found: ServedDecoder, fed: Sequence[Fed]) -> list[Array]:
    return grown(model, found, fed)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("path", [_LLAMA, *_EXPORTS], ids=lambda path: path.stem)
def test_real_exports_lose_what_is_stated_and_no_more(path: pathlib.Path, kind: str) -> None:
    model = onnx.load(path)
    result = _quantised(model, kind)
    found, record = result.report.decoder, result.report.kv_cache
    assert found is not None
    assert record is not None, result.report.notes
    assert record.error is not None
    assert all(site.verified is not None and f"{kind} cache" in (site.mask_form or "") for site in result.report.sites)
    padded = [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]
    for prompt in ([[1] * 8] * 2, padded):
        fed = steps(prompt, (1, 1, 1, 1), seed=3)
        old, new = _truth(model, found, fed), _buffered(result.model, found, fed, kind)
        keep = [step.mask[:, -step.tokens.shape[1] :].astype(bool) for step in fed]
        error = max(float(np.abs(right - left)[kept].max()) for left, right, kept in zip(old, new, keep, strict=True))
        spread = float(np.concatenate([left[kept] for left, kept in zip(old, keep, strict=True)]).std())
        assert 0 < error / spread < 3 * record.error.largest
    onnx.checker.check_model(result.model)


@pytest.mark.parametrize(("kind", "size", "type_"), [("int8", 8, "INT8"), ("int4", 4, "UINT8")])
def test_the_cache_has_the_type_that_is_asked_for(kind: str, size: int, type_: str) -> None:
    result = _quantised(onnx.load(_LLAMA), kind)
    graph = result.model.graph
    caches = [item for item in (*graph.input, *graph.output) if item.name.startswith(("past", "present"))]
    assert len(caches) == 8
    for item in caches:
        assert onnx.TensorProto.DataType.Name(item.type.tensor_type.elem_type) == type_
        dims = item.type.tensor_type.shape.dim
        assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 2, "max_sequence_length", size]
    nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    weights = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    for node in nodes:
        given = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        assert (given["k_quant_type"], given["v_quant_type"]) == (b"PER_CHANNEL", b"PER_CHANNEL")
        assert given["kv_cache_bit_width"] == {"int8": 8, "int4": 4}[kind]
        assert [weights[name].shape for name in node.input[12:14]] == [(1, 2, 1, 8)] * 2
    record = result.report.kv_cache
    assert record is not None
    assert (record.bytes_per_position, record.bytes_before) == (2 * 2 * 2 * size, 2 * 2 * 2 * 8 * 4)


def test_scales_are_those_of_the_tokens_that_are_given(tmp_path: pathlib.Path) -> None:
    model, file = onnx.load(_LLAMA), tmp_path / "text.npz"
    tokens = np.random.default_rng(4).integers(0, 99, (3, 11))
    mask = np.ones_like(tokens)
    mask[1, 7:] = 0
    np.savez(file, input_ids=tokens, attention_mask=mask)
    result = _quantised(model, calibrate=file)
    started = session(model)
    empty = {item.name: np.zeros((3, 2, 0, 8), np.float32) for item in started.get_inputs() if len(item.shape) == 4}
    places = np.broadcast_to(np.arange(11), (3, 11))
    names = [item.name for item in started.get_outputs()]
    feeds = {"input_ids": tokens, "attention_mask": mask, "position_ids": places} | empty
    found = dict(zip(names, started.run(names, feeds), strict=True))
    keys, values = (np.where(mask[:, None, :, None] > 0, found[f"present_{part}_1"], 0) for part in ("key", "value"))
    pairs = np.sqrt(keys[..., :4] ** 2 + keys[..., 4:] ** 2).max((0, 2))  # what a key may become at another position
    node = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"][1]
    weights = {item.name: numpy_helper.to_array(item) for item in result.model.graph.initializer}
    np.testing.assert_allclose(weights[node.input[12]][0, :, 0], np.concatenate([pairs, pairs], -1) * 1.25 / 127, rtol=1e-5)
    np.testing.assert_allclose(weights[node.input[13]][0, :, 0], np.abs(values).max((0, 2)) * 1.25 / 127, rtol=1e-5)
    assert result.report.kv_cache is not None
    assert result.report.kv_cache.scales_from == "33 tokens of text.npz"
    assert "256 generated tokens" in "".join(_quantised(model).report.notes)


@pytest.mark.parametrize(
    ("path", "ep"), [(_LLAMA, "cpu"), pytest.param(_LLAMA, "cuda", marks=pytest.mark.newest), (_EXPORTS[0], "cpu")]
)
def test_no_position_behind_those_that_were_measured_cuts_a_key_off(path: pathlib.Path, ep: str, tmp_path: pathlib.Path) -> None:
    """A token has one key, that turns with its position; the scales are those of its first four."""
    model, file = onnx.load(path), tmp_path / "text.npz"
    np.savez(file, input_ids=np.full((1, 4), 7))
    half = onnx_attnfuse.convert(model).model if ep == "cuda" else model
    result = _quantised(half, calibrate=file, ep=ep, **({"arch": "sm90"} if ep == "cuda" else {}))
    found = result.report.decoder
    assert found is not None
    fed = Fed(np.full((1, 60), 7), np.ones((1, 60), np.int64))
    started = session(result.model)
    shape = (1, found.kv_heads, 60, found.head_size)
    cache = {name: np.zeros(shape, np.int8) for name in (*found.past_keys, *found.past_values)}
    names = {item.name for item in started.get_inputs()}
    feeds = {name: array for name, array in (named(found, fed) | cache).items() if name in names}
    (keys,) = started.run([found.present_keys[0]], feeds)
    weights = {item.name: numpy_helper.to_array(item) for item in result.model.graph.initializer}
    lengths = (keys.astype(np.float32) * weights[f"{found.past_keys[0]}.scale"]) ** 2
    lengths = np.sqrt(lengths[..., : found.head_size // 2] + lengths[..., found.head_size // 2 :])
    np.testing.assert_allclose(lengths, np.broadcast_to(lengths[:, :, :1], lengths.shape), atol=0.02 * lengths.max())


def test_the_error_is_that_of_the_text_where_one_is_given(tmp_path: pathlib.Path) -> None:
    """Text of few words has keys and values in a small part of what any words have, and scales are from that part."""
    model, file = decoder(), tmp_path / "text.npz"
    np.savez(file, input_ids=np.random.default_rng(2).choice([3, 14, 15, 92], (4, 60)))
    result = _quantised(model, calibrate=file)
    record = result.report.kv_cache
    assert record is not None
    assert record.error is not None
    assert record.error_on_text is not None
    assert (record.error.tokens, record.error_on_text.tokens) == (72, 3 * 15)
    assert record.error_on_text.mean < record.error.mean / 2
    assert [line.rpartition(": largest")[0] for line in record.lines()[1:]] == [
        "error of the logits by the int8 cache on text of that file, with scales from the rest",
        "error of the logits by the int8 cache on random tokens",
    ]
    assert QuantisedCache.read({item.key: item.value for item in result.model.metadata_props}) == record


def test_text_that_is_short_or_goes_with_other_arrays_is_not_set_apart(tmp_path: pathlib.Path) -> None:
    model, file = decoder(inputs=", float[b, s, 64] more", between="next = Add(y0, more)"), tmp_path / "text.npz"
    tokens = np.random.default_rng(2).integers(0, 99, (1, 60))
    np.savez(file, input_ids=tokens, more=np.zeros((1, 60, 64), np.float32))
    for result in (_quantised(model, calibrate=file), _short(tokens[:, :7], file)):
        assert result.report.kv_cache is not None
        assert result.report.kv_cache.error is not None
        assert result.report.kv_cache.error_on_text is None


def _short(tokens: np.ndarray, file: pathlib.Path) -> onnx_attnfuse.Result:
    np.savez(file, input_ids=tokens)
    return _quantised(decoder(), calibrate=file)


def test_the_error_is_told_everywhere_and_written_into_the_model(tmp_path: pathlib.Path) -> None:
    result = _quantised(onnx.load(_LLAMA))
    record = result.report.kv_cache
    assert record is not None
    told = result.report.to_dict()["kv_cache"]
    assert (told["format"], told["scales"], told["error"]["tokens"]) == ("int8", "PER_CHANNEL", 72)
    line = f"error of the logits by the int8 cache: {record.error}"
    assert line in result.report.notes
    onnx_attnfuse.write_report(result.report, tmp_path / "told.html", "a title")
    assert "error of the logits by the int8 cache" in (tmp_path / "told.html").read_text(encoding="utf-8")
    metadata = {item.key: item.value for item in result.model.metadata_props}
    assert QuantisedCache.read(metadata) == record
    assert json.loads(metadata[QuantisedCache.KEY])["format"] == "int8"
    with pytest.raises(ModelError, match="cannot be read"):
        QuantisedCache.read({QuantisedCache.KEY: "[]"})
    assert QuantisedCache.read({}) is None


def _read_last(model: onnx.ModelProto) -> set[str]:
    """What the product reads that gives the logits."""
    (node,) = (node for node in model.graph.node if "logits" in node.output)
    return set(node.input)


def _changed(model: onnx.ModelProto, place: int, factor: float) -> onnx.ModelProto:
    """The model with the scales of its last attention times a number."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    name = [node for node in copy.graph.node if node.op_type == "GroupQueryAttention"][1].input[place]
    (held,) = (item for item in copy.graph.initializer if item.name == name)
    held.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(held) * factor).astype(np.float32), name))
    return copy


def test_verifying_holds_the_result_to_what_was_stated() -> None:
    model = onnx.load(_LLAMA)
    result = _quantised(model).model
    found = onnx_attnfuse.verify_models(model, result)
    assert found.equal, found.detail
    assert [line.split(":")[0] for line in found.notes] == ["error of the logits by the int8 cache", "stated"]
    worse = onnx_attnfuse.verify_models(model, _changed(result, 12, 8))
    assert not worse.equal
    assert "was stated" in worse.detail
    cut = onnx_attnfuse.verify_models(model, _changed(result, 13, 0.25))
    assert not cut.equal
    with pytest.raises(ModelError, match="compare it with its source"):
        onnx_attnfuse.verify_models(onnx.load(next(path for path in BUNDLED if path.stem.startswith("bert"))), result)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_smaller_than_rounding_is_still_seen(kind: str) -> None:
    """A factor of the scores that is 2 % off is hidden by an int4 cache, and no rounding."""
    model = onnx.load(_LLAMA)
    result = _quantised(model, kind)
    record = result.report.kv_cache
    assert record is not None
    source = ir.from_proto(model)
    assert check_quantised(source, ir.from_proto(result.model), record).equal
    for node in result.model.graph.node:
        for item in node.attribute:
            if item.name == "scale":
                item.f *= 1.02
    verdict = check_quantised(source, ir.from_proto(result.model), record)
    assert not verdict.equal
    assert "no rounding of" in verdict.detail  # the keys of the second layer are made of what the first attends to


def test_a_head_that_is_off_by_little_is_still_seen() -> None:
    """What comes behind all attentions is compared as in any decoder."""
    model = onnx.load(_LLAMA)
    result = _quantised(model)
    record = result.report.kv_cache
    assert record is not None
    (head,) = (item for item in result.model.graph.initializer if 99 in item.dims and item.name in _read_last(result.model))
    head.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(head) * 1.01).astype(np.float32), head.name))
    verdict = check_quantised(ir.from_proto(model), ir.from_proto(result.model), record)
    assert not verdict.equal
    assert "'logits' differs" in verdict.detail


def test_keys_of_another_layer_are_seen() -> None:
    model = onnx.load(_LLAMA)
    result = _quantised(model)
    record = result.report.kv_cache
    assert record is not None
    first, second = [node for node in result.model.graph.node if node.op_type == "GroupQueryAttention"]
    first.input[1], second.input[1] = second.input[1], first.input[1]
    first.input[1] = first.input[2]
    second.input[1] = second.input[2]
    verdict = check_quantised(ir.from_proto(model), ir.from_proto(result.model), record)
    assert not verdict.equal
    assert "no rounding of" in verdict.detail


@pytest.mark.parametrize("given", [{"seen": WINDOWED}, SINKS, {"dtype": "float16"}, {"embedded": True}])
def test_what_a_shared_cache_takes_an_int8_one_takes_on_the_cpu(given: dict[str, Any]) -> None:
    result = _quantised(decoder(**given))
    record = result.report.kv_cache
    assert record is not None, result.report.notes
    assert record.error is not None
    assert record.error.mean < 0.1


@pytest.mark.parametrize(
    ("kind", "arch", "given", "why"),
    [
        ("int8", "sm80", {}, None),
        ("float8", "sm90", {}, None),
        ("float8", "sm80", {}, "from sm89 on"),
        ("int4", "sm90", {}, "no kernel on cuda for a cache in int4; there are int8, float8"),
        ("int8", "sm90", SINKS, "takes no sink with a quantised cache"),
    ],
)
def test_what_cuda_takes_in_half_precision(kind: str, arch: str, given: dict[str, Any], why: str | None) -> None:
    result = _quantised(decoder(dtype="float16", **given), kind, ep="cuda", arch=arch)
    assert (result.report.kv_cache is None) == (why is not None), result.report.notes
    assert why is None or any(why in note for note in result.report.notes)
    types = {item.type.tensor_type.elem_type for item in result.model.graph.input if item.name.startswith("past")}
    kept = {"int8": onnx.TensorProto.INT8, "float8": onnx.TensorProto.FLOAT8E4M3FN}
    assert types == {onnx.TensorProto.FLOAT16 if why else kept[kind]}
    if why is None:
        found = onnx_attnfuse.verify_models(decoder(dtype="float16", **given), result.model)
        assert found.equal, found.detail


def test_float8_has_no_kernel_on_the_cpu() -> None:
    result = _quantised(onnx.load(_LLAMA), "float8")
    assert result.report.kv_cache is None
    assert any("no kernel on cpu for a cache in float8; there are int8, int4" in note for note in result.report.notes)
    assert "past_key_values.0.key.scale" not in {item.name for item in result.model.graph.initializer}


def test_a_cache_that_becomes_no_buffer_keeps_its_type() -> None:
    result = _quantised(decoder(causal="LessOrEqual(i, j)"))
    assert result.report.kv_cache is None
    assert "no cache is int8: none became a buffer" in result.report.notes


def test_without_verification_nothing_is_stated() -> None:
    result = _quantised(onnx.load(_LLAMA), verify="none")
    record = result.report.kv_cache
    assert record is not None
    assert record.error is None
    assert result.report.notes[-1:] or "not measured" in "".join(result.report.notes)
    assert onnx_attnfuse.verify_models(onnx.load(_LLAMA), result.model).equal


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kv_cache": "int2"}, "kv_cache is 'int2'; choose same or int8"),
        ({"cache": "as-is"}, "only a shared cache can be; add --cache shared"),
        ({"kv_cache": "same", "calibrate": pathlib.Path("x.npz")}, "add --kv-cache int8, or leave it out"),
        ({"calibrate": pathlib.Path("nowhere.npz")}, "nowhere.npz is not there"),
    ],
)
def test_options_that_contradict_each_other_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        _quantised(onnx.load(_LLAMA), kind=choices.pop("kv_cache", "int8"), **choices)


def test_files_that_cannot_be_used_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "text.npz"
    for content, message in (
        ({"tokens": np.ones((1, 4), np.int64)}, "has no array 'input_ids'"),
        ({"input_ids": np.ones(4, np.int64)}, "of shape"),
        ({"input_ids": np.full((1, 4), 4000)}, "does not run on"),
        ({"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 5))}, "not of the shape of the tokens"),
    ):
        np.savez(file, **content)
        with pytest.raises(OptionError, match=message):
            _quantised(onnx.load(_LLAMA), calibrate=file)
    file.write_text("no archive")
    with pytest.raises(OptionError, match=r"is no \.npz file"):
        _quantised(onnx.load(_LLAMA), calibrate=file)


def test_without_onnxruntime_there_is_a_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_options, "available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'onnx-attnfuse\[cpu\]'"):
        _quantised(onnx.load(_LLAMA))


@pytest.mark.parametrize(("kind", "ep"), [("int8", "cpu"), ("int8", "cuda"), ("float8", "cuda")])
def test_many_weights_are_widened_once_to_files_and_give_the_same(
    kind: str, ep: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(decoder(dtype="float16"), path, save_as_external_data=True, location="model.data", size_threshold=1024)
    choices: dict[str, Any] = {"ep": ep, "cache": "shared", "kv_cache": kind, **({"arch": "sm90"} if ep == "cuda" else {})}
    inside = onnx_attnfuse.optimize(path, **choices)
    assert inside.report.kv_cache is not None, inside.report.notes
    write, written = ir.external_data.convert_tensors_to_external, list[tuple[pathlib.Path, list[str]]]()

    def counted(tensors: Sequence[ir.TensorProtocol], folder: pathlib.Path, name: str) -> list[ir.ExternalTensor]:
        written.append((folder, [tensor.name or "" for tensor in tensors]))
        return write(tensors, folder, name)

    monkeypatch.setattr(float32_copy, "is_large", lambda _: True)
    monkeypatch.setattr(ir.external_data, "convert_tensors_to_external", counted)
    beside = onnx_attnfuse.optimize(path, **choices)
    assert beside.report.kv_cache == inside.report.kv_cache
    assert ir.to_proto(beside.model) == ir.to_proto(inside.model)
    folders, names = {folder for folder, _ in written}, [name for _, part in written for name in part]
    assert {"wq0", "wo1", "head", "table"} <= set(names)
    assert len(names) == len(set(names))
    assert len(folders) == 1
    assert not any(folder.exists() for folder in folders)


def test_models_beyond_one_protobuf_go_by_way_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    expected = _quantised(model)
    monkeypatch.setattr(io, "_INLINE_LIMIT", 0)
    with pytest.raises(ModelError, match="larger than one protobuf"):
        model_session.session(ir.from_proto(model))
    assert _quantised(model).report.kv_cache == expected.report.kv_cache


def test_what_protobuf_refuses_to_serialize_goes_by_way_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beyond:
        def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf calls it so
            raise EncodeError("Failed to serialize proto")

    model = decoder()
    expected = _quantised(model)
    monkeypatch.setattr(model_session, "ir", types.SimpleNamespace(Model=ir.Model, to_proto=lambda _: Beyond()))
    assert _quantised(model).report.kv_cache == expected.report.kv_cache


def test_many_weights_are_run_in_fewer_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    source = decoder(dtype="float16")
    monkeypatch.setattr("onnx_attnfuse.verify.float32_copy._LARGE", 0)
    result = _quantised(source)
    record = result.report.kv_cache
    assert record is not None, result.report.notes
    assert record.error is not None
    assert record.error.tokens == 2 * (16 + 4)
    assert record.scales_from.startswith("128 generated tokens")
    assert onnx_attnfuse.verify_models(source, result.model).equal


def test_a_disk_without_room_leaves_the_cache_in_the_type_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_copy, "is_large", lambda _: True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=0))
    result = _quantised(decoder(dtype="float16"))
    assert result.report.kv_cache is None
    assert any("cannot be widened to files" in note and "0 bytes free" in note for note in result.report.notes)
