"""How far results may be apart, and what the original itself says of it.

A tolerance is a part of the magnitude of the whole result. Some outcomes are of no such accuracy: two scores that tie in
float16, a row whose fill has swallowed all but the last bits of its scores. So where results are apart, the original is run
again: on inputs moved by one unit in the last place, five times, and in a wider type; where that does not decide it, more often.
Beside a mask of -1e4 a score has fewer places, so a sum of several masks rounds it elsewhere (`level-rows`): in these further
runs numbers move by a unit of that mask.
An element counts as right if it lies within what these runs span, widened on both sides by twice its extent and the tolerance;
NaN and infinities have to be those of one of them. This is the backward error: the result is one that the original gives for
inputs which no one could tell from those given. A model that is converted to float16 may also give what the original gives in
float16, rounded at every node or where ONNX Runtime rounds on a CPU, however far that is, but nothing between.

Of a float32 original the run in float64 counts only where it is near (`_NEAR`), as a measure of rounding: where it is far, as in
rows that -1e9 is added to, float32 makes a rule of the rounding, and that rule has to be kept. Of a float16 original, whose
rounding is another on every device (decision 0003), the run in float32 counts always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from onnx_attnfuse.verify.verdict import ErrorBounds, compare
from tests.fuzz.recipe import Recipe
from tests.support.bundled import Array

_RUNS, _MORE_RUNS = 5, 25
_WIDER = 2.0
_LEAST = 1e-3
"""Results are no smaller: operands are of the order of 1, and what is far below is what weights next to 0 leave of them."""
_SINGLE = 2.0**-23
_LEAVES_SOME = 1e5
"""A mask value up to this leaves some places of a score in float32."""
_NEAR = 1e-2
"""Part of the magnitude up to which a difference from float64 is rounding."""


def tolerance(recipe: Recipe) -> float:
    """As a part of the magnitude of a result."""
    if recipe.journey.startswith("convert"):
        return 2e-2
    return 5e-3 if recipe.dtype == "float16" else 1e-4


def apart(old: Array, new: Array, within: float, among: Sequence[Array] = ()) -> str:
    """What differs, or ''; the magnitude is that of all results `among` which it is, if that is larger."""
    with np.errstate(all="ignore"):
        largest = max(_LEAST, *(magnitude(item) for item in (old, *among)))
        return compare(old, new, ErrorBounds(within * largest, 0.0)).detail


def magnitude(array: Array) -> float:
    """The largest number of a result, infinities apart."""
    return float(np.abs(np.where(np.isfinite(array), array, 0)).max(initial=0.0)) if array.dtype.kind == "f" else 0.0


class Runner(Protocol):
    """A model that can be run."""

    def run(self, outputs: None, feeds: Mapping[str, Array]) -> list[Array]:
        """All outputs."""
        ...


class Opinions:
    """What else the original says."""

    def __init__(self, original: Runner, wide: Runner | None, recipe: Recipe, narrow: Sequence[Runner] = ()) -> None:
        self._original = original
        self._wide = wide
        self._narrow = narrow
        self._recipe = recipe
        self._half = recipe.dtype == "float16"
        self._step = 2.0**-11 if self._half or recipe.journey.startswith("convert") else _SINGLE

    def of(self, inputs: Mapping[str, Array], *, more: bool = False) -> list[list[Array]]:
        """The results of all runs, or of more of them."""
        rng = np.random.default_rng(0)
        found: list[list[Array]] = []
        step = self._step * (self._beside_masks(inputs) if more and self._step == _SINGLE else 1)
        for run in range((_MORE_RUNS if more else _RUNS) + 1):
            moved = {name: _moved(array, step if run else 0.0, rng) for name, array in inputs.items()}
            found.append(self._original.run(None, moved))
            if self._wide is not None:
                found.append(self._wide.run(None, {name: _widened(array, self._half) for name, array in moved.items()}))
            for narrow in self._narrow:
                halves = narrow.run(None, {name: _retyped(array, *_NARROWED) for name, array in moved.items()})
                found.append([array.astype(np.float32) if array.dtype == np.float16 else array for array in halves])
        return found

    def _beside_masks(self, inputs: Mapping[str, Array]) -> float:
        """How much larger than a score the numbers are that mask it and leave some of it; 1 if there are none."""
        given = (np.abs(array[np.isfinite(array)].astype(np.float64)) for array in inputs.values() if array.dtype != bool)
        fills = np.abs([float(mask.fill) for mask in self._recipe.masks if mask.fill != "lowest"])
        return max(float(array[array <= _LEAVES_SOME].max(initial=1.0)) for array in (fills, *given))

    def cover(self, old: Array, new: Array, others: Sequence[Array], among: Sequence[Array]) -> bool:
        """Whether each element of the result is what the runs of the original say; the magnitude as for `apart`."""
        if old.shape != new.shape or any(other.shape != old.shape for other in others):
            return False
        runs = np.stack([old, *others]).astype(np.float64)
        result = new.astype(np.float64)
        largest = max(_LEAST, *(magnitude(item) for item in (old, *among)))
        near = np.zeros(result.shape, bool)
        if not self._half:
            with np.errstate(all="ignore"):
                for other in self._halves(others):
                    near |= np.abs(other - result) <= tolerance(self._recipe) * largest
                runs = np.where(np.abs(runs - runs[0]) > _NEAR * largest, runs[0], runs)
        finite = np.isfinite(runs)
        with np.errstate(all="ignore"):
            low = np.where(finite, runs, np.inf).min(axis=0)
            high = np.where(finite, runs, -np.inf).max(axis=0)
            within, extent = tolerance(self._recipe) * largest, high - low
            slack = within + _WIDER * extent
            inside = (result >= low - slack) & (result <= high + slack)
        same = ((runs == result) | (np.isnan(runs) & np.isnan(result))).any(axis=0)
        return bool((inside | same | near).all())

    def _halves(self, others: Sequence[Array]) -> list[Array]:
        """Those of the results that are of the model in float16."""
        count = 1 + (self._wide is not None) + len(self._narrow)
        return [other for place, other in enumerate(others) if place % count >= count - len(self._narrow)]


def _moved(array: Array, step: float, rng: np.random.Generator) -> Array:
    """Numbers that no one could tell from those of the array; zeros, masks and fills stay."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(all="ignore"):
        ordinary = np.isfinite(array) & (np.abs(array) < 1e4)
        moved = np.where(ordinary, array * (1 + step * rng.choice((-1, 0, 1), array.shape)), array)
        return moved.astype(array.dtype)


