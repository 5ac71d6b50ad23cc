"""Whole models on a GPU: exported, by the other tools, by us, and by torch; latency, memory, and how far results are apart.

    python benchmarks/whole_models_on_gpu.py FOLDER OUT.json [--only NAME,...] [--variants plain,...] [--ours "NAME=VALUE ..."]
    python benchmarks/whole_models_on_gpu.py FOLDER OUT.json --profile NAME VARIANT

FOLDER holds what `whole_models.py` wrote. Weights and the models that are made of it go to `--work`, and are found there again.
Every variant of every model is measured in a process of its own; the results are written after each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.whole import variants
from benchmarks.whole.children import Call, Child, one_ahead
from benchmarks.whole.variants import ONNX, TORCH, Variant

ORDER = (
    *("bert-base", "whisper-encoder", "whisper-decoder", "vit-l-224", "vit-l-896", "gpt2-medium", "sd-unet"),
    *("qwen2-0.5b", "qwen3-0.6b", "gemma3-1b", "qwen3-moe", "llama-1b"),
)
SLOW = ("compile", "reduce-overhead")
"""Measured after all else."""


class Results:
    """What was measured so far, on the disk too."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {"machine": machine(), "arguments": sys.argv[1:], "made": [], "cells": []}

    def add(self, kind: str, **found: Any) -> None:
        """Adds one and writes all."""
        self._found[kind].append(found)
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(self._found, indent=1) + "\n")
        part.replace(self._path)
        shown = {key: value for key, value in found.items() if key not in {"operators", "work", "fastest", "slowest", "runs"}}
        print(json.dumps(shown), flush=True)


def machine() -> dict[str, str]:
    """What this runs on."""
    import importlib.metadata

    packages = ("torch", "transformers", "diffusers", "onnxruntime-gpu", "onnxruntime", "onnxscript", "onnx", "onnx-ir", "numpy")
    found = {"python": platform.python_version(), "processors": str(os.cpu_count())}
    there = {item.name.lower(): item.version for item in importlib.metadata.distributions() if item.name}
    found |= {name: there[name] for name in packages if name in there}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(query[0]):
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return found


def wanted(chosen: argparse.Namespace) -> list[Variant]:
    """The variants to measure, in order."""
    kinds = chosen.variants.split(",")
    ours = [Variant("ours", choices) for choices in (chosen.ours or [""])]
    found = [Variant(kind) for kind in ("plain", "onnxruntime", "onnxscript") if kind in kinds]
    found += ours if "ours" in kinds else []
    bases = {"ours": ours, **{kind: [Variant(kind)] for kind in ONNX if kind != "ours"}}
    for kind in chosen.graphs.split(",") if chosen.graphs else ():
        found += [Variant(base.tool, base.choices, graph=True) for base in bases[kind]]
    return found + [Variant(kind) for kind in TORCH if kind in kinds]


Spared = dict[tuple[str, Variant], str]
"""What need not be run, and why."""


def prepare(chosen: argparse.Namespace, names: list[str], made: list[Variant], results: Results) -> Spared:
    """Makes weights and models, several at a time; returns what need not be run, and why."""
    chosen.work.mkdir(parents=True, exist_ok=True)
    for name in names:
        for suffix in (".onnx", ".json"):
            target = chosen.work / f"{name}{suffix}"
            if not target.exists():
                shutil.copyfile(chosen.folder / f"{name}{suffix}", target)

    def make(job: tuple[str, Variant]) -> tuple[tuple[str, Variant], dict[str, Any]]:
        child = Child(Call(job[0], job[1].label, (*arguments(chosen, *job), "--make")))
        found = list(child.results(chosen.make_cap))
        return job, found[-1] if found else {"error": "it said nothing"}

    spared: Spared = {}
    operators: dict[str, Any] = {}
    waves = [[Variant("plain")], [variant for variant in made if variant.tool != "plain"]]
    with concurrent.futures.ThreadPoolExecutor(chosen.workers) as pool:
        for wave in waves:
            jobs = [(name, variant) for name in reversed(names) for variant in dict.fromkeys(wave)]
            for job, found in pool.map(make, jobs):
                results.add("made", name=job[0], variant=job[1].label, **found.get("made", found))
                if "error" in found:
                    spared[job] = "it could not be made"
                elif operators.setdefault(job[0], found["made"]["operators"]) == found["made"]["operators"] and wave != waves[0]:
                    spared[job] = "it is the export: nothing was fused"
    return spared


def arguments(chosen: argparse.Namespace, name: str, variant: Variant) -> tuple[str, ...]:
    """What a process is called with."""
    options = ("--provider", chosen.provider, "--seconds", str(chosen.seconds), "--arch", chosen.arch)
    return (str(chosen.work), name, variant.label, *options)


def measure(chosen: argparse.Namespace, names: list[str], columns: list[Variant], results: Results) -> None:
    """Measures everything that time allows."""
    begin = time.monotonic()
    base = [variant for variant in columns if variant.tool in ONNX]
    made = list(dict.fromkeys(Variant(variant.tool, variant.choices) for variant in base))
    spared = prepare(chosen, names, made, results)
    cells = [(name, variant) for name in names for variant in columns if variant.tool not in SLOW]
    cells += [(name, variant) for name in names for variant in columns if variant.tool in SLOW]
    calls: list[Call] = []
    for name, variant in cells:
        if why := spared.get((name, Variant(variant.tool, variant.choices))):
            results.add("cells", name=name, variant=variant.label, error=why)
        else:
            calls.append(Call(name, variant.label, (*arguments(chosen, name, variant), "--wait")))
    for child in one_ahead(calls):
        left = chosen.limit - (time.monotonic() - begin)
        where = {"name": child.call.name, "variant": child.call.label}
        if left < 5:
            results.add("cells", **where, error="no time was left")
            continue
        for found in child.results(min(chosen.cap, left)):
            results.add("cells", **where, **found)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--variants", default=",".join((*ONNX, *TORCH)), help=f"of {', '.join((*ONNX, *TORCH))}")
    parser.add_argument("--ours", action="append", help="options of ours as NAME=VALUE words; may be given several times")
    parser.add_argument("--graphs", default="ours", help="which of the ONNX variants run as CUDA graphs too; empty for none")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arch", default="", help="for ours; by default that of the GPU here")
    parser.add_argument("--seconds", type=float, default=1.0, help="that each cell is measured for")
    parser.add_argument("--cap", type=float, default=240, help="seconds that one variant of one model may take")
    parser.add_argument("--make-cap", type=float, default=240, help="seconds that a tool may take for a model")
    parser.add_argument("--limit", type=float, default=540, help="seconds for everything")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 3), help="tools that run at a time")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "whole_models")
    parser.add_argument("--profile", nargs=2, metavar=("NAME", "VARIANT"), help="what takes the time in one of them")
    parser.add_argument("--case", default="", help="the case to profile; the first by default")
    chosen = parser.parse_args()
    there = {path.stem for path in chosen.folder.glob("*.json")}
    names = [name for name in ORDER if name in there and (not chosen.only or name in chosen.only.split(","))]
    if chosen.profile:
        name, variant = chosen.profile[0], variants.read(chosen.profile[1])
        if variant.tool in ONNX:
            prepare(chosen, [name], [Variant(variant.tool, variant.choices)], Results(chosen.out))
        command = [sys.executable, "-m", "benchmarks.whole.profiles", *arguments(chosen, name, variant), "--case", chosen.case]
        subprocess.run(command, check=False)
        return
    measure(chosen, names, wanted(chosen), Results(chosen.out))


if __name__ == "__main__":
    main()
