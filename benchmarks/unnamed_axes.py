"""Decoders with a cache whose axes have names, or none: ``python -m benchmarks.unnamed_axes FOLDER [RECIPE,...]``.

Each recipe is exported with names, with `Dim.AUTO`, with `Dim.DYNAMIC` and, by TorchScript, with names and with lists.
A row tells how many attentions are fused, and whether the cache can be one buffer. The exit code is 1 where these differ.
"""

from __future__ import annotations

import pathlib
import sys

import torch

import onnx_attnfuse
from models.exporters import Naming, export_module
from models.recipes import RECIPES

_WAYS: tuple[tuple[str, Naming], ...] = (
    ("dyn18", "named"),
    ("dyn18", "auto"),
    ("dyn18", "dynamic"),
    ("ts17", "named"),
    ("ts17", "auto"),
)


def main(arguments: list[str]) -> int:
    """Runs the command."""
    folder = pathlib.Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    names = arguments[1].split(",") if len(arguments) > 1 else [name for name in RECIPES if name.endswith("_past")]
    print("| recipe | " + " | ".join(f"{exporter}, {naming}" for exporter, naming in _WAYS) + " |")
    print("|---" * (len(_WAYS) + 1) + "|")
    differing = 0
    for name in names:
        found = [_row(name, exporter, naming, folder) for exporter, naming in _WAYS]
        differing += len(set(found[:3])) > 1 or len(set(found[3:])) > 1
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)
    return int(differing > 0)


def _row(name: str, exporter: str, naming: Naming, folder: pathlib.Path) -> str:
    """Sites and shared cache of one export."""
    recipe = RECIPES[name]
    attention = recipe.attentions[-1]
    path = folder / f"{name}__{exporter}__{attention}__{naming}.onnx"
    if not path.exists():
        dynamic = frozenset(part for axes in recipe.axes().values() for axis in axes.values() for part in axis.split("+"))
        with torch.no_grad():
            export_module(recipe, recipe.module(attention), recipe.example(), exporter, path, dynamic=dynamic, naming=naming)
    grown = onnx_attnfuse.optimize(path, ep="cpu").report
    shared = onnx_attnfuse.optimize(path, ep="cpu", cache="shared").report
    return f"{grown.fused} of {grown.candidates}, {'shared' if shared.decoder is not None else 'not shared'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
