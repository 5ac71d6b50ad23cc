"""Whole models on the CPU, in real widths and few layers: ours, the export, and what other tools and torch make of it.

The folder has the exports; those that are missing are made. Of eight texts half of the tokens are padding. Ours comes first: a
number above 1 is a row that another column wins.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_gpu.whole import races_of
from benchmarks.whole import exports, zoo
from benchmarks.whole.spec import Case, Whole

COLUMNS = ("ours", "plain", "onnxruntime", "onnxscript", "transformers", "compile", "openvino f32", "openvino")
BATCHES, LENGTHS, PASTS, PROMPT = (1, 8), (16, 128, 512), (128, 512), 128
_LAYERS, _WORDS, _MOST = 3, 8192, 4096
_BASE: dict[str, Any] = {"num_hidden_layers": _LAYERS, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_DEBERTA = {"relative_attention": True, "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
_XLMR = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "vocab_size": 30000}
_MODERN = {"intermediate_size": 1152, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1}
_T5 = {"d_model": 768, "num_heads": 12, "d_kv": 64, "d_ff": 3072, "num_layers": _LAYERS, "feed_forward_proj": "relu"}
_SMALL_T5 = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "num_layers": 2}
_CLASSES = "ForSequenceClassification"
ENCODERS = (
    zoo.Encoder("bert-base", "Bert", 8, 512, _BASE),
    zoo.Encoder("xlm-r-classifier", "XLMRoberta", 8, 512, _BASE | _XLMR, model=_CLASSES),
    zoo.Encoder("modernbert", "ModernBert", 8, 512, _BASE | _MODERN | {"sep_token_id": 1}),
    zoo.Encoder("modernbert-classifier", "ModernBert", 8, 512, _BASE | _MODERN | {"sep_token_id": 1}, model=_CLASSES),
    zoo.Encoder("deberta-v3", "DebertaV2", 8, 512, _BASE | _DEBERTA | {"pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}),
    zoo.Encoder("vit", "ViT", 8, 0, {**_BASE, "image_size": 224, "patch_size": 16}, {**_BASE, "image_size": 32}),
    zoo.Encoder("t5-encoder", "T5", 8, 512, _T5, _SMALL_T5, "EncoderModel"),
)
DECODERS = (
    zoo.Decoder("gpt2", "GPT2", (12, 12), 64, (_LAYERS, 768, 3072, _WORDS), model="LMHeadModel"),
    *(
        dataclasses.replace(decoder, sizes=(_LAYERS, *decoder.sizes[1:3], _WORDS))
        for decoder in zoo.DECODERS
        if decoder.name != "qwen3-moe"
    ),
)
QUANTISED = {"bert-base": 8, "llama-1b": 4, "qwen3-0.6b": 4}


def models(*, small: bool) -> Iterator[Whole]:
    """All models in float32, some of them with quantised weights besides."""
    texts = [Case(f"{b}x{n}", {"batch": b, "seq": n}, padded=b > 1) for b, n in itertools.product(BATCHES, LENGTHS)]
    steps = [Case(f"step {b}x1 at {n}", {"batch": b, "seq": 1, "past": n}) for b, n in itertools.product(BATCHES, PASTS)]
    steps += [Case(f"prompt {b}x{PROMPT}", {"batch": b, "seq": PROMPT, "past": 0}) for b in BATCHES]
    for whole in (
        *(zoo.encoded(encoder, small=small) for encoder in ENCODERS),
        zoo.whisper("encoder", small=small, layers=_LAYERS),
        *(zoo.cached(decoder, small=small) for decoder in DECODERS),
    ):
        first = whole.cases[0]
        seq = first.sizes["seq"]
        fixed = [Case(f"{b}x{seq}", {"batch": b, "seq": seq}) for b in (min(b, _MOST // seq) for b in BATCHES)]
        cases = steps if "past" in first.sizes else texts if first.padded else fixed
        made = dataclasses.replace(whole, cases=tuple(cases[:2] if small else cases), dtype="float32")
        yield made
        if whole.name in QUANTISED:
            bits = QUANTISED[whole.name]
            yield dataclasses.replace(made, name=f"{whole.name}-int{bits}", bits=bits)


def races(setting: Setting) -> Iterator[Race]:
    """A row for each case of a model."""
    torch.set_num_threads(setting.threads or torch.get_num_threads())
    columns = setting.columns.split(";") if setting.columns else COLUMNS
    for whole in models(small=setting.quick):
        if any(setting.only in f"{whole.name}, {case.label}" for case in whole.cases):
            source = exports.export(whole, setting.folder)
            exports.fill(source)
            yield from races_of(whole, source, {label: label for label in columns}, setting)


BENCHMARK = Benchmark("Whole models on the CPU", races)
