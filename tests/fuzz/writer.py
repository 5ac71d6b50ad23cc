"""Writing a graph operator by operator, in whatever opset, and remembering what each input is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.fuzz.functions import Span
from tests.fuzz.recipe import Recipe
from tests.support.bundled import Array
from tests.support.graph_builder import GraphBuilder, Operand

TYPES = {
    "float32": 1, "float": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "double": 11,
}  # fmt: skip
Dims = tuple[str | int, ...]
"""Axes by what they are: b, s, t, p (past), or a number; `b?` is an axis with a symbol of its own that is 1 at run time."""


@dataclasses.dataclass(frozen=True)
class Given:
    """An input."""

    name: str
    dims: Dims
    dtype: str
    role: str
    """What it is filled with: normal, mask, bias, ids, lengths, positions, number, scatter."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths at run time."""

    b: int = 2
    s: int = 3
    t: int = 3
    p: int = 0

    def of(self, dim: str | int) -> int:
        """The length of an axis."""
        if isinstance(dim, int):
            return dim
        return 1 if dim.endswith("?") else int({"b": self.b, "s": self.s, "t": self.t, "p": self.p}[dim])


class Writer(GraphBuilder):
    """A graph in one element type; constants are of that type unless they are integers."""

    def __init__(self, recipe: Recipe, sizes: Sizes) -> None:
        super().__init__(recipe.opset)
        self.recipe = recipe
        self.opset = recipe.opset
        self.sizes = sizes
        """Those of static axes."""
        self.rng = np.random.default_rng(recipe.numbers)
        self.inputs: dict[str, Given] = {}
        self.results: list[Dims] = []
        """Axes of the outputs."""
        self.spans: list[tuple[Span, Span | None]] = []
        """Attentions as spans of nodes, each with one inside of it."""
        self.type = recipe.dtype
        """The type of the numbers that are written now."""

    def feed(self, name: str, dims: Dims, role: str = "normal", dtype: str | None = None) -> str:
        """An input; the same one if it is there."""
        if name not in self.inputs:
            dtype = dtype or self.type
            self.inputs[name] = Given(name, dims, dtype, role)
            self.given(name, self.shape(name, dims), TYPES[dtype])
        return name

    def without_outputs(self, last: int, between: int) -> None:
        """Leaves out the last outputs of the latest node, and as many before the very last that stay in their places, empty."""
        outputs = self._nodes[-1].output
        kept = [*outputs[: len(outputs) - 1 - between], *[""] * between, *outputs[len(outputs) - 1 :]]
        kept = kept[: len(kept) - last]
        while not kept[-1]:
            kept.pop()
        del outputs[:]
        outputs.extend(kept)

    def shape(self, name: str, dims: Dims) -> list[Any]:
        """How the axes of an input or an output are declared."""
        apart = self.recipe.dims == "apart"
        return [f"{name}_{axis}" if apart and isinstance(dim, str) else self.declared(dim, name) for axis, dim in enumerate(dims)]

    def is_static(self, dim: str) -> bool:
        """Whether an axis has one length."""
        return {"static": True, "batch": dim != "b", "step": dim == "s"}.get(self.recipe.dims, False)

    def declared(self, dim: str | int, name: str) -> Any:
        """How an axis is declared where axes that are equal have one name."""
        if isinstance(dim, int):
            return dim
        if dim.endswith("?"):
            return f"{name}_{dim[:-1]}"
        how = self.recipe.dims
        if self.is_static(dim):
            return self.sizes.of(dim)
        if how == "anonymous":
            return None
        if dim == "t" and self.recipe.cache in {"concat", "concat_flat", "stacked", "transposed"}:
            return {"expression": "past + seq", "total": "total"}.get(how, "keys")
        if how == "shared" and dim in {"s", "t"}:
            return "seq"
        return {"b": "batch", "s": "seq", "t": "keys", "p": "past"}[dim]

    @property
    def place(self) -> int:
        """The number of the next node."""
        return len(self._nodes)

    @property
    def float(self) -> type[np.floating[Any]]:
        """The type of numbers in NumPy."""
        return np.float16 if self.type == "float16" else np.float32

    def num(self, value: float) -> Array:
        """A scalar of that type; what it cannot hold is infinite."""
        with np.errstate(over="ignore"):
            return np.asarray(value, self.float)

    def weight(self, *shape: int, factor: float = 1.0) -> Array:
        """Constant numbers."""
        return (self.rng.standard_normal(shape) * factor).astype(self.float)

    def cast(self, value: Operand, to: str) -> str:
        """The value in another type."""
        return self.op("Cast", value, to=TYPES[to])

    def cast_float(self, value: Operand) -> str:
        """The value in the type of the numbers around it."""
        return self.cast(value, self.type)

    def unsqueeze(self, value: Operand, *axes: int) -> str:
        """With new axes."""
        if self.opset >= 13:
            return self.op("Unsqueeze", value, list(axes))
        return self.op("Unsqueeze", value, axes=list(axes))

    def squeeze(self, value: Operand, *axes: int) -> str:
        """Without axes."""
        return self.op("Squeeze", value, list(axes)) if self.opset >= 13 else self.op("Squeeze", value, axes=list(axes))

    def sum(self, value: str, axis: int) -> str:
        """The sum along an axis, which stays."""
        return self.op("ReduceSum", value, [axis]) if self.opset >= 13 else self.op("ReduceSum", value, axes=[axis])

    def largest(self, value: str, *axes: int) -> str:
        """The maximum along axes, which stay."""
        return self.op("ReduceMax", value, list(axes)) if self.opset >= 18 else self.op("ReduceMax", value, axes=list(axes))

    def split(self, value: str, axis: int, *sizes: int) -> list[str]:
        """Parts along an axis."""
        if self.opset >= 13:
            return self.op("Split", value, list(sizes), axis=axis, outputs=len(sizes))
        return self.op("Split", value, axis=axis, split=list(sizes), outputs=len(sizes))

    def transpose(self, value: str, *perm: int) -> str:
        """Axes in another order."""
        return self.op("Transpose", value, perm=list(perm))

    def length(self, value: str, axis: int) -> str:
        """The length of an axis, a scalar."""
        if self.opset >= 15 and self.recipe.numbers % 2:
            return self.squeeze(self.op("Shape", value, start=axis, end=axis + 1), 0)
        return self.op("Gather", self.op("Shape", value), 0 if axis == 0 else axis, axis=0)

    def wide(self, scalar: Operand) -> Operand:
        """A scalar as a vector of one."""
        return [scalar] if isinstance(scalar, int) else self.unsqueeze(scalar, 0)

    def vector(self, *parts: Operand) -> Operand:
        """Lengths as one vector: a constant if all are known."""
        if all(isinstance(part, int) for part in parts):
            return [int(part) for part in parts]  # type: ignore[arg-type]
        return self.op("Concat", *[self.wide(part) for part in parts], axis=0)

    def reshape(self, value: str, *parts: Operand) -> str:
        """In another shape."""
        return self.op("Reshape", value, self.vector(*parts))

    def count(self, length: Operand, start: Operand = 0) -> str:
        """start, start + 1, ... up to start + length, int64."""
        end = length if isinstance(start, int) and not start else self.op("Add", start, length)
        return self.op("Range", start, end, 1)

    def compare(self, kind: str, left: Operand, right: Operand) -> str:
        """left <= right, or >=, in opsets that lack it, too."""
        if self.opset >= 12:
            return self.op(kind, left, right)
        return self.op("Not", self.op({"LessOrEqual": "Greater", "GreaterOrEqual": "Less"}[kind], left, right))

    def equal(self, left: Operand, right: Operand) -> str:
        """Whether they are equal."""
        return self.op("Equal", left, right)

    def gives_as(self, value: str, name: str, *dims: str | int) -> None:
        """Makes a value an output."""
        self.results.append(dims)
        self.gives(value, name, self.shape(name, dims), TYPES[self.recipe.dtype])
