"""A case for a fused operator, and its random inputs. Enter at `inputs.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo

Array = npt.NDArray[Any]
Inputs = list[Array | None]
MICROSOFT, STANDARD = "com.microsoft", ""
BOTH, CPU, CUDA = frozenset(["cpu", "cuda"]), frozenset(["cpu"]), frozenset(["cuda"])


class Draw:
    """Random inputs of one element type."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._random = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)

    def normal(self, *shape: int, factor: float = 1.0) -> Array:
        """Normally distributed numbers, `factor` their deviation."""
        return self.cast(self._random.standard_normal(shape) * factor)

    def cast(self, array: Any) -> Array:
        """An array in the type of the inputs."""
        return np.asarray(array).astype(self.dtype)

    def lowest(self, *shape: int) -> Array:
        """The lowest number of the type, everywhere."""
        return np.full(shape, finfo(self.dtype).min, self.dtype)

    def kept(self, *shape: int) -> npt.NDArray[np.bool_]:
        """Random truth values; the first key is always seen, as a triangle leaves the first row no other."""
        found = self._random.random(shape) < 0.7
        found[..., 0] = True
        return found

    def angles(self, positions: int, half: int) -> list[Array]:
        """Cosines and sines of the usual angles."""
        angle = np.arange(positions)[:, None] / 10000 ** (np.arange(half) / half)
        return [self.cast(np.cos(angle)), self.cast(np.sin(angle))]


@dataclasses.dataclass(frozen=True)
class Case:
    """A node and how to fill its inputs."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    make: Callable[[Draw], Inputs]
    outputs: int = 1
    domain: str = MICROSOFT
    opset: int = 23
    providers: frozenset[str] = BOTH
    where: Callable[[Inputs], Sequence[Array | None]] = lambda inputs: ()
    """Where each output is defined, as far as it is not defined everywhere; broadcasts to it from the left."""

    @property
    def operator(self) -> str:
        """The operator with its domain."""
        return f"{self.domain or 'ai.onnx'}.{self.op}"

    def inputs(self, dtype: Any = np.float32) -> Inputs:
        """Its inputs, the same every time."""
        found = self.make(Draw(sum(map(ord, self.name)), dtype))
        while found[-1] is None:  # an older version of the operator may have fewer
            found.pop()
        return found


def int32(values: Any) -> Array:
    """Integers as ONNX Runtime's operators take them."""
    return np.asarray(values, np.int32)


def lengths_of(batch: int, longest: int) -> Array:
    """Lengths that differ, the first being the longest."""
    return int32([max(1, longest - 2 * entry) for entry in range(batch)])


def _ranges(lengths: Array, rows: int, columns: int) -> Array:
    """Lengths, and where queries and keys of each entry start."""
    count = np.arange(len(lengths) + 1)
    return np.concatenate([lengths, int32(count * rows), int32(count * columns)])


def _holes(draw: Draw, b: int, n: int, s: int, t: int) -> Inputs:
    return [None, np.where(draw.kept(b, n, s, t), draw.normal(b, n, s, t), draw.cast(-np.inf))]


Form = Callable[[Draw, int, int, int, int], Inputs]
MASKS: dict[str, Form] = {
    "no mask": lambda draw, b, n, s, t: [None, None],
    "bias": lambda draw, b, n, s, t: [None, draw.normal(b, n, s, t)],
    "bias for all": lambda draw, b, n, s, t: [None, draw.normal(1, 1, s, t)],
    "bias with holes": _holes,
    "lengths": lambda draw, b, n, s, t: [lengths_of(b, t), None],
    "ranges": lambda draw, b, n, s, t: [_ranges(lengths_of(b, t), s, t), None],
    "raw": lambda draw, b, n, s, t: [int32(draw.kept(b, t)), None],
    "raw by row": lambda draw, b, n, s, t: [int32(draw.kept(b, s, t)), None],
    "raw and bias": lambda draw, b, n, s, t: [int32(draw.kept(b, t)), draw.normal(1, n, s, t)],
    "lengths and bias": lambda draw, b, n, s, t: [lengths_of(b, t), draw.normal(b, n, s, t)],
}
"""Forms of a mask, from entries, heads, rows and columns: one of integers, and one that is added."""
EMPTY: dict[str, Form] = {
    "an entry without a key": lambda draw, b, n, s, t: [int32(np.arange(b)[:, None] * np.ones(t)) % 2, None],
    "a length of 0": lambda draw, b, n, s, t: [int32(np.arange(b) % 2 * t), None],
    "a bias of the lowest": lambda draw, b, n, s, t: [None, draw.lowest(b, n, s, t)],
}
"""The same, with rows that see no key."""
