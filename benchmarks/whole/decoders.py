"""Decoders with a cache: heads that share keys and values, biases, normalized queries and keys, windows, experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.whole.building import IDS, MASK, Whole, of_transformers
from benchmarks.whole.spec import Case, Port, Spec
from models.adapters import Cached, logits


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder of transformers.

    Attributes:
        name: What it is called in the tables.
        family: What the classes of its model and its configuration begin with.
        heads: Heads of queries, and of keys and values.
        head_size: Channels of a head.
        layers: How many there are.
        width: Channels of hidden states.
        inner: Channels between the two products of a layer.
        vocabulary: Tokens.
        settings: What else its configuration says.
        small: What the stand-in's configuration says in the place of that.
        config: What the class of its configuration begins with, where that differs from `family`.
        prompts: Entries of the batches of prompts.
    """

    name: str
    family: str
    heads: tuple[int, int]
    head_size: int
    layers: int
    width: int
    inner: int
    vocabulary: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    config: str = ""
    prompts: tuple[int, ...] = (1, 8)


_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 64, "experts_implementation": "batched_mm"}
"""Each token gathers the weights of its experts: the only form that torch exports. A loop over the experts that are hit fails, as
their number is not known, and `grouped_mm` has no form in ONNX."""
DECODERS = (
    Decoder("qwen2-0.5b", "Qwen2", (14, 2), 64, 24, 896, 4864, 151936, _TIED),
    Decoder("qwen3-0.6b", "Qwen3", (16, 8), 128, 28, 1024, 3072, 151936, {**_TIED, "head_dim": 128}, {"head_dim": 16}),
    Decoder(
        "gemma3-1b",
        "Gemma3",
        (4, 1),
        256,
        26,
        1152,
        6912,
        262144,
        {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512},
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
        config="Gemma3Text",
    ),
    Decoder(
        "qwen3-moe",
        "Qwen3Moe",
        (16, 4),
        64,
        12,
        1024,
        3072,
        32000,
        {**_EXPERTS, "num_experts": 16, "moe_intermediate_size": 768},
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
        prompts=(1,),
    ),
    Decoder("llama-1b", "Llama", (32, 4), 64, 22, 2048, 5632, 32000),
)
"""In the order of their memory."""


def cached(decoder: Decoder, small: bool) -> Whole:
    """A decoder with its cache; the past may be empty."""
    heads, kv_heads = (4, 2) if small else decoder.heads
    layers, width, inner, vocabulary = (
        (2, 64, 128, 999) if small else (decoder.layers, decoder.width, decoder.inner, decoder.vocabulary)
    )
    head = 16 if small else decoder.head_size
    past, steps = (16, 4) if small else (512, 128)
    parts = [f"{part}_{layer}" for layer in range(layers) for part in ("key", "value")]
    inputs = (
        Port("input_ids", IDS, "ids", vocabulary),
        Port("attention_mask", MASK, "mask"),
        Port("position_ids", IDS, "positions"),
        *(Port(f"past_{part}", ("batch", kv_heads, "past", head)) for part in parts),
    )
    outputs = (
        Port("logits", ("batch", "seq", vocabulary)),
        *(Port(f"present_{part}", ("batch", kv_heads, "past+seq", head)) for part in parts),
    )
    prefill = [Case(f"prefill {batch}x{past}", {"batch": batch, "seq": past, "past": 0}) for batch in decoder.prompts]
    decode = [Case(f"decode {batch}x1 at {past}", {"batch": batch, "seq": 1, "past": past}, steps=steps) for batch in (1, 8)]
    spec = Spec(decoder.name, inputs, outputs, (prefill[0], *decode, *prefill[1:]), "qwen3", heads, width, small)
    settings = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **decoder.settings,
        **(decoder.small if small else {}),
    }
    names = tuple(port.name for port in inputs)
    config = f"{decoder.config or decoder.family}Config"
    return Whole(spec, lambda: Cached(of_transformers(f"{decoder.family}ForCausalLM", config, settings), names, logits))
