"""Whole models with all forms that are written for CUDA, without each of them, and without all; captured and launched.

The models are those of `python -m benchmarks.exports whole FOLDER`. A form that leaves a model as it is has no cell.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_gpu.whole import races_of, sources
from benchmarks.whole.variants import GRAPH

MODELS = ("bert-base", "xlmr-large", "t5-base-enc", "vit-l-224", "gpt2-medium", "modernbert-12l", "dinov3-h-12l")
FORMS = ("fused-products", "split-products", "any-by-sum", "whole-rotations", "paired-rotations", "rotated-rows", "half-gelu")
"""The rules that are left out, each by itself."""
PACKED = {
    "launched": {"packed": "target=packed", "packed, right": "target=packed padding=assume-right"},
    "captured": {name: f"target=packed packed_tokens={rows}" for name, rows in (("packed", "kept"), ("packed, roomy", "roomy"))},
}
"""What models with padding are written with besides."""


def columns(way: str, *, padded: bool) -> dict[str, str]:
    """The variants of a model by the names of their columns."""
    more = {"all": "", **{f"no {form}": f"without={form}" for form in FORMS}, "none": f"without={','.join(FORMS)}"}
    if padded:
        more |= {"right": "padding=assume-right", **PACKED[way]}
    if way == "captured":
        return {name: f"ours cuda_graph=true dim=typical {words}".strip() + GRAPH for name, words in more.items()}
    return {name: f"ours {words}".strip() for name, words in more.items()} | {"export": "plain"}


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model, captured and launched."""
    for name, (whole, source) in sources(setting).items():
        first = dataclasses.replace(whole, cases=whole.cases[:1])
        for way in ("captured", "launched")[not setting.cuda :] if name in MODELS else ():
            yield from races_of(first, source, columns(way, padded=whole.cases[0].padded), setting, f", {way}")


BENCHMARK = Benchmark("Forms for CUDA in whole models", races)
