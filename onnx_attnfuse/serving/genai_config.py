"""The genai_config.json with which onnxruntime-genai runs a decoder whose cache is one buffer.

planned = plan(decoder, session, pathlib.Path("folder/model.onnx"), read_config(pathlib.Path("config.json")))
planned.write()

The type is `decoder`, that of any decoder of text, as the graph holds what other types add. The states of convolutions alone are
handed in where the layers have kinds. A window of the attentions is in their nodes, and in the config only of layers whose cache
keeps no more than that.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.serving.decoder import (
    ServedDecoder,
    StepSizes,
    cache_names,
    layer_types,
    layers_of,
    sliding_window,
    states_of,
    template,
    templates,
)
from onnx_attnfuse.verify.decoder_feeds import Pages

FILE = "genai_config.json"
ENCODER = "encoder.onnx"
"""The file of the encoder beside a decoder that reads what it made."""
CONTEXT_LENGTH = 2048
"""The most positions where neither the model nor a config says how many there are."""
_PAGE, _REQUESTS = 256, 16
"""Positions of a page, and requests that run at once; a caller may edit both."""
_OURS = "onnx-attnfuse"
"""The log id of sessions, by which a config is known to be ours; the format takes no names of others."""
_REMEDY = f"pass the model's config.json with --hf-config, or edit {FILE}"


def genai_config(
    decoder: ServedDecoder,
    *,
    filename: str,
    ep: str,
    config: Mapping[str, Any] | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of genai_config.json for a decoder.

    Args:
        decoder: The interface of the model.
        filename: The model's file, in the folder of the config.
        ep: The execution provider, by the name that `--ep` has for it.
        config: The result of `read_config`; `assumed` has the values of entries that are missing.
        provider_options: Options of the execution provider.

    Raises:
        OptionError: The config contradicts the model, or onnxruntime-genai cannot run this model (`unfit`).
    """
    if (reason := unfit(decoder, config)) is not None:
        raise OptionError(reason)
    facts, sizes, states = _facts(decoder, config or {}), decoder.sizes, states_of(decoder)
    capture = None if sizes is None else providers.provider(ep).capture
    captured: Mapping[str, str] = {} if capture is None else capture.options  # masks are as long as the buffer then
    chosen = [{} if ep == "cpu" else {ep: {**(provider_options or {}), **captured}}]
    names = templates(decoder)
    inputs = {
        "input_ids": decoder.input_ids,
        "attention_mask": decoder.attention_mask or None,
        "position_ids": decoder.position_ids,
        "past_key_names": names[0],
        "past_value_names": names[1],
        "past_sequence_length": decoder.past_length,
        **({} if decoder.pages is None else _paged_inputs(decoder.pages)),
    }
    if decoder.cross_keys:
        inputs |= {"cross_past_key_names": names[4], "cross_past_value_names": names[5]}
    outputs = {"logits": decoder.logits, "present_key_names": names[2], "present_value_names": names[3]}
    for kind, (before, after, _) in states.items():
        inputs[f"past_{kind}_names"], outputs[f"present_{kind}_names"] = before, after
    return {
        "model": {
            "type": _type(decoder),
            **_given({"bos_token_id": facts.bos}),
            "eos_token_id": list(facts.eos),
            "pad_token_id": facts.pad,
            "vocab_size": facts.vocab_size,
            "context_length": facts.context_length,
            **_encoder(decoder),
            "decoder": {
                "filename": filename,
                "session_options": {"log_id": _OURS, "provider_options": [item for item in chosen if item]},
                "num_hidden_layers": max(layers_of(decoder)) + 1,
                "num_attention_heads": decoder.num_heads,
                "num_key_value_heads": decoder.kv_heads,
                "head_size": decoder.head_size,
                **_given({"hidden_size": decoder.hidden_size}),
                **_given({"layer_types": layer_types(decoder), "sliding_window": sliding_window(decoder)}),
                "inputs": _given(inputs),
                "outputs": outputs,
            },
        },
        "search": {
            "do_sample": False,
            "max_length": facts.context_length if sizes is None else sizes.max_length,
            "num_beams": 1,
            **_given({"past_present_share_buffer": True if decoder.pages is None else None}),
            **_given({"chunk_size": decoder.new_tokens if sizes is None else sizes.new}),
        },
        **({} if decoder.pages is None else _engine(facts.context_length, is_on_host=ep == "cpu")),
    }


