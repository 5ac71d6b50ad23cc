"""A whole model besides its graph: what builds it, its inputs and outputs, and the sizes that it is run at."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from models.recipe import Input, resolve

Array = np.ndarray[Any, Any]
IDS, MASK = ("batch", "seq"), ("batch", "past+seq")


def at(port: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or an output for some sizes of the axes."""
    return tuple(axis if isinstance(axis, int) else resolve(axis, sizes) for axis in port.shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run a model.

    Attributes:
        label: Its name in the tables.
        sizes: Lengths of the axes.
        padded: Whether the masks have padding on the right, half of all tokens.
        steps: Runs in a row, each with what the one before returned as its past; 0 for a single run.
    """

    label: str
    sizes: dict[str, int]
    padded: bool = False
    steps: int = 0

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each sequence count: evenly spread up to the full length, half of all."""
        batch, total = self.sizes["batch"], self.sizes["seq"] + self.sizes.get("past", 0)
        if not self.padded:
            return [total] * batch
        spread = [max(1, round(total * (2 * entry + 1) / (2 * batch))) for entry in range(batch)]
        return [int(found) for found in np.random.default_rng(0).permutation(spread)]


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole model.

    Attributes:
        name: Name of its files.
        inputs: Graph inputs, in order; those that carry the past come last.
        outputs: Graph outputs, in order; all but the first carry the past on.
        cases: How it is run, those with little memory first.
        build: Makes the module, in the default device and element type; inputs by position, outputs in order.
        model_type: What ONNX Runtime's Python optimizer should take it for.
        num_heads: Heads of queries, for that optimizer; 0 where they differ from layer to layer.
        hidden_size: Width, likewise.
        bits: Of weights, which are quantised behind each tool; 0 where they are not.
        dtype: The element type of weights and results.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Input, ...]
    cases: tuple[Case, ...]
    build: Callable[[], nn.Module]
    model_type: str
    num_heads: int = 0
    hidden_size: int = 0
    bits: int = 0
    dtype: str = "float16"

    def type(self, port: Input) -> Any:
        """The element type of an input or an output."""
        return np.dtype(self.dtype).type if port.kind == "float" else np.int64

    def feeds(self, case: Case) -> dict[str, Array]:
        """Values of all inputs; the past is noise too, of the size of keys and values."""
        random = np.random.default_rng(0)
        return {port.name: _value(port, case, random).astype(self.type(port)) for port in self.inputs}


def _value(port: Input, case: Case, random: np.random.Generator) -> Array:
    shape = at(port, case.sizes)
    if port.kind == "ids":
        return random.integers(2, port.high, shape, dtype=np.int64)
    if port.kind == "positions":
        return np.broadcast_to(case.sizes.get("past", 0) + np.arange(shape[-1]), shape)
    if port.kind == "mask":
        return np.arange(shape[-1])[None] < np.asarray(case.lengths)[:, None]
    return random.standard_normal(shape, np.float32)
