"""A whole model besides its graph: what builds it, its inputs and outputs, and the sizes that it is run at."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

Array = np.ndarray[Any, Any]
IDS, MASK = ("batch", "seq"), ("batch", "past+seq")


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output.

    Attributes:
        name: Its name in the graph.
        shape: One entry per axis: a number, or names of axes joined by ``+``.
        kind: ``ids`` are below `high`, ``positions`` count on from the past, ``mask`` is 1 where a token counts, all in int64;
            others are noise in the element type that they name.
        high: Upper bound of ``ids``.
    """

    name: str
    shape: tuple[int | str, ...]
    kind: str = "float16"
    high: int = 0

    def at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for some sizes of the axes."""
        return tuple(axis if isinstance(axis, int) else sum(sizes[name] for name in axis.split("+")) for axis in self.shape)

    @property
    def type(self) -> Any:
        """The element type."""
        return np.dtype(self.kind).type if "float" in self.kind else np.int64


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
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cases: tuple[Case, ...]
    build: Callable[[], nn.Module]
    model_type: str
    num_heads: int = 0
    hidden_size: int = 0
    bits: int = 0

    @property
    def dtype(self) -> str:
        """The element type of weights and results."""
        return self.outputs[0].kind

    def feeds(self, case: Case) -> dict[str, Array]:
        """Values of all inputs; the past is noise too, of the size of keys and values."""
        random = np.random.default_rng(0)
        return {port.name: _value(port, case, random) for port in self.inputs}


def _value(port: Port, case: Case, random: np.random.Generator) -> Array:
    shape = port.at(case.sizes)
    if port.kind == "ids":
        return random.integers(2, port.high, shape, dtype=np.int64)
    if port.kind == "positions":
        return np.broadcast_to(case.sizes.get("past", 0) + np.arange(shape[-1], dtype=np.int64), shape).copy()
    if port.kind == "mask":
        return (np.arange(shape[-1])[None] < np.asarray(case.lengths)[:, None]).astype(np.int64)
    return random.standard_normal(shape, np.float32).astype(port.type)