def _paged_inputs(pages: Pages) -> dict[str, str]:
    return {
        "cumulative_sequence_lengths": pages.cumulative_lengths,
        "past_sequence_lengths": pages.past_lengths,
        "block_table": pages.block_table,
    }


def _engine(context_length: int, *, is_on_host: bool) -> dict[str, Any]:
    """The settings of the Engine; on a GPU it takes as many pages as there is memory for."""
    pages = _REQUESTS * -(-min(context_length, CONTEXT_LENGTH) // _PAGE)
    batching = {"block_size": _PAGE, "max_batch_size": _REQUESTS, **({"num_blocks": pages} if is_on_host else {})}
    return {"engine": {"dynamic_batching": batching}}


def _type(decoder: ServedDecoder) -> str:
    """The type of a model: that of any decoder of text, but where the runtime has inputs that others have not."""
    return "whisper" if decoder.cross_keys else "decoder"


def _encoder(decoder: ServedDecoder) -> dict[str, Any]:
    """The encoder where there is one, a model of a caller beside the decoder, with the names of its inputs and outputs."""
    if not decoder.cross_keys:
        return {}
    return {
        "encoder": {
            "filename": ENCODER,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": decoder.num_heads,
            "head_size": decoder.head_size,
            "hidden_size": decoder.num_heads * decoder.head_size,
            "inputs": {"audio_features": "audio_features"},
            "outputs": {
                "encoder_hidden_states": "encoder_hidden_states",
                "cross_present_key_names": "present_key_cross_%d",
                "cross_present_value_names": "present_value_cross_%d",
            },
        }
    }


def assumed(decoder: ServedDecoder, config: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """A line for each entry that neither the model nor the config gives, and for each limit of the model in onnxruntime-genai."""
    return _facts(decoder, config or {}).assumed


def unfit(decoder: ServedDecoder, config: Mapping[str, Any] | None = None) -> str | None:
    """Why onnxruntime-genai cannot run a decoder, with what to do about it; None where it can."""
    if not decoder.input_ids:
        return "onnxruntime-genai feeds tokens and the model takes embeddings; export it with its embedding"
    if decoder.logits_by_entry:
        what = f"onnxruntime-genai needs logits (batch, positions, words) and '{decoder.logits}' has no positions"
        return f"{what}; export the model with all of them, or run it with ONNX Runtime alone"
    if decoder.cross_keys and decoder.past_length is None:
        what = "of decoders with an encoder onnxruntime-genai runs Whisper's alone, without a mask"
        return f"{what}; name Whisper's config.json with --hf-config, or run the model with ONNX Runtime alone"
    if decoder.past_length is not None and len(decoder.cross_keys) != decoder.layers:
        what = f"onnxruntime-genai hands in keys and values of an encoder for each of {decoder.layers} layers"
        return f"{what}; export the decoder with these as inputs, (b, heads, positions, channels)"
    if not templates(decoder):
        few = ", ".join(names[0] for names in cache_names(decoder))
        what = "onnxruntime-genai needs names of caches that differ in the number of the layer alone"
        return f"{what}, unlike {few}, ...; export the model with such names"
    if (reason := _unfit_states(decoder)) is not None:
        return reason
    if decoder.vocab_size is None and (config or {}).get("vocab_size") is None:
        return "the model does not say how many tokens there are; name its config.json with --hf-config"
    if decoder.others:
        return f"onnxruntime-genai has nothing to pass as '{decoder.others[0]}'; run the model with ONNX Runtime alone"
    return None if decoder.sizes is None else _unfit_sizes(decoder, decoder.sizes, config or {})


def _unfit_states(decoder: ServedDecoder) -> str | None:
    """Why onnxruntime-genai cannot hand in the states of a decoder; None where it can, or there are none."""
    states, cached = states_of(decoder), template(decoder.past_keys)[1]
    if not all(layers for _, _, layers in states.values()):
        name = (decoder.convolutions or decoder.recurrences)[0][0]
        what = "onnxruntime-genai needs names of states that differ in the number of the layer alone"
        return f"{what}, unlike '{name}', ...; export the model with such names"
    kinds = {kind: layers for kind, (_, _, layers) in states.items()}
    if "recurrent" in kinds and kinds["recurrent"] != kinds.get("conv"):
        what = "onnxruntime-genai takes a state of a recurrence and that of a convolution in the same layer"
        return f"{what}; run the model with ONNX Runtime alone"
    if "recurrent" not in kinds and not set(cached).isdisjoint(kinds.get("conv", ())):
        what = "onnxruntime-genai takes the state of a convolution in layers without keys and values alone"
        return f"{what}; run the model with ONNX Runtime alone"
    return None


def _unfit_sizes(decoder: ServedDecoder, sizes: StepSizes, config: Mapping[str, Any]) -> str | None:
    """Why onnxruntime-genai cannot run the steps of a decoder whose sizes are numbers, one token after the other."""
    if (sizes.batch, sizes.new) != (1, 1):
        what = f"it has prompts of one sequence read token by token where sizes are fixed, not {sizes.new} for {sizes.batch}"
        return f"{what}; fix both as 1, or leave --cuda-graph out"
    if sizes.total != sizes.max_length:
        what = f"its mask is as long as the buffer where steps are captured, and not {sizes.total} for {sizes.max_length}"
        return f"{what}; fix both as the same number, or leave --cuda-graph out"
    if not decoder.mask_ends_anywhere:
        what = "its mask has zeros after the text where steps are captured, which this model does not read"
        return f"{what}; choose --padding assume-right and export the model with position_ids, or leave --cuda-graph out"
    known = _context_length(decoder, config)
    if known is not None and known < sizes.max_length:
        return f"the buffer has {sizes.max_length} positions and the model {known}; fix the buffer as no more"
    return None


@dataclasses.dataclass(frozen=True)
class Planned:
    """A genai_config.json that is to be written."""

    content: Mapping[str, Any]
    path: pathlib.Path
    assumed: tuple[str, ...]
    """Unknown entries, a line each."""

    def write(self) -> None:
        """Writes the file; see `write`."""
        write(self.content, self.path.parent)


def plan(decoder: ServedDecoder, session: Session, model: pathlib.Path, config: Mapping[str, Any] | None = None) -> Planned:
    """The genai_config.json for a model that is about to be written.

    Args:
        decoder: The interface of the model.
        session: The settings that the model was made for.
        model: The model's file; the config goes into its folder.
        config: The result of `read_config`.

    Raises:
        OptionError: The config contradicts the model, onnxruntime-genai cannot run it, or the folder has a config of another.
    """
    check_free(model.parent)
    (ep,) = (name for name in providers.names() if providers.provider(name).ort_name == session.provider)
    content = genai_config(decoder, filename=model.name, ep=ep, config=config, provider_options=session.provider_options)
    return Planned(content, model.parent / FILE, assumed(decoder, config))


def write(content: Mapping[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes genai_config.json whole or not at all, and gives its path.

    Raises:
        OptionError: The folder has one that was not written here, or cannot be written to.
    """
    path = folder / FILE
    check_free(folder)
    try:
        with staged() as stage:
            stage.temporary(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error
    return path


def check_free(folder: pathlib.Path) -> None:
    """Refuse a folder that has a genai_config.json of somebody else.

    Raises:
        OptionError: It has one.
    """
    path = folder / FILE
    if path.exists() and not _is_ours(path):
        raise OptionError(f"{path} was not written by attnfuse and would be lost; move it away, or write to another folder")


def _is_ours(path: pathlib.Path) -> bool:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["model"]["decoder"]["session_options"]["log_id"] == _OURS
    except (OSError, ValueError, LookupError, TypeError):
        return False


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Tokens and lengths of a config, with something harmless where it says nothing."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int
    vocab_size: int
    context_length: int
    assumed: tuple[str, ...]


def _facts(decoder: ServedDecoder, config: Mapping[str, Any]) -> _Facts:
    lines: list[str] = []
    vocab_size = _vocab_size(decoder, config)
    eos = _eos(config, vocab_size)
    if not eos:
        eos = (vocab_size - 1,)
        lines.append(f"eos_token_id is not in the model and was set to {eos[0]}, the last token; {_REMEDY}")
    pad = _number(config, "pad_token_id", least=-1)
    length = _context_length(decoder, config)
    if length is None and decoder.sizes is not None:
        length = decoder.sizes.max_length
    if length is None:
        length = CONTEXT_LENGTH
        lines.append(f"context_length is not in the model and was set to {length}; {_REMEDY}")
    said = _number(config, "context_length", least=1)
    if said is not None and length < said:
        what = f"context_length is {length}, as the model's table of positions has {length} rows"
        lines.append(f"{what}; the Hugging Face config says {said}")
    if decoder.sizes is None and decoder.new_tokens is not None:
        what = "onnxruntime-genai runs one prompt at a time, and no batch, where each step has a fixed number of tokens"
        lines.append(f"{what}, here {decoder.new_tokens}; name that axis in the export for batches")
    elif decoder.convolutions or decoder.recurrences:
        lines.append("prompts of a batch must have one length in onnxruntime-genai, as states take padding in")
    elif decoder.counts_alike:
        what = "prompts of a batch must have one length in onnxruntime-genai, as the model counts positions for all entries alike"
        lines.append(what if decoder.position_ids is not None else f"{what}; export it with position_ids as an input")
    if windows := [window for window in decoder.cache_windows if window is not None]:
        what = f"max_length must be {max(windows)} or more in onnxruntime-genai, as a cache is no longer than that"
        lines.append(f"{what} and the operator needs at least a window")
    if decoder.cross_keys:
        outputs = "present_key_cross_N and present_value_cross_N"
        lines.append(f"the encoder is not written; put it there as {ENCODER}, with outputs encoder_hidden_states, {outputs}")
    bos = _number(config, "bos_token_id")
    return _Facts(bos, eos, eos[0] if pad is None or not 0 <= pad < vocab_size else pad, vocab_size, length, tuple(lines))


def _vocab_size(decoder: ServedDecoder, config: Mapping[str, Any]) -> int:
    said, known = _number(config, "vocab_size", least=1), decoder.vocab_size
    if said is not None and known is not None and said != known:
        raise OptionError(
            f"the Hugging Face config has a vocabulary of {said} and the model one of {known}; name the config of this model"
        )
    found = known or said
    assert found is not None  # else it is unfit
    return found


def _eos(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text, which onnxruntime-genai needs inside of the vocabulary."""
    said: Any = config.get("eos_token_id")
    several = cast("Sequence[Any]", said) if isinstance(said, list) else (said,)
    found = tuple(item for item in (_number({"eos_token_id": item}, "eos_token_id") for item in several) if item is not None)
    if outside := [item for item in found if item >= vocab_size]:
        raise OptionError(
            f"eos_token_id of the Hugging Face config is {outside[0]} and the model has {vocab_size} tokens; "
            "name the config of this model"
        )
    return found


def _context_length(decoder: ServedDecoder, config: Mapping[str, Any]) -> int | None:
    """The most positions: the fewest that anybody tells."""
    known = (decoder.context_length, _number(config, "context_length", least=1))
    return min((item for item in known if item is not None), default=None)


def _number(config: Mapping[str, Any], name: str, least: int = 0) -> int | None:
    """An entry of a config that is a number from `least` on, or None where it is missing."""
    said: Any = config.get(name)
    if said is None:
        return None
    if not isinstance(said, int) or isinstance(said, bool) or said < least:
        raise OptionError(f"{name} of the Hugging Face config is {said!r}, not a number from {least} on; correct it")
    return said


def _given(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are not None."""
    return {name: item for name, item in entries.items() if item is not None}
