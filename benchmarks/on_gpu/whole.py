"""Whole models: as exported, by the other tools, by us, captured or not, and in torch; with the memory that each takes.

Models are those of `python -m benchmarks.exports whole FOLDER`; weights are made there. A column is a tool, with options where it
is ours, such as `ours padding=assume-none + graph`; `--columns` names others. A variant that equals one before has no cell.
Behind the name of a row is the least time for its bytes and products, on a GPU that is known.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from benchmarks.harness import Benchmark, Race, Setting, machine
from benchmarks.whole import exports
from benchmarks.whole.spec import Case, Whole, at
from benchmarks.whole.variants import GRAPH, RUNTIME, TORCH, Written, write

OURS = ("ours", "ours padding=assume-none")
COLUMNS = (*("plain", "onnxruntime", "onnxscript"), *OURS, *(f"{label}{GRAPH}" for label in ("onnxscript", *OURS)), *TORCH)


def sources(setting: Setting, quick: str = "bert-base") -> dict[str, tuple[Whole, pathlib.Path]]:
    """The models that the folder has, with their weights; one that is small where it is quick."""
    from benchmarks.whole import zoo

    known, folder = zoo.models(small=setting.quick), setting.folder / "small" if setting.quick else setting.folder
    if setting.quick:
        folder.mkdir(parents=True, exist_ok=True)
        exports.export(known[quick], folder)
    found = {name: (whole, folder / f"{name}.onnx") for name, whole in known.items()}
    found = {name: pair for name, pair in found.items() if pair[1].exists() and (name in setting.only or setting.only in name)}
    for _, path in found.values():
        exports.fill(path)
    return found


def races_of(whole: Whole, source: pathlib.Path, columns: Mapping[str, str], setting: Setting, words: str = "") -> Iterator[Race]:
    """A row for each case, with a variant for each name of a column; all models are written first, several at a time."""
    from benchmarks.whole import runs

    labels = [label for label in columns.values() if label.split()[0] not in (*TORCH, RUNTIME)]
    told, fresh = dataclasses.replace(whole, build=nn.Identity), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), fresh) as pool:
        jobs = {label: pool.submit(write, told, label, source, setting.provider, setting.arch) for label in labels}
    written = {label: job.result() for label, job in jobs.items() if job.exception() is None}
    module = functools.cache(lambda: runs.module_on(whole, setting.provider))
    for case in whole.cases:
        variants: dict[str, Callable[[], Any]] = {}
        seen: set[tuple[str, bool]] = set()
        for name, label in columns.items():
            graph = label.endswith(GRAPH)
            if label.startswith(RUNTIME):
                variants[name] = functools.partial(runs.OpenVino, source, whole, case, label, setting.threads)
            elif label not in jobs:
                variants[name] = lambda label=label, case=case: runs.by_torch(whole, module(), case, label, setting.provider)
            elif label not in written:
                variants[name] = jobs[label].result
            elif (written[label].nodes, graph) not in seen:
                seen.add((written[label].nodes, graph))
                variants[name] = functools.partial(
                    runs.OnnxRuntime, written[label].path, whole, case, setting.provider, graph=graph, threads=setting.threads
                )
        limit = least(whole, case, written) if setting.cuda else ""
        yield Race(f"{whole.name}, {case.label}{words}{limit}", variants, each=case.steps or 1)


def least(whole: Whole, case: Case, written: Mapping[str, Written]) -> str:
    """The least time that the GPU takes, by the variant that does least; nothing where its limits are not known."""
    from onnx_attnfuse.bench.roofline import limit, work
    from onnx_attnfuse.graph import io
    from onnx_attnfuse.kernels.gpus import limits_of

    device = next(filter(None, (limits_of(part.strip()) for part in machine().split(","))), None)
    if device is None:
        return ""
    shapes = {port.name: at(port, case.sizes) for port in whole.inputs}
    found = [limit(work(io.load(made.path), shapes), device) for made in written.values()]
    best = min(found, key=lambda item: item.ms)
    return f", {best.ms:.3g} ms by {best.by}"


def races(setting: Setting) -> Iterator[Race]:
    """Rows of each model."""
    columns = setting.columns.split(";") if setting.columns else COLUMNS
    for whole, source in sources(setting).values():
        yield from races_of(whole, source, {label: label for label in columns}, setting)


BENCHMARK = Benchmark("Whole models", races)
