"""Encoders of text and images: those of served models, with windows, rotations, relative positions and gated layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.whole.building import IDS, Whole, of_transformers
from benchmarks.whole.spec import Case, Port, Spec
from models.adapters import Flat, hidden

_SMALL: Mapping[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
_WORDS = 30000


def text(name: str, family: str, batch: int, seq: int, width: int, heads: int, settings: Mapping[str, Any], small: bool) -> Whole:
    """An encoder on a batch of texts of which half is padding.

    Args:
        name: What it is called in the tables.
        family: What the classes of its model and its configuration begin with.
        batch: Texts.
        seq: The longest.
        width: Channels of hidden states.
        heads: Heads.
        settings: The whole configuration.
        small: Whether it is the stand-in, for which `settings` are small already.
    """
    batch, seq = (2, 16) if small else (batch, seq)
    spec = Spec(
        name,
        (
            Port("input_ids", IDS, "ids", settings.get("vocab_size", _WORDS) if small else _WORDS),
            Port("attention_mask", IDS, "mask"),
        ),
        (Port("last_hidden_state", ("batch", "seq", width)),),
        (Case(f"{batch}x{seq}, half padding", {"batch": batch, "seq": seq}, padded=True),),
        "bert",
        heads,
        width,
        small,
    )
    names = tuple(port.name for port in spec.inputs)
    model = f"{family}EncoderModel" if family == "T5" else f"{family}Model"
    return Whole(spec, lambda: Flat(of_transformers(model, f"{family}Config", dict(settings)), names, hidden))


def images(name: str, family: str, batch: int, tokens: int, settings: Mapping[str, Any], small: bool) -> Whole:
    """An encoder on a batch of images of one size; the arguments are those of `text`, and the tokens of an image."""
    side, width, heads = settings["image_size"], settings["hidden_size"], settings["num_attention_heads"]
    spec = Spec(
        name,
        (Port("pixel_values", ("batch", 3, side, side)),),
        (Port("last_hidden_state", ("batch", tokens, width)),),
        (Case(f"{batch}x{tokens}", {"batch": batch, "seq": tokens}),),
        "vit",
        heads,
        width,
        small,
    )
    return Whole(
        spec, lambda: Flat(of_transformers(f"{family}Model", f"{family}Config", dict(settings)), ("pixel_values",), hidden)
    )


def xlm_roberta(small: bool) -> Whole:
    """XLM-RoBERTa-large, which embedders and rerankers are made of."""
    settings = {
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "pad_token_id": 1,
        **(_SMALL if small else {}),
    }
    return text("xlmr-large", "XLMRoberta", 16, 256, settings["hidden_size"], settings["num_attention_heads"], settings, small)


def modernbert(small: bool) -> Whole:
    """Twelve layers of ModernBERT-large."""
    settings = {
        "vocab_size": 50368,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "intermediate_size": 2624,
        **_SPECIAL,
        **(_SMALL if small else {}),
    }
    return text(
        "modernbert-12l", "ModernBert", 16, 512, settings["hidden_size"], settings["num_attention_heads"], settings, small
    )


def t5(small: bool) -> Whole:
    """The encoder of T5-base."""
    width, heads = (64, 4) if small else (768, 12)
    sizes = (
        {"d_kv": 16, "d_ff": 128, "num_layers": 2, "vocab_size": 999}
        if small
        else {"d_kv": 64, "d_ff": 3072, "num_layers": 12, "vocab_size": 32128}
    )
    settings = {"d_model": width, "num_heads": heads, "feed_forward_proj": "relu", **sizes}
    return text("t5-base-enc", "T5", 8, 512, width, heads, settings, small)


def dinov3(small: bool) -> Whole:
    """Twelve layers of DINOv3-H, whose class token and registers are not rotated."""
    width, heads, side, batch = (64, 4, 64, 2) if small else (1280, 20, 448, 8)
    settings = {
        "hidden_size": width,
        "num_hidden_layers": 2 if small else 12,
        "num_attention_heads": heads,
        "intermediate_size": 128 if small else 5120,
        "image_size": side,
        "patch_size": 16,
        "num_register_tokens": 4,
        "use_gated_mlp": True,
        "hidden_act": "silu",
    }
    return images("dinov3-h-12l", "DINOv3ViT", batch, (side // 16) ** 2 + 5, settings, small)


ENCODERS = (xlm_roberta, t5, modernbert, dinov3)
"""In the order of their memory."""
