"""Cases that operators are held against their references on: what a case has besides that of a form, and forms of masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from onnx_attnfuse.bench.conformance import cases
from onnx_attnfuse.bench.conformance.cases import Array, Draw, Inputs, int32, lengths_of, ranges_of

STANDARD = ""
BOTH, CPU, CUDA = frozenset(["cpu", "cuda"]), frozenset(["cpu"]), frozenset(["cuda"])


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """A node and how to fill its inputs."""

    providers: frozenset[str] = BOTH
    where: Callable[[Inputs], Sequence[Array | None]] = lambda inputs: ()
    """Where each output is defined, as far as it is not defined everywhere; broadcasts to it from the left."""

    @property
    def operator(self) -> str:
        """The operator with its domain."""
        return f"{self.domain or 'ai.onnx'}.{self.op}"


def angles(draw: Draw, positions: int, half: int) -> list[Array]:
    """Cosines and sines of the usual angles."""
    angle = np.arange(positions)[:, None] / 10000 ** (np.arange(half) / half)
    return [draw.cast(np.cos(angle)), draw.cast(np.sin(angle))]


def _holes(draw: Draw, b: int, n: int, s: int, t: int) -> Inputs:
    return [None, np.where(draw.kept(b, n, s, t), draw.normal(b, n, s, t), draw.cast(-np.inf))]


Form = Callable[[Draw, int, int, int, int], Inputs]
MASKS: dict[str, Form] = {
    "no mask": lambda draw, b, n, s, t: [None, None],
    "bias": lambda draw, b, n, s, t: [None, draw.normal(b, n, s, t)],
    "bias for all": lambda draw, b, n, s, t: [None, draw.normal(1, 1, s, t)],
    "bias with holes": _holes,
    "lengths": lambda draw, b, n, s, t: [lengths_of(b, t), None],
    "ranges": lambda draw, b, n, s, t: [ranges_of(lengths_of(b, t), s, t), None],
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
