"""A whole model in ONNX Runtime, everything bound to memory of the device beforehand."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.whole import spec as specs
from benchmarks.whole.measure import Job, sample
from benchmarks.whole.spec import Case, Port, Spec

Value = Any
"""An `onnxruntime.OrtValue`."""


def session_of(path: pathlib.Path, provider: str, *, graph: bool = False, profile: str = "", optimised: str = "") -> Any:
    """A session with all optimisations.

    Args:
        path: The model.
        provider: `cuda` or `cpu`.
        graph: Whether runs are captured as a CUDA graph.
        profile: Where ONNX Runtime's profile goes; empty for none.
        optimised: Where the graph goes that ONNX Runtime runs, without its weights; empty for nowhere.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    if optimised:
        options.optimized_model_filepath = optimised
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimised.data")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "512")
    providers: list[Any] = ["CPUExecutionProvider"]
    if provider == "cuda":
        choices = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "1" if graph else "0"}
        providers.insert(0, ("CUDAExecutionProvider", choices))
    elif graph:
        raise ValueError("a CPU has no CUDA graphs")
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    if provider == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("ONNX Runtime has no CUDA provider here")
    return session


class Device:
    """Memory of the device as ONNX Runtime gives it, for as long as this object lives."""

    def __init__(self, provider: str) -> None:
        self.name = provider
        self._kept: list[Value] = []

    def holding(self, value: np.ndarray[Any, Any]) -> Value:
        """A copy of an array there."""
        if value.size == 0:
            return self.room((1,), value.dtype)
        self._kept.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), self.name, 0))
        return self._kept[-1]

    def room(self, shape: tuple[int, ...], dtype: Any) -> Value:
        """Room for an array there."""
        self._kept.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.dtype(dtype).type, self.name, 0))
        return self._kept[-1]


class Bindings:
    """Makes bindings of a session."""

    def __init__(self, session: Any, spec: Spec, device: Device) -> None:
        self._session, self._spec, self._device = session, spec, device
        self._known = {item.name for item in session.get_inputs()}

    def bound(self, sizes: Mapping[str, int], given: Mapping[str, tuple[Value, int]], taken: Mapping[str, Value]) -> Any:
        """A binding for some sizes: what is given to each input, from so many bytes on, and where each output goes."""
        binding = self._session.io_binding()
        for port in self._spec.inputs:
            if port.name in self._known:
                value, start = given[port.name]
                binding.bind_input(*self._place(port, sizes), value.data_ptr() + start)
        for port in self._spec.outputs:
            binding.bind_output(*self._place(port, sizes), taken[port.name].data_ptr())
        return binding

    def _place(self, port: Port, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return port.name, self._device.name, 0, port.type, list(port.at(sizes))


def job(session: Any, spec: Spec, case: Case, provider: str) -> Job:
    """What is timed in one case."""
    device = Device(provider)
    values = specs.feeds(spec, case)
    held = {name: device.holding(value) for name, value in values.items()}
    taken = {port.name: device.room(port.at(case.sizes), port.type) for port in spec.outputs}
    bindings = Bindings(session, spec, device)
    if case.steps:
        taken = {spec.outputs[0].name: taken[spec.outputs[0].name]}
        runs = _steps(bindings, spec, case, device, held, taken)
    else:
        runs = [bindings.bound(case.sizes, {name: (value, 0) for name, value in held.items()}, taken)]
    first = taken[spec.outputs[0].name]

    def run() -> None:
        for binding in runs:
            session.run_with_iobinding(binding)

    return Job(run, result=lambda: sample(first.numpy(), case), parts=len(runs), kept=device)


def _steps(
    bindings: Bindings, spec: Spec, case: Case, device: Device, held: Mapping[str, Value], taken: Mapping[str, Value]
) -> list[Any]:
    """A binding for every step: the past is what the step before returned, in one of two rooms that take turns."""
    past, batch = case.sizes["past"], case.sizes["batch"]
    last = {**case.sizes, "past": past + case.steps - 1}
    presents, pasts = spec.outputs[1:], spec.inputs[-len(spec.outputs[1:]) :]
    rooms = [{port.name: device.room(port.at(last), port.type) for port in presents} for _ in range(2)]
    ones = device.holding(np.ones((batch, past + case.steps), np.int64))
    places = device.holding(np.repeat(np.arange(past, past + case.steps, dtype=np.int64), batch))
    found: list[Any] = []
    for step in range(case.steps):
        sizes = {**case.sizes, "past": past + step}
        given = {name: (value, 0) for name, value in held.items()}
        for port in spec.inputs:
            if port.kind == "mask":
                given[port.name] = (ones, 0)
            elif port.kind == "positions":
                given[port.name] = (places, 8 * batch * step)
        if step:
            before = rooms[(step - 1) % 2]
            given |= {given_to.name: (before[port.name], 0) for given_to, port in zip(pasts, presents, strict=True)}
        found.append(bindings.bound(sizes, given, {**taken, **rooms[step % 2]}))
    return found
