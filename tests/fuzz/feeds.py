"""What graphs are run with: lengths that the library's own verification does not take, and hostile inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.fuzz.frame import GROWING, capacity
from tests.fuzz.recipe import Recipe
from tests.fuzz.writer import Given, Sizes
from tests.support.bundled import Array

PATTERNS = ("full", "right", "left", "holes", "empty", "large")
"""What masks keep: everything; a prefix or a suffix of each entry; most; nothing in one entry; most, where scores are large."""
_LARGE = 6.0
_SMALL = 0.5
"""What operands are multiplied by where scores are taken to be small: beside a mask number of float16, and in exponentials."""
_EMPTY = 0.2
"""How often a graph is run with a length of 0, too."""
GIVEN = -1e4
"""What leaves something of a score beside it."""
_PAST_CONSTANTS, _MIXED = 0.5, 0.3
"""How often static axes are longer than constants, and how often one bias masks with several numbers."""
_WINDOWED, _BYTE = frozenset(["window", "band", "sinks_window", "small_ints"]), 256
_TYPES = {
    "float32": np.float32, "float": np.float32, "float16": np.float16, "int64": np.int64, "int32": np.int32, "uint8": np.uint8,
    "bool": np.bool_,
}  # fmt: skip


def sizes_of(recipe: Recipe) -> list[Sizes]:
    """The lengths a recipe is run with; the first are those of static axes."""
    rng = np.random.default_rng((recipe.numbers, 1))
    found = [_sizes(recipe, rng, number) for number in range(1 if recipe.dims == "static" else 3)]
    if recipe.dims not in {"static", "batch", "step"} and recipe.assume == "none" and rng.random() < _EMPTY:
        found.append(dataclasses.replace(found[0], **_nothing(recipe, rng)))
    if recipe.dims == "batch":
        found = [Sizes(item.b, found[0].s, found[0].t, found[0].p) for item in found]
    if recipe.dims == "step":
        found = [dataclasses.replace(item, s=1, t=item.t if recipe.cache.startswith("static") else item.p + 1) for item in found]
    return found


def _nothing(recipe: Recipe, rng: np.random.Generator) -> dict[str, int]:
    """One length that is 0."""
    dim = str(rng.choice(("b", "s", "t")))
    if dim == "b" or recipe.cache != "none":
        return {"b": 0}
    return {dim: 0} if recipe.cross and recipe.dims != "shared" else {"s": 0, "t": 0}


def _sizes(recipe: Recipe, rng: np.random.Generator, number: int) -> Sizes:
    b = int(rng.choice((1, 2, 3, 4), p=(0.25, 0.35, 0.3, 0.1)))
    s = int(rng.choice((1, 2, 3, 4, 6, 9), p=(0.2, 0.1, 0.2, 0.2, 0.2, 0.1)))
    t = int(rng.choice((1, 2, 3, 4, 6, 8), p=(0.1, 0.1, 0.2, 0.2, 0.2, 0.2)))
    longer = number == 1 or (recipe.dims in {"static", "step"} and rng.random() < _PAST_CONSTANTS)
    beyond = _beyond(recipe) if longer else 0
    p = int(rng.choice((0, 1, 2, 5))) if number else int(rng.choice((0, 2, 4), p=(0.2, 0.4, 0.4)))
    if recipe.cache.startswith("static"):
        most = capacity(recipe)
        s = min(s, 4)
        return Sizes(b, s, most, min(beyond or p, most - s))
    if recipe.cache in GROWING:
        p, s = (beyond, 1 if recipe.dims == "step" else s) if number % 2 or recipe.dims == "step" else (p, s)
        return Sizes(b, s, p + s, p)
    s, t = beyond or s, beyond or t
    if recipe.dims == "shared" or not recipe.cross:
        t = s
    if recipe.batches != "same":
        b = max(b, 2)
    return Sizes(b, s, t, 0)


def _beyond(recipe: Recipe) -> int:
    """A length that no constant of the graph reaches; 0 where none is of consequence."""
    kinds = {kind for mask in recipe.masks for kind in ((mask.kind,) if mask.join == "none" else (mask.kind, mask.other))}
    tabled = kinds & {"table", "bias_table"} or any(mask.spelled == "table" for mask in recipe.masks)
    far = recipe.guard.startswith("renormalized") and any("alibi" in kind for kind in kinds)  # what is kept has no weight there
    if "small_ints" in kinds and not (tabled or far) and recipe.tables != "gathered" and recipe.layers == 1:
        return _BYTE + 2
    return recipe.window + 2 if kinds & _WINDOWED else 0


def feeds(recipe: Recipe, inputs: Mapping[str, Given]) -> Iterator[tuple[str, Sizes, dict[str, Array]]]:
    """Inputs to run with, each with its pattern and lengths: all patterns with the first lengths, some with the others."""
    every = sizes_of(recipe)
    patterns = _patterns(recipe)
    for number, sizes in enumerate(every):
        chosen = patterns if number == 0 else patterns[(number - 1) % len(patterns) :: 2]
        for pattern in chosen:
            if recipe.padding == "assume-none" and sizes.b > 1 and sizes.s > 1 and sizes.p:
                continue
            rng = np.random.default_rng((recipe.numbers, 2, number, PATTERNS.index(pattern)))
            if 0 in (sizes.b, sizes.s, sizes.t) and pattern not in {"full", "right"}:
                continue
            yield pattern, sizes, {name: filled(given, sizes, pattern, rng, recipe) for name, given in inputs.items()}


def _patterns(recipe: Recipe) -> tuple[str, ...]:
    """Those that the options do not exclude."""
    if recipe.padding == "assume-none":
        return ("full",)
    if recipe.padding == "assume-right":
        return ("full", "right")
    rounded = recipe.dtype == "float16" or recipe.journey.startswith("convert")  # large scores are of no accuracy there
    # what is said of these holds where no exponential overflows, nor all of a row vanish
    overflowing = recipe.softmax in {"exp", "logsumexp", "exp_max_of_all"}
    several = len(recipe.masks) > 1 or recipe.temperature != "none" or recipe.scale == "after_masks"
    several |= recipe.journey == "gradients"
    fills = {"-1e9" if mask.applied == "integers" else mask.fill for mask in recipe.masks}
    vanishing = several and "-1e9" in fills  # what is left of larger scores is not kept
    beyond = "-1000" in fills  # scores are larger than what is taken to mask them
    lost = recipe.guard.startswith("renormalized")  # what a mask keeps of the weights of large scores is not kept
    return PATTERNS[:-1] if rounded or overflowing or vanishing or beyond or lost else PATTERNS


def is_small(recipe: Recipe) -> bool:
    """Whether what is said of a model holds for small scores only: beside -1e4 in float16 they are level up to 4."""
    lost = recipe.guard.startswith("renormalized")  # what masks keep of larger scores
    return lost or (recipe.dtype == "float16" and recipe.ep == "cuda") or recipe.softmax in {"exp", "logsumexp"}


def filled(given: Given, sizes: Sizes, pattern: str, rng: np.random.Generator, recipe: Recipe) -> Array:
    """An array for an input."""
    shape = tuple(sizes.of(dim) for dim in given.dims)
    dtype = _TYPES[given.dtype]
    if given.role == "normal":
        ordinary = _SMALL if is_small(recipe) else 1.0
        return np.asarray(rng.standard_normal(shape) * (_LARGE if pattern == "large" and len(shape) > 2 else ordinary)).astype(
            dtype
        )
    if given.role == "number":
        return np.asarray(rng.uniform(0.4, 1.0 if is_small(recipe) else 2.5)).astype(dtype)
    if given.role == "mask":
        return _kept(shape, pattern, rng).astype(dtype)
    if given.role == "bias_mask":
        if pattern == "large":
            return rng.standard_normal(shape).astype(dtype)
        lowest = np.asarray(rng.choice(_encodings(recipe, dtype), shape if rng.random() < _MIXED else ()), dtype)
        return np.where(_kept(shape, pattern, rng), 0, lowest).astype(dtype)
    if given.role == "ids":
        return np.sort(rng.integers(0, 3, shape), axis=-1).astype(dtype)
    if given.role == "lengths":
        return _lengths(shape, sizes, pattern, rng, recipe).astype(dtype)
    if given.role == "positions":
        counted = sizes.p + np.arange(shape[-1])
        skipped = rng.integers(0, 3, (shape[0], 1)) if pattern == "left" else 0
        return np.broadcast_to(counted + skipped, shape).astype(dtype)
    return np.full(shape, sizes.p if given.role == "start" else int(rng.integers(-1, 3)), dtype)


def _encodings(recipe: Recipe, dtype: Any) -> list[float]:
    """Numbers that a bias may mask with."""
    if recipe.journey.startswith("convert"):
        return [-np.inf]  # the lowest float32 is no float16: whoever converts a model converts what it is fed
    found = [-np.inf, float(np.finfo(dtype).min), *((-1e9,) if dtype == np.float32 else ())]
    if dtype == np.float16 and len(recipe.masks) > 1:
        return found[:1]  # sums are float32 here and float16 there, and the lowest number has no sum
    return found if recipe.journey == "gradients" else [*found, GIVEN]


def _lengths(shape: tuple[int, ...], sizes: Sizes, pattern: str, rng: np.random.Generator, recipe: Recipe) -> Array:
    keys = sizes.t if recipe.cross or recipe.cache != "none" else sizes.s
    if pattern == "full":
        return np.full(shape, keys)
    found = rng.integers(1, max(keys, 1) + 1, shape)
    if pattern == "empty":
        found[-1] = 0
    return found


def _kept(shape: tuple[int, ...], pattern: str, rng: np.random.Generator) -> Array:
    """True where a mask keeps a key; the first axis is the batch, the last the keys."""
    kept = np.ones(shape, bool)
    keys = shape[-1]
    if not kept.size:
        return kept
    if pattern in {"holes", "large"}:
        kept = rng.random(shape) < 0.6
        kept[..., rng.integers(keys)] = True
    for entry in range(shape[0] if pattern in {"right", "left"} else 0):
        count = int(rng.integers(1, keys + 1))
        kept[entry, ..., slice(count, None) if pattern == "right" else slice(0, keys - count)] = False
    if pattern == "empty":
        kept = rng.random(shape) < 0.8
        if len(shape) > 2 and shape[-2] > 1 and rng.random() < 0.5:
            kept[-1, ..., rng.integers(shape[-2]), :] = False
        else:
            kept[-1] = False
    return kept