def _widened(array: Array, half: bool) -> Array:
    return _retyped(array, *_WIDENED[half])


def _retyped(array: Array, old: int, new: int) -> Array:
    """An array of one type in another; what is finite stays finite."""
    if array.dtype != _numpy(old):
        return array
    most = min(float(np.finfo(_numpy(kind)).max) for kind in (old, new))
    return np.where(np.isinf(array), array, np.clip(array.astype(np.float64), -most, most)).astype(_numpy(new))


def _numpy(kind: int) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(kind)


_WIDENED = {
    True: (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT),
    False: (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
}
_NARROWED = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)


def widened(model: onnx.ModelProto, half: bool) -> onnx.ModelProto:
    """A model in the next wider type: every constant, cast and input."""
    return _of_type(model, *_WIDENED[half])


def narrowed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float32 model in float16: every constant, cast and input."""
    return _of_type(model, *_NARROWED)


def _of_type(model: onnx.ModelProto, old: int, new: int) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in (*copy.graph.input, *copy.graph.output, *copy.graph.value_info):
        if entry.type.tensor_type.elem_type == old:
            entry.type.tensor_type.elem_type = new
    for tensor in copy.graph.initializer:
        if tensor.data_type == old:
            array = _retyped(onnx.numpy_helper.to_array(tensor), old, new)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for node in copy.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == old:
                attribute.i = new
    return copy
