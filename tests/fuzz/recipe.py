"""What a generated graph is made of: named choices, of which each has a simplest one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

Table = Mapping[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Mask:
    """One mask, or one bias, on the scores."""

    kind: str = "padding"
    """Which keys a row sees, or which bias is added (`BIASES`)."""
    spelled: str = "compare"
    """How that is computed, for kinds that have several spellings."""
    dtype: str = "bool"
    """Element type of the input it is made from."""
    join: str = "none"
    """How a second kind is joined to the first."""
    other: str = "causal"
    """That second kind."""
    applied: str = "where"
    """How the scores are changed by it."""
    fill: str = "lowest"
    """What it puts in the place of a score, or adds to it."""
    rows: str = "offset"
    """How positions of queries are counted where keys come before them."""
    cut: str = "none"
    """Cut to as many columns as there are keys, before or after these are repeated over heads."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One graph, the sizes it runs with, and what is done to it."""

    numbers: int = 0
    """Seed of all numbers: sizes, weights, tables, inputs."""
    dtype: str = "float32"
    opset: int = 18
    layers: int = 1
    kv_heads: int = 2
    group: int = 1
    """Heads of queries for each of keys."""
    size: int = 4
    v_size: int = 4
    source: str = "heads"
    """What queries, keys and values come from."""
    cross: bool = False
    reshapes: str = "zeros"
    """How the shapes of reshapes are written."""
    product: str = "four"
    """Rank and operator of the products."""
    keys: str = "swapped"
    """How keys are transposed."""
    joined: str = "flat"
    """What becomes of the result."""
    scale: str = "mul"
    repeat: str = "expand"
    """How heads of keys are repeated."""
    cache: str = "none"
    norm: str = "none"
    """How heads of queries and keys are normalized."""
    rotary: str = "none"
    tables: str = "positions"
    """Where cosines and sines come from."""
    masks: tuple[Mask, ...] = ()
    chain: str = "each"
    """Masks are applied one by one, or summed or joined by a minimum or a maximum first."""
    floor: str = "lowest"
    """Where sums of masks are cut off, in chains that do."""
    window: int = 3
    """Keys that masks with a window see; one of the lengths is longer."""
    shared: bool = True
    """Layers share one mask."""
    cap: str = "none"
    temperature: str = "none"
    between: str = "own"
    """The type between the products: the graph's own, or a wider or narrower one."""
    operator: str = "none"
    """Attention of ai.onnx in the place of products, masks and softmax: with heads as an axis, flat, or with a cache inside."""
    softmax: str = "softmax"
    guard: str = "none"
    sink: str = "none"
    weights_used: bool = False
    dims: str = "symbolic"
    """How lengths are declared."""
    ones: str = ""
    """Axes (b, h, s) of masks and biases with a symbol of their own, which is 1 at run time."""
    batches: str = "same"
    """Queries and keys may have a symbol each for the batch; one of them may be 1."""
    function: str = "none"
    """What stands in functions of the model."""
    ep: str = "cpu"
    target: str = "auto"
    padding: str = "auto"
    assume: str = "all"
    """What is taken for granted; with `none` lengths of 0 are run, too."""
    always: bool = True
    keep_outputs: bool = False
    hint: int = 0
    """A length that symbolic dimensions are said to have; 0: none."""
    any_size: bool = False
    """Let forms that are faster for large inputs only run here, too."""
    journey: str = "optimize"

    @property
    def heads(self) -> int:
        """Heads of the queries."""
        return self.kv_heads * self.group

    def line(self) -> str:
        """One line of JSON: all that is not the simplest."""
        return json.dumps(_changed(self))


def read(line: str) -> Recipe:
    """The recipe of a line."""
    given = json.loads(line)
    masks = tuple(Mask(**mask) for mask in given.pop("masks", ()))
    return Recipe(masks=masks, **given)


