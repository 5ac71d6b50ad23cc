"""From a recipe to a model: scores, softmax, result, layer after layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from tests.fuzz.frame import Frame
from tests.fuzz.functions import Outliner, Span
from tests.fuzz.masks import Masks
from tests.fuzz.operands import Sources
from tests.fuzz.operators import CAP, Operator
from tests.fuzz.recipe import BIASES, Recipe
from tests.fuzz.writer import Dims, Given, Operand, Sizes, Writer

_WIDTH = 6
"""Channels behind the last projection."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A model and what its inputs are."""

    model: onnx.ModelProto
    flat: onnx.ModelProto
    """The model without functions."""
    inputs: Mapping[str, Given]
    results: Sequence[Dims]
    scores: Sequence[str]
    """Scores before their masks, a layer each."""


def write(recipe: Recipe, sizes: Sizes) -> Written:
    """The model of a recipe; `sizes` are those of axes that it has static."""
    g = Writer(recipe, sizes)
    frame = Frame(g)
    sources, masks = Sources(frame), Masks(frame)
    layer = _Layer(frame, sources, masks)
    x: str | None = None
    for number in range(recipe.layers):
        result = layer.result(x, number)
        last = number == recipe.layers - 1
        if not last:
            x = layer.next_states(x, result)
    g.gives_as(result, "out", *layer.shape())
    flat = g.model()
    return Written(_with_functions(g, flat), flat, g.inputs, g.results, layer.scores)


def _with_functions(g: Writer, flat: onnx.ModelProto) -> onnx.ModelProto:
    """The model with those parts in functions that the recipe names."""
    how, outliner = g.recipe.function, Outliner(flat, g.recipe.numbers)
    if how == "none":
        return flat
    if how == "whole":
        return outliner.outlined([((0, g.place), None)])
    return outliner.outlined((span, inner if how == "nested" else None) for span, inner in g.spans)


