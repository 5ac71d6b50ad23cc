"""Small models of transformers as they are trained: relative positions, slopes, soft caps, windows, cross attention, towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hub

VOCABULARY, BATCH, LENGTH = 99, 3, 12
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_DECODER: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, **_SIZES}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "use_cache": False, "decoder_start_token_id": 1, **_TOKENS,
}  # fmt: skip
Inputs = dict[str, torch.Tensor]


def _mask(padding: str) -> Inputs:
    if padding == "none":
        return {}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, slice(*{"right": (LENGTH // 2, None), "left": (0, LENGTH // 2)}[padding])] = 0
    mask[1, -2 if padding == "right" else 1] = 0
    return {"attention_mask": mask}


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(padding: str) -> Inputs:
    """Tokens, with every padding."""
    return {
        "input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2)),
        **_mask(padding),
    }


def pairs(padding: str) -> Inputs:
    """Tokens for an encoder and a decoder."""
    return {**tokens(padding), "decoder_input_ids": tokens("none")["input_ids"].flip(1)}


def images(padding: str) -> Inputs:
    """Images, which have no padding."""
    return {"pixel_values": _numbers(BATCH, 3, 16, 16)}


def both(padding: str) -> Inputs:
    """Tokens and images."""
    return {**tokens(padding), **images(padding)}


def sounds(padding: str) -> Inputs:
    """Spectrograms, and tokens for a decoder."""
    found = {f"decoder_{name}": item for name, item in tokens(padding).items()}
    return {"input_features": _numbers(BATCH, 8, 20), **found}


def _of(model: str, config: str, /, **sizes: Any) -> Callable[[str], torch.nn.Module]:
    """A model for a spelling of attention."""

    def make(spelling: str) -> torch.nn.Module:
        given = {"attn_implementation": spelling, **sizes}
        return getattr(hub, model)(getattr(hub, config)(**given))

    return make


_ALIBI: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False}
_T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
_DEBERTA: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pos_att_type": ["p2c", "c2p"], **_SIZES}
_SWIN: dict[str, Any] = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
_GEMMA: dict[str, Any] = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, **_DECODER}
_IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 4}
_DINO: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_IMAGES}
_CLIP: dict[str, Any] = {
    "text_config": {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **_TOKENS, **_SIZES},
    "vision_config": {**_IMAGES, **_SIZES},
}
MODELS: dict[str, tuple[Callable[[str], torch.nn.Module], Callable[[str], Inputs]]] = {
    "t5": (_of("T5ForConditionalGeneration", "T5Config", use_cache=False, **_T5), pairs),
    "deberta": (_of("DebertaV2Model", "DebertaV2Config", relative_attention=True, **_DEBERTA), tokens),
    "swin": (_of("SwinModel", "SwinConfig", image_size=16, patch_size=2, **_SWIN), images),
    "mistral": (_of("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=4, **_DECODER), tokens),
    "gemma2": (_of("Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, **_GEMMA), tokens),
    "qwen3": (_of("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=2, head_dim=8, **_DECODER), tokens),
    "bart": (_of("BartModel", "BartConfig", vocab_size=VOCABULARY, max_position_embeddings=64, **_SEQ2SEQ), pairs),
    "dinov2 with registers": (
        _of("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", num_register_tokens=3, **_DINO), images,
    ),
    "clip": (_of("CLIPModel", "CLIPConfig", projection_dim=16, **_CLIP), both),
    "whisper": (
        _of("WhisperModel", "WhisperConfig", vocab_size=VOCABULARY, num_mel_bins=8, max_source_positions=10, **_SEQ2SEQ), sounds,
    ),
    "gpt-neox": (_of("GPTNeoXForCausalLM", "GPTNeoXConfig", max_position_embeddings=64, **_DECODER), tokens),
    "falcon": (_of("FalconForCausalLM", "FalconConfig", alibi=False, **_DECODER), tokens),
    "falcon, alibi": (_of("FalconForCausalLM", "FalconConfig", alibi=True, **_DECODER), tokens),
    "mpt": (_of("MptForCausalLM", "MptConfig", d_model=32, n_heads=4, n_layers=2, max_seq_len=64, **_ALIBI), tokens),
    "bloom": (_of("BloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=4, **_ALIBI), tokens),
}  # fmt: skip
"""A model for a spelling, and its inputs for a padding."""
EAGER_ONLY = frozenset(["deberta", "gemma2", "mpt", "bloom"])
"""Models that have one spelling only."""
IN_SINGLE = frozenset(["mistral", "gemma2", "qwen3", "clip", "gpt-neox", "mpt", "bloom", "swin"])
"""Models whose eager spelling takes the softmax in float32, whatever the type."""
CASES = [
    (name, spelling, padding)
    for name, (_, inputs) in MODELS.items()
    for spelling in ("eager", "sdpa")
    if spelling == "eager" or name not in EAGER_ONLY
    for padding in ("none", "right", "left")
    if padding == "none" or inputs is not images
]


def model(name: str, spelling: str) -> torch.nn.Module:
    """A model in training mode without dropout, its parameters always the same."""
    torch.manual_seed(0)
    made = MODELS[name][0](spelling).train()
    for part in made.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name_of_share in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, name_of_share, None), float):
                setattr(part, name_of_share, 0.0)
    single = spelling == "eager" and name in IN_SINGLE
    return made.to(torch.float32 if single else torch.float64)
