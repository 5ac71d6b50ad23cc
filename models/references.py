"""Inputs and torch outputs of an export, kept in a ``.npz`` beside it.

Keys are ``in/<name>`` and ``out/<index>`` for the example, and ``<case>/in/<name>`` and
``<case>/out/<index>`` for every further case; ``dtype`` is ``fp32``, ``fp16`` or ``bf16``.
NumPy has no bfloat16, so those values are stored as float32. A case without ``in/`` keys of
its own does not exist: every case is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn

    from models.recipe import Recipe

EXAMPLE = "example"


def file_name(recipe: str, exporter: str, attention: str, dtype: str = "fp32") -> str:
    """Returns the name of an export.

    >>> file_name("bert", "dyn18", "sdpa", "fp16")
    'bert__dyn18__sdpa__fp16'
    """
    suffix = "" if dtype == "fp32" else f"__{dtype}"
    return f"{recipe}__{exporter}__{attention}{suffix}"


@dataclass(frozen=True)
class Case:
    """One set of inputs and the outputs torch gives for them."""

    name: str
    inputs: dict[str, np.ndarray]
    outputs: tuple[np.ndarray, ...]


def cases(recipe: Recipe, module: nn.Module, dtype: torch.dtype, dynamic: frozenset[str]) -> Iterator[Case]:
    """Runs the module on the example, the hostile masks and, where axes allow, other sizes.

    Args:
        recipe: The recipe of the module.
        module: The module.
        dtype: Its element type.
        dynamic: The axes that stayed dynamic in the export.
    """
    from models.recipe import mask_cases

    for name, sizes in _sizes(recipe, dynamic).items():
        example = recipe.example(sizes, dtype, seed=len(name))
        yield _run(name, module, example)
        if recipe.masks:
            prefix = "" if name == EXAMPLE else f"{name}-"
            for case, inputs in mask_cases(recipe, example):
                yield _run(prefix + case, module, inputs)


def _sizes(recipe: Recipe, dynamic: frozenset[str]) -> dict[str, dict[str, int]]:
    """Returns the size sets: the example, all axes changed, and a single decoding step."""
    from models.recipe import RESIZED, SIZES

    sets = {EXAMPLE: SIZES}
    if dynamic:
        sets["resized"] = {axis: RESIZED[axis] if axis in dynamic else size for axis, size in SIZES.items()}
    if {"past", "seq"} <= dynamic:
        sets["step"] = {**sets["resized"], "seq": 1}
    return sets


def _run(name: str, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Case:
    import torch

    with torch.no_grad():
        result = module(*(value.clone() for value in inputs.values()))
    outputs = result if isinstance(result, tuple) else (result,)
    return Case(
        name,
        {key: _array(value) for key, value in inputs.items()},
        tuple(_array(value) for value in outputs),
    )


def _array(value: torch.Tensor) -> np.ndarray:
    import torch

    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def write(path: Path, dtype: str, made: Iterable[Case]) -> None:
    """Writes the cases of one export."""
    arrays: dict[str, np.ndarray] = {"dtype": np.array(dtype)}
    for case in made:
        prefix = "" if case.name == EXAMPLE else f"{case.name}/"
        arrays |= {f"{prefix}in/{name}": value for name, value in case.inputs.items()}
        arrays |= {f"{prefix}out/{at}": value for at, value in enumerate(case.outputs)}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def read(path: Path) -> list[Case]:
    """Reads the cases of one export, the example first."""
    inputs: dict[str, dict[str, np.ndarray]] = {}
    outputs: dict[str, dict[int, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            if key == "dtype":
                continue
            prefix, kind, name = f"{EXAMPLE}/{key}".rsplit("/", 2)
            case = prefix.removeprefix(f"{EXAMPLE}/")
            if kind == "in":
                inputs.setdefault(case, {})[name] = arrays[key]
            else:
                outputs.setdefault(case, {})[int(name)] = arrays[key]
    return [Case(name, given, tuple(array for _, array in sorted(outputs[name].items()))) for name, given in inputs.items()]
