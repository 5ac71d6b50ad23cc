"""A recipe: a real architecture, its inputs and its dynamic axes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Kind = Literal["ids", "positions", "mask", "padding", "float"]

#: Sizes of the axes a recipe may name. ``a+b`` in a shape is the sum of two of them.
SIZES: dict[str, int] = {
    "batch": 2,
    "seq": 9,
    "past": 5,
    "source": 11,
    "samples": 410,
    "height": 16,
    "width": 24,
}
#: A second set, all different from the first: what was traced as a constant shows here.
RESIZED: dict[str, int] = {
    "batch": 3,
    "seq": 13,
    "past": 7,
    "source": 17,
    "samples": 530,
    "height": 24,
    "width": 32,
}


@dataclass(frozen=True)
class Input:
    """One graph input.

    Attributes:
        name: Its name in the ONNX file.
        shape: One entry per axis: a number, or the name of a dynamic axis.
        kind: ``ids`` are integers below `high`; ``positions`` count on from the past; ``mask`` is 1 where a token counts (int64);
            ``padding`` is True where a token is ignored (bool); ``float`` is normal noise.
        high: Upper bound of ``ids``.
    """

    name: str
    shape: tuple[int | str, ...]
    kind: Kind = "float"
    high: int = 99

    def draw(self, sizes: Mapping[str, int], rng: torch.Generator) -> torch.Tensor:
        """Draws a value; masks come out full."""
        shape = [axis if isinstance(axis, int) else resolve(axis, sizes) for axis in self.shape]
        match self.kind:
            case "ids":
                return torch.randint(2, self.high, shape, generator=rng)
            case "positions":
                return (sizes["past"] + torch.arange(shape[-1])).expand(shape).clone()
            case "mask":
                return torch.ones(shape, dtype=torch.int64)
            case "padding":
                return torch.zeros(shape, dtype=torch.bool)
            case _:
                return torch.randn(shape, generator=rng)

    def axes(self) -> dict[int, str]:
        """Returns the dynamic axes, by position."""
        return {at: axis for at, axis in enumerate(self.shape) if isinstance(axis, str)}


@dataclass(frozen=True)
class Recipe:
    """How to build one model, and how to feed it.

    Attributes:
        name: The family; file names start with it.
        build: Makes the module (still with its initial weights) for an attention
            implementation. The module takes the inputs by position and returns a tensor
            or a flat tuple of tensors.
        inputs: The graph inputs, in order.
        outputs: Names of the graph outputs, in order.
        attentions: The attention implementations that exist.
        dtypes: The element types to export.
        gain: How far weights are from a unit-variance initialisation; above 1 is peaky.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...] = ("output",)
    attentions: tuple[str, ...] = ("eager", "sdpa")
    dtypes: tuple[str, ...] = ("fp32",)
    gain: float = 1.3

    @property
    def seed(self) -> int:
        """A seed that depends on nothing but the name."""
        return zlib.crc32(self.name.encode())

    @property
    def masks(self) -> tuple[Input, ...]:
        """The inputs that say which tokens count."""
        return tuple(given for given in self.inputs if given.kind in ("mask", "padding"))

    def module(self, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Builds the model with peaky weights, ready for inference."""
        torch.manual_seed(self.seed)
        module = self.build(attention).eval().requires_grad_(False)
        sharpen(module, self.gain, self.seed)
        return module.to(dtype)

    def example(
        self, sizes: Mapping[str, int] = SIZES, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> dict[str, torch.Tensor]:
        """Draws one value per input."""
        rng = torch.Generator().manual_seed(self.seed + seed)
        drawn = {given.name: given.draw(sizes, rng) for given in self.inputs}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in drawn.items()}

    def axes(self, allowed: frozenset[str] | None = None) -> dict[str, dict[int, str]]:
        """Returns the dynamic axes of every input, only the `allowed` ones if given."""
        return {
            given.name: {at: axis for at, axis in given.axes().items() if allowed is None or set(axis.split("+")) <= allowed}
            for given in self.inputs
        }


def resolve(axis: str, sizes: Mapping[str, int]) -> int:
    """Returns the size of a named axis; ``past+seq`` is a sum.

    >>> resolve("past+seq", {"past": 5, "seq": 9})
    14
    """
    return sum(sizes[part] for part in axis.split("+"))


def sharpen(module: nn.Module, gain: float, seed: int) -> None:
    """Draws all weights again so that attention logits are of order one and more.

    Initial weights (standard deviation 0.02) make every attention row almost uniform, and
    an error in a mask, a scale or a bias then hides below the tolerance. Matrices get a
    standard deviation of `gain` over the root of their fan-in, vectors (biases, norms) move
    away from 0 and 1, scalars stay.

    Args:
        module: The model; changed in place.
        gain: Above 1 for logits beyond order one.
        seed: Of the draw.
    """
    from transformers.pytorch_utils import Conv1D

    rng = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in done:  # shared weights are drawn once
                done.add(id(parameter))
                _draw(parameter, gain, isinstance(part, Conv1D), rng)


def _draw(weight: nn.Parameter, gain: float, transposed: bool, rng: torch.Generator) -> None:
    """Draws one weight; a `transposed` one has its inputs in the first axis."""
    noise = torch.randn(weight.shape, generator=rng)
    if weight.ndim >= 2:
        outputs = weight.shape[1 if transposed else 0]
        fan_in = max(1, weight.numel() // outputs)
        weight.data.copy_(noise * gain / fan_in**0.5)
    elif weight.ndim == 1:
        weight.data.add_(noise * 0.2)


def mask_cases(recipe: Recipe, example: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields the example again under every hostile mask.

    Left and right padding differ per row, holes leave single tokens out, and the empty row
    masks every token of the last row: the case where implementations part ways.
    """
    for case, keep in HOSTILE.items():
        changed = dict(example)
        for given in recipe.masks:
            full = example[given.name]
            kept = torch.stack([keep(row, *full.shape) for row in range(full.shape[0])])
            changed[given.name] = ~kept if given.kind == "padding" else kept.to(full.dtype)
        yield case, changed


def _left(row: int, _rows: int, length: int) -> torch.Tensor:
    return torch.arange(length) >= (length // 3 * (row + 1)) % length


def _right(row: int, rows: int, length: int) -> torch.Tensor:
    return _left(row, rows, length).flip(0)


def _holes(row: int, _rows: int, length: int) -> torch.Tensor:
    return (torch.arange(length) * 7 + row) % 5 > 1


def _empty(row: int, rows: int, length: int) -> torch.Tensor:
    return torch.full((length,), row != rows - 1)


HOSTILE: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "left": _left,
    "right": _right,
    "holes": _holes,
    "empty-row": _empty,
}
