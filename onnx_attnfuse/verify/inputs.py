"""Hostile inputs: what masks, index tensors and activations may contain at run time, the unlikely included.

Nothing says which input is a mask. So every input of a graph that has rows gets the patterns of one, whatever its type: all kept,
right and left padding, holes, a row with nothing kept, and counting up, as positions do. What the original refuses is skipped.
All of it is a pure function of the case, so the same piece gets the same numbers in every run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.verify.subgraph import Role

Array = npt.NDArray[Any]
Pattern = Literal["full", "right", "left", "holes", "empty", "index"]
"""Which positions are kept: all; a prefix; a suffix; most of them; none in one row; as `full`, but integers count up."""
Encoding = Literal["plain", "lowest", "infinite", "normal"]
"""How a float input says it: 1 and 0; 0 and the lowest number; 0 and -inf; not at all, it is an ordinary bias."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to fill all inputs."""

    pattern: Pattern
    encoding: Encoding
    factor: float
    """Operands are normal numbers times this, so that scores are about its square."""

    def __str__(self) -> str:
        what = {"full": "no padding", "right": "right padding", "left": "left padding", "holes": "holes"}
        name = what.get(self.pattern) or {"empty": "a fully masked row", "index": "counting inputs"}[self.pattern]
        encoding = {"plain": "1/0", "lowest": "0/lowest", "infinite": "0/-inf", "normal": "a bias"}[self.encoding]
        return f"{name}, float inputs {encoding}, operands times {self.factor:g}"


_DISTINCT = 65537
"""Different numbers in a weight: a prime, so that no two rows are alike."""
LARGE = 6.0
"""The factor that makes large logits: scores of about 36."""
_GROUPS: tuple[tuple[Case, ...], ...] = (
    (
        Case("holes", "lowest", 1.5),
        Case("full", "normal", 1.5),
        Case("right", "plain", 1.5),
        Case("left", "lowest", 1.0),
        Case("holes", "infinite", 1.5),
        Case("empty", "lowest", 1.0),
        Case("empty", "infinite", 1.0),
        Case("holes", "plain", LARGE),
    ),
    (Case("full", "lowest", 0.5), Case("right", "lowest", 0.5), Case("index", "normal", 1.0), Case("empty", "plain", 1.0)),
    (Case("full", "plain", 1.0), Case("left", "infinite", 1.0), Case("holes", "normal", 0.5)),
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """An input to fill."""

    name: str
    role: Role
    dtype: ir.DataType
    rank: int
    blank: bool
    """Nothing but its shape is looked at."""
    summed: int = 1
    """Along how many elements a product with it sums, if it is a weight."""
    array: Array | None = None
    """The array of a constant, which fills this input in every case; None for other inputs."""


def case_groups(slots: Sequence[Slot]) -> list[list[Case]]:
    """The cases for a first, second and third choice of sizes, without those that would repeat one."""
    masked = [slot for slot in slots if slot.rank > 1 and _is_masklike(slot)]
    floats = any(slot.dtype.is_floating_point() for slot in masked)
    groups: list[list[Case]] = []
    for group in _GROUPS:
        kept: dict[tuple[object, ...], Case] = {}
        for case in group:
            large = case.factor == LARGE
            key = (case.pattern, case.encoding, large) if floats else (case.pattern, large) if masked else (large,)
            kept.setdefault(key, case)
        groups.append(list(kept.values()))
    return groups


def _is_masklike(slot: Slot) -> bool:
    if slot.blank:
        return False
    return slot.role in {"given", "factor"} or (slot.role == "activation" and not slot.dtype.is_floating_point())


def feeds(slots: Sequence[Slot], shapes: Sequence[Sequence[int]], case: Case, seed: int = 0) -> dict[str, Array]:
    """An array for every slot; another seed draws other ones."""
    rng = np.random.default_rng((len(slots), seed) if seed else len(slots))
    return {slot.name: np.asarray(_filled(slot, tuple(shape), case, rng)) for slot, shape in zip(slots, shapes, strict=True)}


def _filled(slot: Slot, shape: tuple[int, ...], case: Case, rng: np.random.Generator) -> Array:
    if slot.array is not None:
        return slot.array
    dtype = slot.dtype.numpy()
    if slot.blank:
        return np.zeros(shape, dtype)
    if slot.role == "weight":
        return _weight(shape, slot.summed, rng).astype(dtype)
    if slot.dtype.is_floating_point():
        return _floats(slot.role, shape, case, rng, -largest(slot.dtype)).astype(dtype)
    if len(shape) > 1:
        if case.pattern == "index" and dtype.kind != "b":
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
        return kept_positions(case.pattern, shape, rng).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.7) if case.pattern == "holes" else np.ones(shape, np.bool_)
    if not shape:
        return np.asarray(1 + len(case.pattern) % 3).astype(dtype)
    if case.pattern in {"right", "left"}:
        return rng.integers(1, 4, shape).astype(dtype)
    return np.arange(shape[0]).astype(dtype)


def _weight(shape: tuple[int, ...], summed: int, rng: np.random.Generator) -> Array:
    """Numbers by which products become as large as their operands; a few of them over and over, as there may be millions."""
    numbers = rng.standard_normal(_DISTINCT, np.float32) / np.float32(np.sqrt(summed))
    return np.resize(numbers, shape)


def _floats(role: Role, shape: tuple[int, ...], case: Case, rng: np.random.Generator, lowest: float) -> Array:
    normal = rng.standard_normal(shape, np.float32)
    if role == "operand":
        return normal * np.float32(case.factor)
    if role == "activation" or (case.encoding == "normal" and len(shape) > 1):
        return normal
    if role == "factor" and case.encoding != "plain":
        return normal
    if len(shape) < 2:
        return np.abs(normal) + np.float32(0.5)
    kept = kept_positions(case.pattern, shape, rng)
    if case.encoding == "plain":
        return kept.astype(np.float32)
    return np.where(kept, 0.0, -np.inf if case.encoding == "infinite" else lowest)


def kept_positions(pattern: Pattern, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """True where a mask of at least two axes keeps a position; padding differs by the first axis."""
    kept = np.ones(shape, np.bool_)
    if not kept.size:
        return kept
    last = shape[-1]
    if pattern == "holes":
        kept[...] = rng.random(shape) < 0.7
        kept[..., rng.integers(last)] = True
    elif pattern == "empty":
        kept[-1 if len(shape) == 2 else (0, ..., shape[-2] // 2, slice(None))] = False
    elif pattern in {"right", "left"}:
        for row in range(shape[0]):
            count = min(last - 1, row + 1)
            kept[row, ..., slice(last - count, None) if pattern == "right" else slice(count)] = False
    return kept


def describe(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes for a reader: `q 2x5x32, mask 2x7`."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())
