"""One model in a process of its own: `python -m onnx_attnfuse.bench.worker`, spoken to by `onnx_attnfuse.bench.process`.

The first message is the task, answered when the model has run once. Every further one is a number of runs, and answered by
their times.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.verify.child import complaint, serve

_CLOCKS: Mapping[str | None, Callable[[], float]] = {"cpu": time.process_time, None: time.perf_counter}
_BFLOAT16 = 16


def _start() -> Callable[[Any], dict[str, Any]]:
    """Answers a task by loading its model, and numbers by the times of so many runs."""
    tasks: list[dict[str, Any]] = []
    before: list[float | None] = []
    run: list[Callable[[], float]] = []

    def answer(message: Any) -> dict[str, Any]:
        try:
            if not run:
                tasks.append(message)
                before.append(memory(message["ep"]["memory"]))
                run.append(functools.partial(_timed, *_started(message), _CLOCKS[message.get("clock")]))
                found: dict[str, Any] = {"loaded": True}
            else:
                found = {"ms": [run[0]() for _ in range(message)]}
            place = tasks[0]["ep"]["memory"]
            return {**found, "megabytes": _more(before[0], memory(place), place)}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return {"error": f"{type(error).__name__}: {complaint(error)}"}

    return answer


def memory(place: str) -> float | None:
    """MB in use: of the first GPU, by whomever, where `place` is `cuda`; or the most that this process ever had."""
    if place == "cuda":
        return gpus.memory_used()
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return None


def _more(before: float | None, after: float | None, place: str) -> float | None:
    """Memory that the model took: on a GPU the growth of memory in use, on a CPU the peak of the whole process."""
    if before is None or after is None:
        return None
    return round(after - before if place == "cuda" else after, 1)


def _started(task: dict[str, Any]) -> tuple[Any, Any]:
    """A session that has run once, and what binds its inputs and outputs to the device."""
    ort: Any = importlib.import_module("onnxruntime")
    providers, place = task["ep"]["providers"], task["ep"]["memory"]
    if place == "cuda" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if task.get("threads"):
        options.intra_op_num_threads = task["threads"]
    settings = {**task["ep"]["measured_with"], **task.get("provider_options", {})}
    chosen = [(name, settings if name == providers[0] else {}) for name in providers]
    session = ort.InferenceSession(task["model"], options, providers=chosen)
    if providers[0] not in session.get_providers():
        raise RuntimeError(f"ONNX Runtime could not start its {providers[0]}")
    binding = session.io_binding()
    wanted, bound = {item.name for item in session.get_inputs()}, dict[str, Any]()
    with np.load(task["arrays"]) as arrays:
        for name, key in zip(task["names"], arrays.files, strict=True):
            if name in wanted:
                bound[name] = _value(ort, arrays[key], place, name in task["bfloat16"])
                binding.bind_ortvalue_input(name, bound[name])
    buffers = task.get("buffers", {})
    for item in session.get_outputs():
        if item.name in buffers:
            binding.bind_ortvalue_output(item.name, bound[buffers[item.name]])
        else:
            binding.bind_output(item.name, place)
    _timed(session, binding)
    return session, binding


def _value(ort: Any, array: Any, place: str, is_bfloat16: bool) -> Any:
    """An array in the memory of the device; bfloat16 comes as its bits."""
    if not is_bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(array, place, 0)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)


def _timed(session: Any, binding: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of one run, to its end."""
    start = clock()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    return 1e3 * (clock() - start)


if __name__ == "__main__":
    sys.exit(serve(_start))
