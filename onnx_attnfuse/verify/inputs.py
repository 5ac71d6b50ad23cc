"""Adversarial inputs: possible contents of masks, index tensors and activations at run time, the unlikely included.

Nothing says which input is a mask. So every input of a graph that has rows gets the patterns of one, whatever its type: all kept,
right and left padding, holes, a row with nothing kept by each or by all together, and counting up, as positions do. Refused
inputs are skipped.
All of it is a pure function of the case, so the same piece gets the same numbers in every run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.verify.subgraph import Role

Array = npt.NDArray[Any]
Pattern = Literal["full", "right", "left", "holes", "empty", "apart", "index"]
"""Which positions are kept: all; a prefix; a suffix; most of them; none in one row; in one row others by each input, none by two;
as `full`, but integers count up."""
Encoding = Literal["plain", "lowest", "infinite", "thousands", "normal", "mixed"]
"""How a float input says it: 1 and 0; 0 and the lowest number, -inf or -10000; not at all, it is an ordinary bias; each input in
another of these ways."""


@dataclasses.dataclass(frozen=True)
class InputCase:
    """One way to fill all inputs."""

    pattern: Pattern
    encoding: Encoding
    factor: float
    """Operands are normal numbers times this, so that scores are about its square."""
    turn: int = 0
    """Which operands `_SHIFT` is added to and which it is taken from, so that all scores are far below 0; 0 for none. Which
    addend has which encoding, where these are mixed."""
    place: int = 0
    """Which of several masks an input is, in the case as that input has it."""

    @property
    def is_extreme(self) -> bool:
        """Whether scores are so large or so low that half types show nothing but rounding."""
        return self.factor == LARGE or bool(self.turn and self.encoding != "mixed")

    def tame(self, factor: float = math.inf) -> InputCase | None:
        """The case with scores of ordinary size, where large or low ones tell nothing; None if others have it already.

        Args:
            factor: Operands are normal numbers times this at most.
        """
        if self.factor == LARGE:
            return None
        return dataclasses.replace(self, turn=0 if self.is_extreme else self.turn, factor=min(self.factor, factor))

    def __str__(self) -> str:
        names = {
            "full": "no padding",
            "right": "right padding",
            "left": "left padding",
            "holes": "holes",
            "empty": "a fully masked row",
            "apart": "a row that masks empty together",
            "index": "counting inputs",
        }
        encoding = {"plain": "1/0", "normal": "a bias", "mixed": "of several kinds"}.get(self.encoding, f"0/{self.encoding}")
        shifted = ", shifted" if self.is_extreme and self.turn else ""
        return (
            f"{names[self.pattern]}, float inputs {encoding.replace('infinite', '-inf')}, operands times {self.factor:g}{shifted}"
        )


_DISTINCT = 65537
"""Different numbers in a weight: a prime, so that no two rows are alike."""
LARGE = 6.0
"""The factor that makes large logits: scores of about 36."""
_SHIFT = 2.5
"""Two operands of 64 channels, shifted against each other by this much, have scores around -50."""
_LOW = 20
"""Operands that are scores are shifted by this many times as much, downwards."""
_ADDENDS: tuple[Encoding, ...] = ("lowest", "normal", "thousands", "infinite")
"""Encodings of inputs that are added to something computed, in the order in which a mixed case takes them."""
_GROUPS: tuple[tuple[InputCase, ...], ...] = (
    (
        InputCase("holes", "lowest", 1.5),
        InputCase("full", "normal", 1.5),
        InputCase("right", "plain", 1.5),
        InputCase("left", "lowest", 1.0),
        InputCase("holes", "infinite", 1.5),
        InputCase("empty", "lowest", 1.0),
        InputCase("empty", "infinite", 1.0),
        InputCase("apart", "lowest", 1.0),
        InputCase("holes", "plain", LARGE),
        InputCase("empty", "mixed", 1.0, turn=1),
        InputCase("holes", "mixed", 1.0, turn=2),
    ),
    (
        InputCase("full", "lowest", 0.5),
        InputCase("right", "lowest", 0.5, turn=1),
        InputCase("index", "normal", 1.0),
        InputCase("empty", "plain", 1.0),
    ),
    (InputCase("full", "plain", 1.0), InputCase("left", "infinite", 0.5, turn=2), InputCase("holes", "normal", 0.5)),
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
    addend: bool = False
    """This input is added, as it is, to a computed value."""
    score: bool = False
    """The input, or its sum with others, is the operand of an exponential."""
    array: Array | None = None
    """The array of a constant, which fills this input in every case; None for other inputs."""

    @property
    def is_count(self) -> bool:
        """Whether the input is an integer without axes, as the length of a sequence is that a function is given."""
        return not self.rank and self.array is None and self.dtype.is_integer()


def case_groups(slots: Sequence[Slot]) -> list[list[InputCase]]:
    """The cases for a first, second and third choice of sizes, without those that would repeat one."""
    masked = [slot for slot in slots if slot.rank > 1 and _is_masklike(slot)]
    floats = sum(slot.dtype.is_floating_point() for slot in masked)
    scores = any(slot.score for slot in slots)
    groups: list[list[InputCase]] = []
    for group in _GROUPS:
        kept: dict[tuple[object, ...], InputCase] = {}
        for case in group:
            if (case.encoding == "mixed" and floats < 2) or (case.pattern == "apart" and len(masked) < 2):
                continue
            large = case.factor == LARGE
            key = (
                (case.pattern, case.encoding, large)
                if floats
                else (case.pattern, large)
                if masked
                else (large, scores and case.turn == 1)
            )
            kept.setdefault(key, case)
        groups.append(list(kept.values()))
    return groups


def _is_masklike(slot: Slot) -> bool:
    if slot.blank:
        return False
    return slot.role in {"given", "factor"} or (slot.role == "activation" and not slot.dtype.is_floating_point())


def feeds(
    slots: Sequence[Slot], shapes: Sequence[Sequence[int]], case: InputCase, seed: int = 0, count: int | None = None
) -> dict[str, Array]:
    """An array for every slot; another seed draws other ones, and integers without axes are `count` if it is given."""
    rng = np.random.default_rng((len(slots), seed) if seed else len(slots))
    places, masks = {True: itertools.count(), False: itertools.count()}, itertools.count()
    found: dict[str, Array] = {}
    for slot, shape in zip(slots, shapes, strict=True):
        own = _for_one(case, slot, next(places[slot.addend])) if slot.addend or slot.role in {"given", "operand"} else case
        if slot.rank > 1 and _is_masklike(slot):
            own = dataclasses.replace(own, place=next(masks))
        found[slot.name] = np.asarray(_filled(slot, tuple(shape), own, rng))
        if count is not None and slot.is_count:
            found[slot.name] = np.asarray(count, slot.dtype.numpy())
    return found


def _for_one(case: InputCase, slot: Slot, place: int) -> InputCase:
    """A case as one of its inputs has it: the encoding of that input, the direction in which that operand is shifted."""
    if slot.role == "operand":
        shift = 0 if not case.turn or not case.is_extreme else -_LOW if slot.score else (-1) ** (place // case.turn)
        return dataclasses.replace(case, turn=shift)
    if case.encoding != "mixed":
        return case
    encoding = _ADDENDS[(place + case.turn) % len(_ADDENDS)] if slot.addend else "plain"
    # a row of -10000 alone is rounded: reading refuses it where a model has that number
    return dataclasses.replace(case, encoding="lowest" if encoding == "thousands" and case.pattern == "empty" else encoding)


def _filled(slot: Slot, shape: tuple[int, ...], case: InputCase, rng: np.random.Generator) -> Array:
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
        return kept_positions(case.pattern, shape, rng, case.place).astype(dtype)
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


def _floats(role: Role, shape: tuple[int, ...], case: InputCase, rng: np.random.Generator, lowest: float) -> Array:
    normal = rng.standard_normal(shape, np.float32)
    if role == "operand":
        return normal * np.float32(case.factor) + np.float32(_SHIFT * case.turn)
    if role == "activation" or (case.encoding == "normal" and len(shape) > 1):
        return normal
    if role == "factor" and case.encoding != "plain":
        return normal
    if len(shape) < 2:
        return np.abs(normal) + np.float32(0.5)
    kept = kept_positions(case.pattern, shape, rng, case.place)
    if case.encoding == "plain":
        return kept.astype(np.float32)
    return np.where(kept, 0.0, {"infinite": -np.inf, "thousands": -1e4}.get(case.encoding, lowest))


def kept_positions(pattern: Pattern, shape: tuple[int, ...], rng: np.random.Generator, place: int = 0) -> npt.NDArray[np.bool_]:
    """True where a mask, of several in some place, keeps a position; padding differs by the first axis."""
    kept = np.ones(shape, np.bool_)
    if not kept.size:
        return kept
    last, row = shape[-1], -1 if len(shape) == 2 else (0, ..., shape[-2] // 2, slice(None))
    if pattern == "holes":
        kept[...] = rng.random(shape) < 0.7
        kept[..., rng.integers(last)] = True
    elif pattern == "empty":
        kept[row] = False
    elif pattern == "apart":
        kept[row] = np.arange(last) % 2 == place % 2
    elif pattern in {"right", "left"}:
        for entry in range(shape[0]):
            count = min(last - 1, entry + 1)
            kept[entry, ..., slice(last - count, None) if pattern == "right" else slice(count)] = False
    return kept


def describe(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes for a reader: `q 2x5x32, mask 2x7`."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())
