"""Models in ONNX Runtime, with what they take and give bound beforehand."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.harness import Setting

WARM = 3
"""Runs that do not count."""
_ONNX_TYPES = {"float32": 1, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


def session_of(source: bytes | pathlib.Path, provider: str, *, graph: bool = False, threads: int = 0) -> Any:
    """A session with all optimisations; `graph` captures runs as a CUDA graph, `threads` are of a CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    providers: list[Any] = ["CPUExecutionProvider"]
    if provider == "cuda":
        choices = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "1" if graph else "0"}
        providers.insert(0, ("CUDAExecutionProvider", choices))
    elif graph:
        raise ValueError("a CPU has no CUDA graphs")
    given = str(source) if isinstance(source, pathlib.Path) else source
    session = onnxruntime.InferenceSession(given, options, providers=providers)
    if provider == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("ONNX Runtime has no CUDA provider here")
    return session


class Device:
    """Memory of the device as ONNX Runtime gives it, for as long as this object lives."""

    def __init__(self, provider: str) -> None:
        self.name = provider
        self._kept: list[onnxruntime.OrtValue] = []

    def holding(self, value: np.ndarray[Any, Any]) -> onnxruntime.OrtValue:
        """A copy of an array there."""
        if value.size == 0:
            return self.room((1,), value.dtype)
        self._kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), self.name, 0))
        return self._kept[-1]

    def room(self, shape: tuple[int, ...], dtype: Any) -> onnxruntime.OrtValue:
        """Room for an array there."""
        self._kept.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0))
        return self._kept[-1]


class Bound:
    """A model with its inputs and outputs on the device; inputs are arrays, or tensors of torch that lie there."""

    def __init__(
        self,
        source: bytes | pathlib.Path,
        setting: Setting,
        feeds: Mapping[str, Any],
    ) -> None:
        self.session = session_of(source, setting.provider, threads=setting.threads)
        self._binding, self._device, self._held = self.session.io_binding(), setting.provider, dict[str, Any]()
        for item in self.session.get_inputs():
            self.give(item.name, feeds[item.name])
        for item in self.session.get_outputs():
            self._binding.bind_output(item.name, setting.provider)
        for _ in range(WARM):
            self.run()

    def give(self, name: str, value: Any) -> None:
        """Binds an input."""
        self._held[name] = value
        if hasattr(value, "data_ptr"):
            code = _ONNX_TYPES[str(value.dtype).removeprefix("torch.")]
            self._binding.bind_input(name, value.device.type, 0, code, list(value.shape), value.data_ptr())
            return
        self._held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), self._device, 0)
        self._binding.bind_ortvalue_input(name, self._held[name])

    def run(self) -> None:
        """Runs the model to its end."""
        self.session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    __call__ = run

    def output(self) -> Any:
        """The first output, None in a type that NumPy lacks."""
        value = self._binding.get_outputs()[0]
        return None if "bfloat16" in value.data_type() else value.numpy()
