"""Runs an export and what was written of it on an execution provider: `python -m benchmarks.on_providers.runner EP [OPTIONS]`.

Runs in the environment that has the provider; OPTIONS are those of the provider as JSON. Each line on stdin is a task as JSON,
each on stdout its answer. `runner.js` does the same in node.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime

from benchmarks.on_providers import tensors
from benchmarks.on_providers.tensors import Array
from onnx_attnfuse.bench.conformance.installed import Installed, find

_CPU = "CPUExecutionProvider"


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    provider = find(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    if provider.library is not None:
        onnxruntime.register_execution_provider_library(provider.ort_name, provider.library)
    for line in sys.stdin:
        task = json.loads(line)
        answer = ran(task, provider) if "models" in task else {"versions": provider.versions}
        print(json.dumps(answer), file=answers, flush=True)


def ran(task: Mapping[str, Any], provider: Installed) -> dict[str, Any]:
    """What each model gives on the provider, and milliseconds of both in turn.

    Args:
        task: The models by name, cases with their inputs, the folder for outputs, sizes of symbols, and for how long to time.
        provider: The provider.
    """
    feeds = [tensors.load(case["feeds"]) for case in task["cases"]]
    sessions: dict[str, Any] = {}
    answer: dict[str, Any] = {}
    for name, path in task["models"].items():
        started = time.perf_counter()
        try:
            session = sessions[name] = _session(path, task, provider)
            answer[name] = {
                "load": time.perf_counter() - started,
                "cases": _outputs(session, feeds, pathlib.Path(task["out"], name)),
            }
            ran_there = _on_cpu(pathlib.Path(session.end_profiling()))
            answer[name]["on cpu"] = None if provider.ort_name == _CPU else ran_there
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            answer[name] = {"error": _line(error)}
    if len(sessions) == 2 and all("outputs" in found["cases"][0] for found in answer.values()):
        answer["ms"] = _timed(sessions, feeds[0], task)
    return answer


def _session(path: str, task: Mapping[str, Any], provider: Installed) -> Any:
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.enable_profiling, options.profile_file_prefix = True, str(pathlib.Path(task["out"], "profile"))
    for name, size in task["sizes"].items():
        options.add_free_dimension_override_by_name(name, size)
    if provider.library is None:
        return onnxruntime.InferenceSession(path, options, providers=[(provider.ort_name, dict(provider.options)), _CPU])
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider.ort_name][:1]
    if not devices:
        raise RuntimeError(f"{provider.ort_name} finds no device here")
    options.add_provider_for_devices(devices, dict(provider.options))
    return onnxruntime.InferenceSession(path, options)


def _outputs(session: Any, feeds: Sequence[Mapping[str, Array]], prefix: pathlib.Path) -> list[dict[str, Any]]:
    """The outputs of each case, or why there are none."""
    return [_ran(session, case, pathlib.Path(f"{prefix} {place}")) for place, case in enumerate(feeds)]


def _ran(session: Any, case: Mapping[str, Array], prefix: pathlib.Path) -> dict[str, Any]:
    wanted = {entry.name for entry in session.get_inputs()}
    names = [entry.name for entry in session.get_outputs()]
    try:
        outputs = session.run(names, {name: array for name, array in case.items() if name in wanted})
    except Exception as error:  # noqa: BLE001 - a case that fails is told as such
        return {"error": _line(error)}
    return {"outputs": tensors.save(dict(zip(names, outputs, strict=True)), prefix)}


def _on_cpu(profile: pathlib.Path) -> dict[str, int]:
    """The nodes that the CPU ran by operator, each once however often it ran."""
    events = json.loads(profile.read_text())
    profile.unlink()
    ran_there = {
        (event["name"], event["args"]["op_name"])
        for event in events
        if event.get("cat") == "Node" and event.get("args", {}).get("provider") == _CPU
    }
    return dict(collections.Counter(op for _, op in ran_there))


def _timed(sessions: Mapping[str, Any], feeds: Mapping[str, Array], task: Mapping[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of both models in turn, each first in every other pair."""
    found: dict[str, list[float]] = {name: [] for name in sessions}
    wanted = {name: {entry.name for entry in session.get_inputs()} for name, session in sessions.items()}
    own = {name: {key: array for key, array in feeds.items() if key in wanted[name]} for name in sessions}
    end = time.monotonic() + task["seconds"]
    for pair in range(task["most"]):
        if pair >= task["least"] and time.monotonic() > end:
            break
        for name in sorted(sessions, reverse=bool(pair % 2)):
            start = time.perf_counter()
            sessions[name].run(None, own[name])
            found[name].append(1e3 * (time.perf_counter() - start))
    return found


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rsplit("Status Message: ", maxsplit=1)[-1][:200]


if __name__ == "__main__":
    main()
