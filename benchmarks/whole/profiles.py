"""What takes the time: operators of one variant of one model, and kernels of the GPU.

    python -m benchmarks.whole.profiles FOLDER NAME VARIANT [--case LABEL]

Operators are timed with every launch waited for, or they would be timed on the host only; that adds some microseconds to each.
The times of kernels are the GPU's own.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable

from benchmarks.whole import spec as specs
from benchmarks.whole import variants
from benchmarks.whole.cell import by_torch, error_line
from benchmarks.whole.measure import Job
from benchmarks.whole.spec import Case, Spec
from benchmarks.whole.variants import TORCH, Variant

_ROWS, _WARM, _RUNS = 25, 2, 3


def by_operator(model: Spec, case: Case, path: pathlib.Path, provider: str) -> None:
    """Prints operators as ONNX Runtime times them, and what its own optimizations made of the graph."""
    from benchmarks.whole import ort_runs

    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        optimised = place / "optimised.onnx"
        ort_runs.session_of(path, provider, optimised=str(optimised))
        print("\noperators after ONNX Runtime's own optimizations:", variants.operators(optimised))
        session = ort_runs.session_of(path, provider, profile=str(place / "profile"))
        job = ort_runs.job(session, model, case, provider)
        for _ in range(_WARM + _RUNS):
            job.run()
        events = json.loads(pathlib.Path(session.end_profiling()).read_text())
    runs = sorted((event for event in events if event.get("name") == "model_run"), key=lambda event: event["ts"])
    begin = runs[_WARM * job.parts]["ts"]
    nodes = [event for event in events if event.get("cat") == "Node" and event["ts"] >= begin and "op_name" in event["args"]]
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in nodes:
        if event["name"].endswith("_kernel_time"):
            provided = event["args"].get("provider", "").removesuffix("ExecutionProvider")
            times[f"{event['args']['op_name']} ({provided})"].append(event["dur"] / 1e3)
    print_table("operator", times, _RUNS * job.parts)


def by_kernel(job: Job) -> None:
    """Prints kernels as the GPU times them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        print("\nno GPU, no kernels")
        return
    for _ in range(_WARM):
        job.before()
        job.run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_RUNS):
            job.before()
            job.run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events() or ():
        taken = getattr(event, "device_time_total", 0) or 0
        if taken:
            times[event.name[:110]].append(taken / 1e3)
    print_table("kernel", times, _RUNS * job.parts)


def print_table(what: str, times: dict[str, list[float]], runs: int) -> None:
    """The heaviest, in milliseconds per run of the model."""
    total = sum(map(sum, times.values()))
    print(f"\n| {what} | count | ms | share |\n|---|---|---|---|")
    for name, found in sorted(times.items(), key=lambda item: -sum(item[1]))[:_ROWS]:
        print(f"| {name} | {len(found) / runs:.0f} | {sum(found) / runs:.3f} | {sum(found) / max(total, 1e-9):.1%} |")
    print(f"| all | {sum(map(len, times.values())) / runs:.0f} | {total / runs:.3f} | |", flush=True)


def main() -> None:
    """Runs the command; a part that fails does not end the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("variant")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--case", default="")
    chosen, _ = parser.parse_known_args()
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    if chosen.provider == "cuda":
        import torch  # noqa: F401 - its CUDA libraries are those that ONNX Runtime finds
    variant = variants.read(chosen.variant)
    model = specs.read(chosen.folder / f"{chosen.name}.json")
    case = next((case for case in model.cases if not chosen.case or case.label == chosen.case), None)
    if case is None:
        sys.exit(f"{model.name} has no case {chosen.case!r}; take one of {[case.label for case in model.cases]}")
    print(f"\n{model.name}, {case.label}, {variant.label}")
    if variant.tool in TORCH:
        by_kernel(by_torch(model, variant, chosen.provider)(case))
        return
    path = Variant(variant.tool, variant.choices).path(chosen.folder, model.name)
    _tried(lambda: by_operator(model, case, path, chosen.provider))
    _tried(lambda: by_kernel(_job(model, case, path, chosen.provider)))


def _job(model: Spec, case: Case, path: pathlib.Path, provider: str) -> Job:
    from benchmarks.whole import ort_runs

    return ort_runs.job(ort_runs.session_of(path, provider), model, case, provider)


def _tried(part: Callable[[], None]) -> None:
    try:
        part()
    except Exception as error:  # noqa: BLE001 - what is known of the rest is worth having
        print(error_line(error))


if __name__ == "__main__":
    main()
