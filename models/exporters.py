"""Exports one recipe with one exporter, with the torch outputs to compare against."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from torch import nn

from models import references
from models.recipe import Recipe

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Naming = Literal["named", "auto", "dynamic"]
"""Dynamic axes by name; by `Dim.AUTO` or `Dim.DYNAMIC`, which are lists of axes for TorchScript."""


@dataclass(frozen=True)
class Export:
    """An export that was written.

    Attributes:
        name: Name of the files, without suffix.
        seconds: How long it took.
        dynamic: The axes that stayed dynamic.
        note: Why not all of them did; empty if they did.
        status: Always ``ok``.
    """

    name: str
    seconds: float
    dynamic: tuple[str, ...]
    note: str = ""
    status: str = "ok"


@dataclass(frozen=True)
class Failure:
    """An export that could not be made, and the reason."""

    name: str
    seconds: float
    reason: str
    status: str = "failed"


def export(recipe: Recipe, exporter: str, attention: str, dtype: str, folder: Path) -> Export | Failure:
    """Writes one model and its references; never raises for a model that does not export.

    Dynamic axes are given up step by step: first all but the batch, then the batch too. The
    record says which ones are left and why. The fast path of `torch.nn.MultiheadAttention` is
    switched off, as anyone must who exports it: it is one operator that ONNX does not have.

    Args:
        recipe: What to export.
        exporter: ``dyn`` or ``ts``, for dynamo or TorchScript, and the opset; file names have it.
        attention: One of the recipe's attention implementations.
        dtype: A key of `DTYPES`.
        folder: Where the files go.
    """
    name = references.file_name(recipe.name, exporter, attention, dtype)
    started = time.perf_counter()
    reasons: list[str] = []
    torch.backends.mha.set_fastpath_enabled(False)
    for dynamic in _attempts(recipe):
        try:
            _write(recipe, exporter, attention, dtype, folder / name, dynamic=dynamic)
        except Exception as error:  # noqa: BLE001 - whatever the exporter raises is the result
            reasons.append(first_line(error))
            continue
        note = f"not all axes dynamic: {reasons[0]}" if reasons else ""
        return Export(name, _since(started), tuple(sorted(dynamic)), note)
    (folder / f"{name}.onnx").unlink(missing_ok=True)
    return Failure(name, _since(started), reasons[-1])


def first_line(error: BaseException) -> str:
    """Returns the type of the innermost error and the first line of what it says."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _attempts(recipe: Recipe) -> list[frozenset[str]]:
    """Returns the sets of dynamic axes to try, largest first."""
    everything = frozenset(part for axes in recipe.axes().values() for axis in axes.values() for part in axis.split("+"))
    smaller = (everything & {"batch"}, frozenset())
    return list(dict.fromkeys((everything, *map(frozenset, smaller))))


def _write(recipe: Recipe, exporter: str, attention: str, dtype: str, stem: Path, *, dynamic: frozenset[str]) -> None:
    """Exports with one set of dynamic axes and writes both files."""
    module = recipe.module(attention, DTYPES[dtype])
    example = recipe.example(dtype=DTYPES[dtype])
    # References first: tracing may leave traces in a module, for example cached tables.
    made = list(references.cases(recipe, module, DTYPES[dtype], dynamic))
    if not all(np.isfinite(output).all() for output in made[0].outputs):
        raise ValueError("the torch outputs are not finite")
    module = recipe.module(attention, DTYPES[dtype])
    path = stem.with_name(f"{stem.name}.onnx")
    with torch.no_grad():
        export_module(recipe, module, example, exporter, path, dynamic=dynamic)
    references.write(stem.with_name(f"{stem.name}.npz"), dtype, made)


def export_module(
    recipe: Recipe,
    module: nn.Module,
    example: dict[str, torch.Tensor],
    exporter: str,
    path: Path,
    *,
    dynamic: frozenset[str],
    naming: Naming = "named",
) -> None:
    """Calls the exporter; `naming` says what it is told of dynamic axes."""
    dynamo, opset = said_by(exporter)
    axes: dict[str, Any] = {name: _told(named, naming, dynamo=dynamo) for name, named in recipe.axes(dynamic).items()}
    names: dict[str, Any] = {
        "input_names": list(example),
        "output_names": list(recipe.outputs),
        "opset_version": opset,
        "dynamo": dynamo,
    }
    arguments = tuple(example.values())
    if dynamo:
        shapes = (tuple(axes.values()),) if dynamic else None
        if not _takes_varargs(module):
            shapes = shapes[0] if shapes else None
        torch.onnx.export(module, arguments, path, dynamic_shapes=shapes, external_data=False, **names)
    else:
        torch.onnx.export(module, arguments, path, dynamic_axes=axes if dynamic else None, **names)
    imports = onnx.load(path, load_external_data=False).opset_import
    if (written := next(item.version for item in imports if not item.domain)) != opset:
        raise ValueError(f"opset {opset} was asked for, and a model of opset {written} was written")


def said_by(exporter: str) -> tuple[bool, int]:
    """Whether a tag says dynamo, and its opset.

    >>> said_by("dyn18"), said_by("ts17")
    ((True, 18), (False, 17))
    """
    kind, opset = exporter.rstrip("0123456789"), exporter.lstrip("dynts")
    return {"dyn": True, "ts": False}[kind], int(opset)


def _told(named: dict[int, str], naming: Naming, *, dynamo: bool) -> dict[int, Any] | list[int]:
    """Returns the dynamic axes of one input as the exporter is told of them."""
    if naming == "named":
        return {at: axis.replace("+", "_plus_") for at, axis in named.items()}
    if not dynamo:
        return list(named)
    return dict.fromkeys(named, torch.export.Dim.AUTO if naming == "auto" else torch.export.Dim.DYNAMIC)


def _takes_varargs(module: nn.Module) -> bool:
    """Says whether the module takes its inputs as ``*args``."""
    code = type(module).forward.__code__
    return bool(code.co_flags & 0x04) and code.co_argcount == 1


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 2)
