"""Small models bound to memory of a device, and runs that are timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}


class Bound:
    """A model with its inputs and outputs on the device."""

    def __init__(self, model: bytes, provider: str, feeds: Mapping[str, Any], settings: Mapping[str, str] | None = None) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        chosen = [(PROVIDERS[provider], dict(settings or {}))]
        self.session = onnxruntime.InferenceSession(model, options, providers=chosen)
        if PROVIDERS[provider] not in self.session.get_providers():
            raise RuntimeError(f"ONNX Runtime could not start its {PROVIDERS[provider]}")
        self.binding, self.provider = self.session.io_binding(), provider
        self._given: dict[str, Any] = {}
        for item in self.session.get_inputs():
            self.give(item.name, feeds[item.name])
        for item in self.session.get_outputs():
            self.binding.bind_output(item.name, provider)

    def give(self, name: str, value: Any) -> None:
        """Binds an input, an array or what lies on the device already."""
        if not isinstance(value, onnxruntime.OrtValue):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), self.provider, 0)
        self._given[name] = value
        self.binding.bind_ortvalue_input(name, value)

    def run(self) -> None:
        """Runs the model to its end."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def output(self) -> Any:
        """The first output, where it lies."""
        return self.binding.get_outputs()[0]


def in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each run, the median of so many rounds in which all of them run, another one first in each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in (*names[first:], *names[:first]):
            start = time.perf_counter()
            runs[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}
