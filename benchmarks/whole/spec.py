"""What is known of a whole model besides its graph: inputs, outputs, the sizes it is run at; as JSON beside the export."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

FLOATS = ("float",)
"""Kinds of inputs and outputs that are float16; all others are int64."""


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or an output.

    Attributes:
        name: Its name in the graph.
        shape: One entry per axis: a number, or names of axes joined by ``+``.
        kind: ``ids`` are below `high`, ``positions`` count on from the past, ``mask`` is 1 where a token counts, ``float`` is
            noise.
        high: Upper bound of ``ids``.
    """

    name: str
    shape: tuple[int | str, ...]
    kind: str = "float"
    high: int = 0

    def at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for some sizes of the axes.

        >>> Port("mask", ("batch", "past+seq")).at({"batch": 2, "past": 5, "seq": 3})
        (2, 8)
        """
        return tuple(axis if isinstance(axis, int) else sum(sizes[part] for part in axis.split("+")) for axis in self.shape)

    @property
    def type(self) -> Any:
        """The element type."""
        return np.float16 if self.kind in FLOATS else np.int64


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run a model.

    Attributes:
        label: What it is called in the tables.
        sizes: Lengths of the axes.
        padded: Whether the masks have padding on the right, half of all tokens.
        steps: Runs in a row, each with what the one before returned as its past; 0 for a single run.
    """

    label: str
    sizes: dict[str, int]
    padded: bool = False
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    """A whole model.

    Attributes:
        name: Name of its files.
        inputs: Graph inputs, in order; those that carry the past come last.
        outputs: Graph outputs, in order; all but the first carry the past on.
        cases: How it is run, those with little memory first.
        model_type: What ONNX Runtime's Python optimizer should take it for.
        num_heads: Heads of queries, for that optimizer; 0 where they differ from layer to layer.
        hidden_size: Width, likewise.
        small: Whether it is the small stand-in that tries the scripts out.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    cases: tuple[Case, ...]
    model_type: str
    num_heads: int
    hidden_size: int
    small: bool = False

    def write(self, folder: pathlib.Path) -> None:
        """Writes it beside the graph."""
        (folder / f"{self.name}.json").write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read(path: pathlib.Path) -> Spec:
    """The specification in a file."""
    found = json.loads(path.read_text())
    for key in ("inputs", "outputs"):
        found[key] = tuple(Port(**{**port, "shape": tuple(port["shape"])}) for port in found[key])
    found["cases"] = tuple(Case(**case) for case in found["cases"])
    return Spec(**found)


def feeds(spec: Spec, case: Case, *, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Values of all inputs; the past is noise too, of the size of keys and values."""
    random = np.random.default_rng(seed)
    return {port.name: _value(port, case, random) for port in spec.inputs}


def lengths(case: Case) -> list[int]:
    """How many tokens of each sequence count: evenly spread up to the full length, half of all."""
    batch, total = case.sizes["batch"], case.sizes["seq"] + case.sizes.get("past", 0)
    if not case.padded:
        return [total] * batch
    spread = [max(1, round(total * (2 * entry + 1) / (2 * batch))) for entry in range(batch)]
    return [int(found) for found in np.random.default_rng(0).permutation(spread)]


def _value(port: Port, case: Case, random: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = port.at(case.sizes)
    if port.kind == "ids":
        return random.integers(2, port.high, shape, dtype=np.int64)
    if port.kind == "positions":
        return np.broadcast_to(case.sizes.get("past", 0) + np.arange(shape[-1], dtype=np.int64), shape).copy()
    if port.kind == "mask":
        return (np.arange(shape[-1])[None] < np.asarray(lengths(case))[:, None]).astype(np.int64)
    return random.standard_normal(shape, np.float32).astype(np.float16)
