"""The interface of a decoder whose cache is one buffer, as whoever runs it in a loop needs to know it.

That has its layers too, as onnxruntime-genai needs to know them: names of their caches and states, their kinds and windows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from onnx_attnfuse.verify.decoder_feeds import Pages


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The sizes of a decoder all of whose sizes are numbers."""

    batch: int
    new: int
    """How many tokens are new in each step."""
    total: int
    """The length of the mask."""
    max_length: int
    """The length of the buffer."""


@dataclasses.dataclass(frozen=True)
class ServedDecoder:
    """A decoder whose past and present keys and values are one buffer of a fixed length, (b, kv_heads, max_length, head_size)."""

    layers: int
    """The number of attentions with a cache."""
    num_heads: int
    kv_heads: int
    head_size: int
    hidden_size: int | None
    """The channels of a token, where they are known."""
    vocab_size: int | None
    """The channels of the logits, where they are known."""
    context_length: int | None
    """The most positions that the tables of the model have; None: it computes them for any."""
    input_ids: str
    """The input with the new tokens, (b, s) int64; empty where the model takes embeddings."""
    inputs_embeds: str | None
    """The input with the embeddings of the new tokens, (b, s, hidden_size); None where the model takes tokens."""
    attention_mask: str
    """The input (b, total) int64 with 1 for each token, cached or new, and 0 for padding; empty where a number tells lengths."""
    position_ids: str | None
    """The input (b, s) int64 with the positions of the new tokens; None where the model counts them itself."""
    past_keys: tuple[str, ...]
    """The inputs of the cache, one for each layer in the order of the layers; so are the next three."""
    past_values: tuple[str, ...]
    logits: str
    """The output (b, s, vocab_size), or (b, 1, vocab_size); (b, vocab_size) where `logits_by_entry`."""
    present_keys: tuple[str, ...]
    present_values: tuple[str, ...]
    window: int | None
    """How many keys a row sees, itself counted; None: all before it."""
    mask_ends_anywhere: bool = False
    """Whether zeros may follow the text of the mask, up to the length of the buffer."""
    others: tuple[str, ...] = ()
    """The inputs that are none of these, such as what an encoder made."""
    past_length: str | None = None
    """The input (1) int32 with the number of earlier positions, in the place of a mask."""
    cross_keys: tuple[str, ...] = ()
    """The inputs (b, heads, positions, head_size) with keys that an encoder made, one for each layer; so are the next."""
    cross_values: tuple[str, ...] = ()
    logits_by_entry: bool = False
    """Whether there is one row of logits for each entry, with no axis of positions."""
    new_tokens: int | None = None
    """How many tokens are new in each step, where that is a number; None: as many as a caller gives."""
    counts_alike: bool = False
    """Whether positions are counted for all entries alike, so that a batch has prompts of one length."""
    convolutions: tuple[tuple[str, str], ...] = ()
    """The inputs (b, channels, positions) with states of convolutions, each with the output after the new tokens."""
    recurrences: tuple[tuple[str, str], ...] = ()
    """The inputs (b, heads, keys, values) with states of recurrences, likewise."""
    cache_windows: tuple[int | None, ...] = ()
    """For each layer the window that its buffer keeps no more than, and is no shorter than; None: it keeps all positions."""
    takes_chunks: bool = False
    """Whether a batch of several entries takes several new tokens of each on top of a cache."""
    pages: Pages | None = None
    """The inputs that tell requests apart where the cache is in pages and tokens have one axis; None: it is one buffer."""
    sizes: StepSizes | None = None
    """The sizes, where all of them are numbers; None: some are chosen when the model runs."""


def template(names: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    """Names as one with %d in the place of the layer's number, and the numbers; an empty name where they differ otherwise."""
    parts = [re.split(r"(\d+)", name) for name in names]
    first = parts[0]
    for place in range(1, len(first), 2):
        layers = tuple(part[place] if place < len(part) else "" for part in parts)
        rest = {tuple(part[:place] + part[place + 1 :]) for part in parts}
        if len(rest) == 1 and len(set(layers)) == len(layers) and all(str(int(item)) == item for item in layers):
            return "".join("%d" if at == place else item for at, item in enumerate(first)), tuple(map(int, layers))
    return "", ()


SLACK = 64
"""Positions that a cache has beyond its window: so the operator moves what it keeps once in so many steps, not in each."""


def layer_types(decoder: ServedDecoder) -> list[str] | None:
    """The kind of each layer, which the runtime wants where layers have the state of a convolution and no other."""
    if not decoder.convolutions or decoder.recurrences:
        return None
    cached = template(decoder.past_keys)[1]
    return ["full_attention" if layer in cached else "conv" for layer in range(max(layers_of(decoder)) + 1)]


def sliding_window(decoder: ServedDecoder) -> dict[str, Any] | None:
    """The length of caches that keep no more than a window, and their layers; the runtime has one length for all."""
    layers = template(decoder.past_keys)[1]
    windows = {layer: window for layer, window in zip(layers, decoder.cache_windows, strict=False) if window is not None}
    if not windows:
        return None
    kept = {"window_size": max(windows.values()), "cache_slack": SLACK, "layers": list(windows)}
    return {**kept, "slide_key_value_cache": False, "slide_inputs": False}


def cache_names(decoder: ServedDecoder) -> tuple[tuple[str, ...], ...]:
    """The names of caches, part by part."""
    crossed = (decoder.cross_keys, decoder.cross_values) if decoder.cross_keys else ()
    return decoder.past_keys, decoder.past_values, decoder.present_keys, decoder.present_values, *crossed


def templates(decoder: ServedDecoder) -> list[str]:
    """The names of each part of the cache as one, with %d in the place of the layer's number; none where there are no such."""
    found = [template(names) for names in cache_names(decoder)]
    (layers, *others) = {layers for _, layers in found}
    return [text for text, _ in found] if layers and not others else []


def layers_of(decoder: ServedDecoder) -> list[int]:
    """The numbers of the layers that have a cache or a state."""
    return [*template(decoder.past_keys)[1], *(layer for _, _, layers in states_of(decoder).values() for layer in layers)]


def states_of(decoder: ServedDecoder) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """The names of states before and after the new tokens, by the part that entries have for their kind, and their layers."""
    found = dict[str, tuple[str, str, tuple[int, ...]]]()
    for kind, states in (("conv", decoder.convolutions), ("recurrent", decoder.recurrences)):
        if states:
            (before, layers), (after, same) = (template(names) for names in zip(*states, strict=True))
            found[kind] = (before, after, layers) if layers == same else ("", "", ())
    return found
