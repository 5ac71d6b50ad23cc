"""Whole models with all forms that are written for CUDA, without each of them, and without all; captured and launched.

The models are those of `python benchmarks/whole_models.py FOLDER`. A form that leaves a model as it is has no cell.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import unittest.mock
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx

import onnx_attnfuse
from benchmarks.harness import Benchmark, Bound, Race, Setting, quietly
from benchmarks.whole import spec as specs
from benchmarks.whole import weights
from benchmarks.whole.spec import Spec
from benchmarks.whole.variants import word
from onnx_attnfuse.kernels import providers

MODELS = ("bert-base", "xlmr-large", "t5-base-enc", "vit-l-224", "gpt2-medium", "modernbert-12l", "dinov3-h-12l")
FORMS = ("fused-products", "split-products", "any-by-sum", "whole-rotations", "paired-rotations", "rotated-rows", "half-gelu")
"""The rules that are left out, each by itself."""
RIGHT: Mapping[str, Any] = {"padding": "assume-right"}
PACKED: Mapping[str, Mapping[str, Any]] = {
    "right": RIGHT,
    "packed": {"target": "packed"},
    "packed, right": {"target": "packed", **RIGHT},
}
"""What models with padding are written with besides."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A model that is to be written.

    Attributes:
        off: Rules that are left out.
        choices: What it is optimized with; None for the export.
    """

    label: str
    off: frozenset[str]
    choices: Mapping[str, Any] | None

    def path(self, source: pathlib.Path, way: str) -> pathlib.Path:
        """Where it goes."""
        return source if self.choices is None else source.with_suffix(f".{word(f'{way} {self.label}')}.onnx")


def write(source: pathlib.Path, written: Written, way: str) -> str:
    """Writes a model, and gives its nodes as text; what fails is a result too."""
    if written.choices is None:
        return ""
    record = providers.provider("cuda")
    others = {"cuda": dataclasses.replace(record, pays=record.pays - written.off)}
    target = written.path(source, way)
    try:
        with quietly(), unittest.mock.patch.dict("onnx_attnfuse.kernels.providers._records", others):
            onnx_attnfuse.optimize(source, ep="cuda", verify="none", **written.choices).save(target)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return f"{type(error).__name__}: {error}"
    return "".join(
        f"{node.op_type} {node.input} {node.output}\n" for node in onnx.load(target, load_external_data=False).graph.node
    )


class Whole(Bound):
    """A whole model, whose result is known where nothing is padding."""

    def __init__(self, path: pathlib.Path, spec: Spec, setting: Setting, *, captured: bool) -> None:
        """Loads it with the inputs of its first case."""
        feeds = specs.feeds(spec, spec.cases[0])
        super().__init__(
            path, setting, feeds, {"arena_extend_strategy": "kSameAsRequested"} if setting.cuda else {}, captured=captured
        )
        self._kept = next((feeds[port.name] for port in spec.inputs if port.kind == "mask"), None)

    def output(self) -> Any:
        """The first output, NaN at padding."""
        found = np.asarray(super().output(), np.float32)
        if self._kept is not None:
            found[self._kept == 0] = np.nan
        return found


def variants(spec: Spec, way: str, setting: Setting) -> list[Written]:
    """What is written of a model."""
    case = spec.cases[0]
    sizes = {name: size for name, size in case.sizes.items() if size}
    choices = {"arch": setting.arch, **({"cuda_graph": True, "dim": sizes} if way == "captured" else {})}
    every = frozenset(FORMS)
    made = [Written("all", frozenset(), choices), *(Written(f"no {form}", frozenset([form]), choices) for form in FORMS)]
    made.append(Written("none", every, choices))
    tokens = sum(specs.lengths(case))
    rows = {"packed": tokens, "packed, roomy": tokens * 5 // 4}
    fixed = {name: {"target": "packed", "packed_tokens": count} for name, count in rows.items()}
    more = PACKED if way == "launched" else {"right": RIGHT, **fixed}
    made += [Written(label, frozenset(), {**choices, **chosen}) for label, chosen in more.items() if case.padded]
    return [*made, Written("export", every, None)] if way == "launched" else made


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model, captured and launched."""
    ways = ("captured", "launched") if setting.cuda else ("launched",)
    rows = [(name, way) for name in MODELS for way in ways if (setting.folder / f"{name}.onnx").exists()]
    rows = [(name, way) for name, way in rows if setting.only in f"{name}, {way}"]
    sources = {name: setting.folder / f"{name}.onnx" for name, _ in rows}
    known = {name: specs.read(path.with_suffix(".json")) for name, path in sources.items()}
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        list(pool.map(weights.fill, sources.values()))
        jobs = {
            (name, way, written.label): (written, pool.submit(write, sources[name], written, way))
            for name, way in rows
            for written in variants(known[name], way, setting)
        }
        for name, way in rows:
            spec, made = known[name], {label: job for (*row, label), job in jobs.items() if row == [name, way]}
            texts = {label: job.result() for label, (_, job) in made.items()}
            shown = [
                written for label, (written, _) in made.items() if not label.startswith("no ") or texts[label] != texts["all"]
            ]
            load = functools.partial(Whole, spec=spec, setting=setting, captured=way == "captured")
            makers = {written.label: functools.partial(load, written.path(sources[name], way)) for written in shown}
            yield Race(f"{name}, {spec.cases[0].label}, {way}", makers)


BENCHMARK = Benchmark("Forms for CUDA in whole models", races)