class _Layer:
    """One attention after another."""

    def __init__(self, frame: Frame, sources: Sources, masks: Masks) -> None:
        self.frame, self.sources, self.masks = frame, sources, masks
        self.g, self.recipe = frame.g, frame.recipe
        self.operator = Operator(frame, sources, masks)
        self._inner: Span | None = None
        self.scores: list[str] = []

    def result(self, x: str | None, number: int) -> str:
        """The result of a layer."""
        g, recipe = self.g, self.recipe
        operands = self.sources.operands(x, number)
        key, value = self.sources.cached(operands.key, operands.value, number)
        self.frame.stored["keys"] = key
        start = g.place
        if recipe.operator == "none":
            mixed, weights = self._spelled(operands.query, key, value, number)
        else:
            self.frame.stored["repeated"] = key
            query, key, _ = self._scaled(operands.query, key)
            mixed, weights = self.operator.applied(query, key, value, number)
        if recipe.weights_used:
            g.gives_as(weights, f"weights{number}", "b", recipe.heads, "s", self.frame.keys)
        if recipe.guard == "isnan_result":
            mixed = g.op("Where", g.op("IsNaN", mixed), g.num(0), mixed)
        g.spans.append(((start, g.place), self._inner))
        return self._joined(mixed, last=number == recipe.layers - 1)

    def _spelled(self, query: str, key: str, value: str, number: int) -> tuple[str, str]:
        """The result and the weights, in many nodes."""
        g, recipe = self.g, self.recipe
        key, value = self.sources.repeated(key, recipe.size), self.sources.repeated(value, recipe.v_size)
        self.frame.stored["repeated"] = key
        query, key, late = self._scaled(query, key)
        scores = self._entered(query, key)
        start = g.place
        scores = self._steps(scores, late if late is None or not self._retyped else g.cast_float(late), number)
        if recipe.product == "keys_first":
            turned = g.op("Softmax", g.transpose(scores, 0, 1, 3, 2), axis=2) if recipe.opset >= 13 else None
            weights = g.transpose(turned, 0, 1, 3, 2) if turned else self._weights(scores)
        else:
            weights = self._weights(scores)
        weights = self._left(self._guarded(weights, number))
        self._inner = (start, g.place)
        return self._mixed(weights, value), weights

    def shape(self) -> Dims:
        """Axes of the result of the last layer."""
        how, width = self.recipe.joined, self.sources.width
        if how == "heads":
            return ("b", self.recipe.heads, "s", self.recipe.v_size)
        return ("s", "b", width) if how == "sequence" else ("b", "s", _WIDTH if how == "projected" else width)

    def next_states(self, x: str | None, result: str) -> str:
        """The input of the next layer; no larger than 1, as behind a norm, so that scores are what they are in models."""
        g, recipe = self.g, self.recipe
        wide = g.op("MatMul", result, g.weight(self.sources.width, self.sources.width, factor=self.sources.width**-0.5))
        if recipe.source == "projected" or recipe.source.startswith("packed"):
            wide = g.op("Add", wide, x or "x")
        return g.op("Tanh", wide)

    # Scores

    def _scaled(self, q: str, k: str) -> tuple[str, str, Operand | None]:
        """Queries and keys with the part of the scale that is theirs, and the factor that is left."""
        g, how, size = self.g, self.recipe.scale, self.recipe.size
        whole, root = g.num(size**-0.5), g.num(size**-0.25)
        if how == "before_q":
            return g.op("Mul", q, whole), k, None
        if how == "before_k":
            return q, g.op("Mul", k, whole), None
        if how == "q_div":
            return g.op("Div", q, g.num(size**0.5)), k, None
        if how == "both":
            return g.op("Mul", q, root), g.op("Mul", root, k), None
        if how in {"both_runtime", "sqrt_runtime"}:
            found = g.op("Sqrt", g.cast_float(g.length(q, 3)))
            if how == "sqrt_runtime":
                return q, k, g.op("Div", g.num(1), found)
            part = g.op("Sqrt", g.op("Div", g.num(1), found))
            return g.op("Mul", q, part), g.op("Mul", k, part), None
        if how == "given":
            return q, k, g.feed("factor", (), "number")
        return q, k, {"negative": g.num(-(size**-0.5)), "odd": g.num(0.37), "none": None}.get(how, whole)

    def _entered(self, q: str, k: str) -> str:
        """The product, from which on numbers have the type between the products."""
        g, recipe = self.g, self.recipe
        if recipe.between == "wide_product":
            q, k = g.cast(q, "float32"), g.cast(k, "float32")
        scores = self._product(q, k)
        if recipe.between not in {"own", "rounded"}:
            g.type = "float16" if recipe.between == "narrow" else "float32"
            scores = scores if recipe.between == "wide_product" else g.cast_float(scores)
        return scores

    def _left(self, weights: str) -> str:
        """The weights in the graph's type, which numbers have from here on."""
        if not self._retyped:
            return weights
        self.g.type = self.recipe.dtype
        return self.g.cast_float(weights)

    @property
    def _retyped(self) -> bool:
        return self.g.type != self.recipe.dtype

    def _product(self, q: str, k: str) -> str:
        """(b, heads, s, t)."""
        g, recipe, how = self.g, self.recipe, self.recipe.product
        if how == "einsum":
            return g.op("Einsum", q, k, equation="bhsd,bhtd->bhst")
        if how == "keys_first":
            return g.transpose(g.op("MatMul", k, g.transpose(q, 0, 1, 3, 2)), 0, 1, 3, 2)
        if how in {"three", "three_runtime"}:
            q3, k3 = self._folded(q, recipe.size, "s"), self._folded(k, recipe.size, self.frame.long)
            three = g.op("MatMul", q3, g.transpose(k3, 0, 2, 1))
            return self._unfolded(three)
        if recipe.keys == "three":
            k3 = g.transpose(self._folded(k, recipe.size, self.frame.long), 0, 2, 1)
            batch = g.length(k, 0)
            return g.op("MatMul", q, g.reshape(k3, batch, recipe.heads, recipe.size, g.length(k, 2)))
        if recipe.keys == "joined_heads":
            flat = g.op("Reshape", g.transpose(k, 0, 2, 1, 3), [0, 0, recipe.heads * recipe.size])
            return g.op("MatMul", q, g.transpose(g.op("Reshape", flat, [0, 0, recipe.heads, recipe.size]), 0, 2, 3, 1))
        return g.op("MatMul", q, g.transpose(k, 0, 1, 3, 2))

    def _folded(self, value: str, size: int, long: str) -> str:
        """Heads in the batch."""
        if self.recipe.product == "three_runtime":
            batch = self.g.op("Mul", self.frame.length("b"), self.recipe.heads)
            return self.g.reshape(value, batch, self.frame.length(long), size)
        return self.g.reshape(value, -1, self.g.length(value, 2), size)

    def _unfolded(self, value: str) -> str:
        return self.g.reshape(value, -1, self.recipe.heads, self.g.length(value, 1), self.g.length(value, 2))

    def _steps(self, scores: str, factor: Operand | None, number: int) -> str:
        """Scale, cap, temperature and masks."""
        g, recipe = self.g, self.recipe
        late = recipe.scale == "after_masks"
        if factor is not None and not late:
            scores = g.op("Div", scores, g.num(recipe.size**0.5)) if recipe.scale == "div" else g.op("Mul", scores, factor)
        if recipe.cap == "before":
            scores = self._capped(scores)
        if recipe.temperature == "before":
            scores = g.op("Div", scores, g.feed("temperature", (), "number"))
        self.scores.append(scores)
        scores = self.masks.applied(scores, number)
        if late and factor is not None:
            scores = g.op("Mul", scores, factor)
        if recipe.cap == "after":
            scores = self._capped(scores)
        if recipe.temperature == "after":
            scores = g.op("Div", scores, g.feed("temperature", (), "number"))
        return g.cast_float(g.cast(scores, "float16")) if recipe.between == "rounded" else scores

    def _capped(self, scores: str) -> str:
        g = self.g
        return g.op("Mul", g.op("Tanh", g.op("Div", scores, g.num(CAP))), g.num(CAP))

    # Weights

    def _weights(self, scores: str) -> str:
        g, recipe = self.g, self.recipe
        if recipe.sink != "none":
            return self._with_sink(scores)
        how = recipe.softmax
        if how == "upcast" or (recipe.dtype == "float16" and recipe.numbers % 5 == 0):
            return g.cast_float(g.op("Softmax", g.cast(scores, "float32"), axis=-1))
        if how == "axis3":
            return g.op("Softmax", scores, axis=3)
        if how.startswith("exp"):
            axes = {"exp_max": [-1], "exp_inverse": [-1], "exp_max_of_all": [0, 1, 2, 3], "exp_max_of_columns": [2]}.get(how)
            powers = g.op("Exp", scores if axes is None else g.op("Sub", scores, g.largest(scores, *axes)))
            total = g.sum(powers, -1)
            return g.op("Mul", powers, g.op("Reciprocal", total)) if how == "exp_inverse" else g.op("Div", powers, total)
        if how == "logsumexp":
            return g.op("Exp", g.op("Sub", scores, g.op("Log", g.sum(g.op("Exp", scores), -1))))
        if how == "log_softmax":
            return g.op("Exp", g.op("LogSoftmax", scores, axis=3))
        return g.op("Softmax", scores, axis=-1 if recipe.opset >= 13 else 3)

    def _with_sink(self, scores: str) -> str:
        """A column that takes weight and has no value."""
        g, recipe, frame = self.g, self.recipe, self.frame
        heads = recipe.heads
        numbers = np.zeros(heads, g.float) if recipe.sink == "zero" else g.weight(heads)
        shape = g.vector(g.length(scores, 0), heads, frame.length("s"), 1)
        column = g.op("Expand", numbers.reshape(1, heads, 1, 1), shape)
        wide = g.op("Concat", *((column, scores) if recipe.sink == "column_first" else (scores, column)), axis=-1)
        if recipe.sink == "column_max":
            wide = g.op("Sub", wide, g.largest(wide, -1))
        weights = g.op("Softmax", wide, axis=-1 if recipe.opset >= 13 else 3)
        if recipe.sink == "column_first":
            return g.op("Slice", weights, [1], [1 << 40], [3])
        keys = self.frame.length(self.frame.long)
        if recipe.sink == "column_split" and isinstance(keys, int):
            return g.split(weights, 3, keys, 1)[0]
        return g.op("Slice", weights, [0], [-1], [3])

    def _guarded(self, weights: str, number: int) -> str:
        g, how = self.g, self.recipe.guard
        if how == "isnan":
            return g.op("Where", g.op("IsNaN", weights), g.num(0), weights)
        if how == "plus_epsilon":
            return g.op("Mul", weights, g.num(1.25))
        if how not in {"times_mask", "where_mask", "renormalized", "renormalized_softly"}:
            return weights
        place = next((at for at, mask in enumerate(self.recipe.masks) if mask.kind not in BIASES), None)
        if place is None:
            return weights
        kept = self.masks.kept(self.recipe.masks[place], place, number)
        if how == "times_mask":
            return g.op("Mul", weights, g.cast_float(kept))
        if how.startswith("renormalized"):
            left = g.op("Mul", weights, g.cast_float(kept))
            total = g.sum(left, -1)
            return g.op("Div", left, total if how == "renormalized" else g.op("Add", total, g.num(1e-25)))
        return g.op("Where", kept, weights, g.num(0))

    # Result

    def _mixed(self, weights: str, value: str) -> str:
        g, recipe, how = self.g, self.recipe, self.recipe.product
        if how == "einsum":
            return g.op("Einsum", weights, value, equation="bhst,bhtd->bhsd")
        if how not in {"three", "three_runtime"}:
            return g.op("MatMul", weights, value)
        long = self.frame.long
        rows, keys = self.frame.length("s"), self.frame.length(long)
        w3 = g.reshape(weights, -1, rows, keys)
        mixed = g.op("MatMul", w3, self._folded(value, recipe.v_size, long))
        return self._unfolded(mixed)

    def _flat(self, value: str) -> str:
        turned = self.g.transpose(value, 0, 2, 1, 3)
        alone = self.recipe.batches != "same"
        return self.sources.reshaped(turned, "s", self.sources.width, alone=alone)

    def _joined(self, mixed: str, *, last: bool) -> str:
        g, recipe = self.g, self.recipe
        if recipe.joined == "heads" and last:
            return mixed
        if recipe.joined == "sequence":
            return g.op("Reshape", g.transpose(mixed, 2, 0, 1, 3), [0, 0, self.sources.width])
        flat = self._flat(mixed)
        if recipe.joined != "projected" or not last:
            return flat
        product = g.op("MatMul", flat, g.weight(self.sources.width, _WIDTH, factor=self.sources.width**-0.5))
        return g.op("Add", product, g.weight(_WIDTH))
