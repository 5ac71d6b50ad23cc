"""Runs two models on an execution provider and times them in turn: `python -m onnx_attnfuse.bench.conformance.child`.

The first message on stdin is the execution provider, `installed.Installed` as a dictionary; each further one is a pair of models
and what they are fed, and is answered by their results and times. Messages are those of `onnx_attnfuse.verify.child`.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from onnx_attnfuse.verify.child import serve

_CPU = "CPUExecutionProvider"
_ON_CPU = "fallback to CPU EP has been explicitly disabled"
_FINAL = frozenset(["InvalidArgument", "InvalidGraph", "NotImplemented"])
"""The errors that say that a kernel does not take what it was given; others may come of what was run before."""
_TEXT = 200


def _started() -> Callable[[Any], Any]:
    """Answers a provider by registering it, and each task after it."""
    ort: Any = importlib.import_module("onnxruntime")
    known: list[Mapping[str, Any]] = []

    def answer(message: Any) -> Any:
        if known:
            return _answer(ort, known[0], message)
        known.append(message)
        if "CUDA" in message["ort_name"] and hasattr(ort, "preload_dlls"):
            ort.preload_dlls()
        if message["library"]:
            ort.register_execution_provider_library(message["ort_name"], message["library"])
        return True

    return answer


def _answer(ort: Any, provider: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Results of both models or their errors, and their milliseconds in turn."""
    sessions = {name: _session(ort, provider, task[name]) for name in ("fused", "decomposed")}
    found = {name: _first(session, task[f"{name} feeds"]) for name, session in sessions.items()}
    if all("results" in item for item in found.values()):
        end = time.monotonic() + task["seconds"]
        for run in range(task["runs"]):
            if run and time.monotonic() > end:
                break
            for name, session in sessions.items():
                found[name].setdefault("ms", []).append(_timed(session, task[f"{name} feeds"]))
    return found


def _session(ort: Any, provider: Mapping[str, Any], model: bytes) -> Any:
    """A session, or the answer in its place that says why there is none."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if provider["ort_name"] != _CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        if provider["library"]:
            devices = [device for device in ort.get_ep_devices() if device.ep_name == provider["ort_name"]][:1]
            if not devices:
                raise RuntimeError(f"{provider['ort_name']} finds no device here")  # noqa: TRY301 - one answer for all
            options.add_provider_for_devices(devices, dict(provider["options"]))
            return ort.InferenceSession(model, options)
        session = ort.InferenceSession(model, options, providers=[(provider["ort_name"], dict(provider["options"]))])
        if provider["ort_name"] not in session.get_providers():
            raise RuntimeError(f"ONNX Runtime could not start its {provider['ort_name']}")  # noqa: TRY301
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return _complaint(error)
    return session


def _first(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a session, or why there are none."""
    if isinstance(session, dict):
        return cast("dict[str, Any]", session)
    try:
        return {"results": session.run(None, dict(feeds))}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return _complaint(error)


def _timed(session: Any, feeds: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    session.run(None, dict(feeds))
    return 1e3 * (time.perf_counter() - start)


def _complaint(error: Exception) -> dict[str, Any]:
    """An error in a line, without what ONNX Runtime says around it, and whether it is the last word on the model."""
    text = " ".join(f"{error}".split())
    final = _ON_CPU in text or type(error).__name__ in _FINAL
    return {"on cpu": _ON_CPU in text, "final": final, "error": text.rsplit("Status Message: ", maxsplit=1)[-1][:_TEXT]}


if __name__ == "__main__":
    sys.exit(serve(_started))