def _changed(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != field.default:
            found[field.name] = [_changed(mask) for mask in value] if field.name == "masks" else value
    return found


KINDS = (
    "padding", "causal", "window", "band", "prefix", "blocks", "documents", "lengths", "given", "table", "sinks_window",
    "parity", "small_ints", "bits", "self", "first", "prefix_given",
)  # fmt: skip
BIASES = ("given_bias", "alibi", "relative", "bias_table", "alibi_keys", "distance")
MASK_CHOICES: Table = {
    "kind": KINDS + BIASES,
    "spelled": (
        "compare", "strict", "sub", "trilu", "triu_fill", "table", "trilu_runtime", "cumsum", "gather", "late", "gather_nd",
    ),
    "dtype": ("bool", "int64", "int32", "float", "uint8"),
    "join": ("none", "and", "or", "and_not", "xor", "mul", "bit_and", "where"),
    "other": KINDS,
    "applied": (
        "where", "add_where", "where_not", "add_scaled", "sub_scaled", "mixed", "inverted", "log", "floor", "mul", "min",
        "branches", "mixed_branches", "in_place", "integers",
    ),
    "fill": ("lowest", "-inf", "-1e9", "-1e4", "-65504", "-1e5", "-1000", "-100", "-30000", "nan", "-1", "-1e6", "-1e8", "-50"),
    "rows": ("offset", "slice", "zero"),
    "cut": ("none", "repeated", "keys"),
}  # fmt: skip
CHOICES: Table = {
    "dtype": ("float32", "float16"),
    "opset": (18, 17, 14, 13, 12, 11, 20, 21, 23, 24, 25),
    "layers": (1, 2, 3),
    "kv_heads": (2, 1, 3, 0),
    "group": (1, 2, 3),
    "size": (4, 8, 2, 3, 16),
    "v_size": (4, 8, 3, 5, 2, 16),
    "source": (
        "heads", "flat", "flat_heads", "sequence", "projected", "packed_split", "packed_slice", "packed_five", "packed_heads",
    ),
    "cross": (False, True),
    "reshapes": ("zeros", "minus", "shapes", "literal"),
    "product": ("four", "three", "einsum", "three_runtime", "keys_first"),
    "keys": ("swapped", "direct", "three", "joined_heads"),
    "joined": ("flat", "heads", "projected", "sequence"),
    "scale": (
        "mul", "none", "div", "before_q", "before_k", "both", "both_runtime", "sqrt_runtime", "negative", "given", "after_masks",
        "q_div", "odd",
    ),
    "repeat": ("expand", "tile", "gather", "concat", "five", "expand_shapes"),
    "cache": ("none", "concat", "concat_flat", "stacked", "transposed", "static", "static_elements", "static_operator"),
    "norm": ("none", "operator", "spelled"),
    "rotary": ("none", "halves", "interleaved", "partial", "strided", "operator"),
    "tables": ("positions", "range", "gathered"),
    "chain": ("each", "summed", "summed_floor", "summed_clip", "min", "max", "each_floor", "each_clip"),
    "floor": ("lowest", "-inf", "-1e9", "-1e4", "-65504", "-1e6", "-100", "-50"),
    "window": (3, 1, 2, 8, 40, 70),
    "shared": (True, False),
    "cap": ("none", "before", "after"),
    "temperature": ("none", "before", "after"),
    "between": ("own", "wide", "wide_product", "narrow", "rounded"),
    "operator": ("none", "heads", "flat", "past"),
    "softmax": (
        "softmax", "axis3", "upcast", "exp_max", "exp", "logsumexp", "log_softmax",
        "exp_max_of_all", "exp_max_of_columns", "exp_inverse",
    ),
    "guard": (
        "none", "isnan", "isnan_result", "times_mask", "where_mask", "plus_epsilon", "renormalized", "renormalized_softly",
    ),
    "sink": ("none", "column", "column_max", "zero", "column_first", "column_split"),
    "weights_used": (False, True),
    "dims": ("symbolic", "static", "batch", "anonymous", "shared", "total", "expression", "apart", "step"),
    "ones": ("", "b", "h", "s", "bh", "bhs"),
    "batches": ("same", "query_one", "keys_one", "named_apart"),
    "function": ("none", "layers", "nested", "whole"),
    "ep": ("cpu", "cuda"),
    "target": ("auto", "MultiHeadAttention", "GroupQueryAttention", "Attention", "onnx.Attention", "packed"),
    "padding": ("auto", "exact", "guarded", "assume-right", "assume-none"),
    "assume": ("all", "none"),
    "always": (True, False),
    "keep_outputs": (False, True),
    "hint": (0, 1, 64, 4096),
    "any_size": (False, True),
    "journey": ("optimize", "optimize_enabled", "twice", "unfuse", "convert", "convert_optimize", "gradients"),
}  # fmt: skip
_PLAIN: Mapping[str, float] = {
    "layers": 0.85, "opset": 0.4, "source": 0.3, "scale": 0.35, "cache": 0.7, "rotary": 0.8, "cap": 0.92, "temperature": 0.93,
    "softmax": 0.75, "guard": 0.75, "sink": 0.93, "weights_used": 0.95, "dims": 0.4, "ones": 0.75, "batches": 0.95, "ep": 0.75,
    "target": 0.5, "padding": 0.7, "assume": 0.9, "always": 0.85, "keep_outputs": 0.93, "hint": 0.85, "any_size": 0.6,
    "journey": 0.75, "dtype": 0.8, "cross": 0.85, "group": 0.7, "chain": 0.6, "floor": 0.5, "window": 0.7,
    "norm": 0.9, "operator": 0.85, "function": 0.8, "shared": 0.7, "size": 0.5, "v_size": 0.7,
    "between": 0.85, "applied": 0.3, "fill": 0.25, "kind": 0.12, "other": 0.1, "join": 0.7, "spelled": 0.4, "rows": 0.6,
    "cut": 0.85, "dtype of mask": 0.4,
}  # fmt: skip
"""How often the simplest is drawn; else all others are equally likely. What is not named: half of the time."""


_HEADLESS = 0.1
"""How often no heads at all are left as they are drawn."""


def draw(seed: int) -> Recipe:
    """The recipe of a seed."""
    rng = np.random.default_rng(seed)
    fields = {name: _drawn(rng, choices, _PLAIN.get(name, 0.5)) for name, choices in CHOICES.items()}
    if not fields["kv_heads"] and rng.random() > _HEADLESS:
        fields["kv_heads"] = 2
    masks = tuple(_mask(rng) for _ in range(int(rng.choice(4, p=(0.15, 0.5, 0.25, 0.1)))))
    return consistent(Recipe(numbers=int(rng.integers(1 << 16)), masks=masks, **fields))


def _mask(rng: np.random.Generator) -> Mask:
    fields = {
        name: _drawn(rng, choices, _PLAIN["dtype of mask"] if name == "dtype" else _PLAIN[name])
        for name, choices in MASK_CHOICES.items()
    }
    return Mask(**fields)


def _drawn(rng: np.random.Generator, choices: tuple[Any, ...], plain: float) -> Any:
    return choices[0] if rng.random() < plain else choices[int(rng.integers(1, len(choices)))]


_CHAINED = frozenset(["heads", "flat", "flat_heads", "sequence", "projected", "packed_split", "packed_slice", "packed_five"])
_CACHED_SOURCES = frozenset(["heads", "flat", "projected", "packed_split", "packed_slice", "packed_five", "packed_heads"])


def consistent(recipe: Recipe) -> Recipe:
    """The recipe with choices taken back that do not go together."""
    for settled in (_of_heads, _of_journey, _of_source, _of_operator, _of_sizes, _of_softmax, _of_halves):
        recipe = dataclasses.replace(recipe, **settled(recipe))
    masks = tuple(_consistent(mask) for mask in recipe.masks)
    if recipe.padding.startswith("assume") or recipe.target == "packed":
        masks = tuple(map(_of_padding, masks))
    if recipe.journey.startswith("convert"):
        masks = tuple(dataclasses.replace(mask, fill="-1e9") if mask.fill == "-1e8" else mask for mask in masks)
    recipe = dataclasses.replace(recipe, masks=masks)
    return dataclasses.replace(recipe, opset=max(recipe.opset, _least_opset(recipe)))


def _of_journey(recipe: Recipe) -> dict[str, Any]:
    if recipe.journey == "gradients":
        return _differentiable(recipe)
    return {"dtype": "float32"} if recipe.journey.startswith("convert") else {}


def _of_heads(recipe: Recipe) -> dict[str, Any]:
    """Without heads hardly any spelling runs: reshapes divide by their number."""
    if recipe.kv_heads:
        return {}
    plain = {
        "operator": "none",
        "norm": "none",
        "source": "heads",
        "product": "four",
        "keys": "swapped",
        "joined": "heads",
        "cache": "none",
        "layers": 1,
        "group": 1,
    }
    return plain | {"target": "auto" if recipe.target == "packed" else recipe.target, "sink": "none"}


def _of_source(recipe: Recipe) -> dict[str, Any]:
    """Where operands come from decides what can be done with them."""
    if recipe.target == "packed":
        source = "packed_split" if recipe.source.startswith("packed") else "projected"
        return {
            "ep": "cuda", "layers": max(recipe.layers, 2), "batches": "same", "cache": "none", "cross": False, "joined": "flat",
            "source": source,
        }  # fmt: skip
    changes: dict[str, Any] = {}
    if recipe.source.startswith("packed") or recipe.cache != "none" or recipe.rotary != "none":
        changes["cross"] = False
    if recipe.source in {"packed_five", "packed_heads"}:
        changes["group"] = 1
    if recipe.source not in _CACHED_SOURCES:
        changes["cache"] = "none"
    if recipe.source not in _CHAINED:
        changes["layers"] = 1
    apart = recipe.source in {"heads", "flat"} and recipe.cache == "none" and recipe.product == "four" and recipe.layers == 1
    return changes if apart else changes | {"batches": "same"}


def _of_halves(recipe: Recipe) -> dict[str, Any]:
    """Scores of float16 that vanish beside a mask number on a GPU are scaled."""
    large = recipe.dtype == "float16" and recipe.ep == "cuda" and recipe.scale == "none"
    pairs = (("narrow", "wide"), ("rounded", "wide_product"))
    between = dict(pairs if recipe.dtype == "float16" else [(wide, narrow) for narrow, wide in pairs]).get(
        recipe.between, recipe.between
    )
    plain = recipe.journey.startswith("convert") or recipe.journey == "gradients"
    plain |= any(mask.applied == "in_place" for mask in recipe.masks)  # ONNX Runtime rounds there once less than is written
    return {"between": "own" if plain else between} | ({"scale": "mul"} if large else {})


def _of_operator(recipe: Recipe) -> dict[str, Any]:
    """What an attention in one node can say."""
    if recipe.operator == "none":
        return {}
    plain = recipe.scale in {"given", "after_masks", "div", "sqrt_runtime", "negative"}
    found: dict[str, Any] = {"product": "four", "keys": "swapped", "sink": "none", "temperature": "none", "softmax": "softmax"}
    found |= {"between": "own", "batches": "same", "scale": "mul" if plain else recipe.scale}
    if recipe.dtype == "float16" or recipe.journey.startswith("convert"):
        found["ep"] = "cpu"  # how a GPU rounds inside of an operator is not what the reference says
    found["guard"] = recipe.guard if recipe.guard == "isnan_result" else "none"
    if recipe.operator == "past" and recipe.cache != "concat":
        found["operator"] = "heads"
    return found


def _of_sizes(recipe: Recipe) -> dict[str, Any]:
    """Channels that have to agree."""
    size = {2: 4, 3: 4}.get(recipe.size, recipe.size) if recipe.rotary != "none" else recipe.size
    first = recipe.dims == "step" and (recipe.cross or recipe.cache == "none")  # queries of another length than keys
    same = recipe.source in {"packed_five", "packed_heads"} or recipe.layers > 1 or recipe.cache == "stacked"
    return {"size": size, "v_size": size if same else recipe.v_size, "dims": "symbolic" if first else recipe.dims}


def _of_softmax(recipe: Recipe) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if recipe.sink != "none" and recipe.softmax not in {"softmax", "axis3", "upcast"}:
        changes["softmax"] = "softmax"
    elif recipe.softmax in {"exp", "logsumexp", "exp_max_of_all", "exp_max_of_columns"}:
        changes["layers"] = 1  # so that no exponential overflows, see `feeds`
    if recipe.product == "keys_first" and (recipe.softmax != "softmax" or recipe.sink != "none"):
        changes["product"] = "four"
    if recipe.layers > 1 and recipe.joined == "sequence":
        changes["joined"] = "flat"
    return changes


def _differentiable(recipe: Recipe) -> dict[str, Any]:
    """Choices taken back so that there is a gradient."""
    found: dict[str, Any] = {"dtype": "float32", "opset": 17, "layers": 1, "dims": "static", "batches": "same", "cache": "none"}
    found |= {"target": "auto", "rotary": "none", "sink": "none", "weights_used": False, "repeat": "expand", "ones": ""}
    found |= {"operator": "none", "norm": "none", "function": "none"}
    found["softmax"] = recipe.softmax if recipe.softmax in {"softmax", "axis3"} else "softmax"
    found["product"] = recipe.product if recipe.product in {"four", "three", "three_runtime"} else "four"
    found["source"] = recipe.source if recipe.source not in {"packed_five", "packed_slice"} else "packed_split"
    return found


def _consistent(mask: Mask) -> Mask:
    if mask.kind in BIASES:
        return dataclasses.replace(mask, join="none", other="causal", spelled="compare", applied="where", fill="lowest")
    return mask if mask.join != "none" else dataclasses.replace(mask, other="causal")


def _of_padding(mask: Mask) -> Mask:
    """A mask that masks padding if anything that is given at run time, as is then taken for granted."""
    kind = "padding" if mask.kind == "documents" else mask.kind
    return dataclasses.replace(mask, kind=kind, join="none", other="causal")


def _least_opset(recipe: Recipe) -> int:
    least = 12 if recipe.product == "einsum" else 11
    if recipe.operator != "none" or "operator" in {recipe.norm, recipe.rotary}:
        least = 23
    if recipe.cache == "static_operator":
        least = 24
    for mask in recipe.masks:
        kinds = {mask.kind} if mask.join == "none" else {mask.kind, mask.other}
        if "causal" in kinds and mask.spelled in {"trilu", "triu_fill", "trilu_runtime"}:
            least = max(least, 14)
        if "bits" in kinds or mask.join == "bit_and":
            least = max(least, 18)
    return least
