"""The layers of a decoder as onnxruntime-genai wants to know them: names of their caches and states, their kinds and windows."""

from __future__ import annotations

from typing import Any

from onnx_attnfuse.serving.decoder import ServedDecoder, template

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
