"""One variant of one model, in a process of its own: ``python -m benchmarks.whole.cell FOLDER NAME VARIANT [--make]``.

A line of JSON for every case, as soon as it is known. With `--wait` it imports what it needs, says so, and goes on when told by a
line on its standard input: the next process gets ready while one measures. With `--make` it writes the model and runs nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.whole import measure, spec, variants, weights
from benchmarks.whole.measure import Job
from benchmarks.whole.spec import Case, Spec
from benchmarks.whole.variants import TORCH, Variant

MARK, READY = "CELL ", "READY"


def error_line(error: BaseException) -> str:
    """What an error says, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def say(**found: Any) -> None:
    """Prints a result."""
    print(f"{MARK}{json.dumps(found)}", flush=True)


def measured(model: Spec, variant: Variant, folder: pathlib.Path, provider: str, seconds: float, jobs: Any) -> None:
    """Runs every case; `jobs` makes one of a case."""
    memory = measure.Memory(provider)
    for case in model.cases:
        try:
            job: Job = jobs(case)
            found = measure.timed(job, memory, seconds)
            result = job.result()
            if result is not None:
                place = folder / f"{model.name}.{variants.word(case.label)}.npy"
                found |= measure.difference(result, place, is_reference=variant.label == "plain")
            say(case=case.label, **found)
            del job, result
        except Exception as error:  # noqa: BLE001 - a failure is a result
            say(case=case.label, error=error_line(error))
        gc.collect()


def by_onnxruntime(model: Spec, variant: Variant, folder: pathlib.Path, provider: str) -> Callable[[Case], Job]:
    """Makes what is timed of a case, for a model that ONNX Runtime runs; one session for all but captured graphs."""
    from benchmarks.whole import ort_runs

    sessions: list[Any] = []

    def job(case: Case) -> Job:
        if variant.graph and case.steps:
            raise ValueError("shapes grow from step to step, and a captured graph has fixed ones")
        if variant.graph:
            sessions.clear()
        if not sessions:
            sessions.append(ort_runs.session_of(variant.path(folder, model.name), provider, graph=variant.graph))
        return ort_runs.job(sessions[0], model, case, provider)

    return job


def by_torch(model: Spec, variant: Variant, provider: str) -> Callable[[Case], Job]:
    """The same for torch."""
    from benchmarks.whole import torch_runs, zoo

    whole = zoo.models(model.small)[model.name]
    made: list[Any] = []

    def job(case: Case) -> Job:
        if not made:
            made.append(torch_runs.module_of(whole, provider))
        return torch_runs.job(whole, made[0], case, variant.tool, provider)

    return job


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("variant")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--arch", default="")
    parser.add_argument("--make", action="store_true")
    parser.add_argument("--wait", action="store_true")
    chosen = parser.parse_args()
    variant = variants.read(chosen.variant)
    model = spec.read(chosen.folder / f"{chosen.name}.json")
    if chosen.make:
        try:
            weights.fill(Variant("plain").path(chosen.folder, model.name))
            say(made=variants.make(model, variant, chosen.folder, chosen.provider, chosen.arch))
        except Exception as error:  # noqa: BLE001 - a failure is a result
            say(error=error_line(error))
        return
    if chosen.provider == "cuda" or variant.tool in TORCH:
        import torch  # noqa: F401 - its CUDA libraries are those that ONNX Runtime finds
    jobs = (
        by_torch(model, variant, chosen.provider)
        if variant.tool in TORCH
        else by_onnxruntime(model, variant, chosen.folder, chosen.provider)
    )
    if chosen.wait:
        print(READY, flush=True)
        sys.stdin.readline()
    measured(model, variant, chosen.folder, chosen.provider, chosen.seconds, jobs)


if __name__ == "__main__":
    main()
