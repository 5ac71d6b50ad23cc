"""A whole model at the sizes of one case: in ONNX Runtime, everything bound beforehand, or in torch with weights of its own."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.sessions import WARM, Device, session_of
from benchmarks.whole.spec import IDS, Array, Case, Whole, at
from models.recipe import Input

Value = Any
"""An `onnxruntime.OrtValue`."""
_COMPARED = 1 << 23
"""Elements of a result that are compared; of more, rows at regular distances."""
_MODES = {"compile": "default", "reduce-overhead": "reduce-overhead"}


class OnnxRuntime:
    """A model in ONNX Runtime; of steps in a row each has the cache that the step before returned."""

    def __init__(self, path: pathlib.Path, whole: Whole, case: Case, provider: str, *, graph: bool, threads: int) -> None:
        if graph and case.steps:
            raise ValueError("shapes grow from step to step, and a captured graph has fixed ones")
        before = _free(provider)
        self._session, self._whole, self._case = session_of(path, provider, graph=graph, threads=threads), whole, case
        self._device = device = Device(provider)
        held = {name: (device.holding(value), 0) for name, value in whole.feeds(case).items()}
        taken = {port.name: device.room(at(port, case.sizes), whole.type(port)) for port in whole.outputs}
        self._first = taken[whole.outputs[0].name]
        self._runs = self._steps(held) if case.steps else [self._bound(case.sizes, held, taken)]
        for _ in range(WARM):
            self()
        self.words = f"{(before - _free(provider)) / 1e6:.0f} MB" if provider == "cuda" else ""

    def __call__(self) -> None:
        for binding in self._runs:
            self._session.run_with_iobinding(binding)

    def output(self) -> Array:
        """Rows of the first result that count, at most some millions of elements."""
        return counted(self._first.numpy(), self._case)

    def _bound(self, sizes: Mapping[str, int], given: Mapping[str, tuple[Value, int]], taken: Mapping[str, Value]) -> Any:
        """A binding for some sizes: what is given to each input, from so many bytes on, and where each output goes."""

        def place(port: Input) -> tuple[Any, ...]:
            return port.name, self._device.name, 0, self._whole.type(port), list(at(port, sizes))

        binding, known = self._session.io_binding(), {item.name for item in self._session.get_inputs()}
        for port in self._whole.inputs:
            if port.name in known:
                value, start = given[port.name]
                binding.bind_input(*place(port), value.data_ptr() + start)
        for port in self._whole.outputs:
            binding.bind_output(*place(port), taken[port.name].data_ptr())
        return binding

    def _steps(self, held: Mapping[str, tuple[Value, int]]) -> list[Any]:
        """A binding for every step: the past is what the step before returned, in one of two rooms that take turns."""
        case, device, (first, *presents) = self._case, self._device, self._whole.outputs
        past, batch, pasts = case.sizes["past"], case.sizes["batch"], self._whole.inputs[-len(presents) :]
        last = {**case.sizes, "past": past + case.steps - 1}
        rooms = [{port.name: device.room(at(port, last), self._whole.type(port)) for port in presents} for _ in range(2)]
        ones = device.holding(np.ones((batch, past + case.steps), np.int64))
        places = device.holding(np.repeat(np.arange(past, past + case.steps, dtype=np.int64), batch))
        found: list[Any] = []
        for step in range(case.steps):
            kinds = {"mask": (ones, 0), "positions": (places, 8 * batch * step)}
            given = {port.name: kinds.get(port.kind, held[port.name]) for port in self._whole.inputs}
            if step:
                before = rooms[(step - 1) % 2]
                given |= {into.name: (before[port.name], 0) for into, port in zip(pasts, presents, strict=True)}
            sizes = {**case.sizes, "past": past + step}
            found.append(self._bound(sizes, given, {first.name: self._first, **rooms[step % 2]}))
        return found


def counted(result: Array, case: Case) -> Array:
    """Rows of a result that count, at most some millions of elements."""
    rows = result.reshape(-1, result.shape[-1])
    if case.padded and result.ndim > len(IDS):
        rows = rows[(np.arange(result.shape[1])[None] < np.asarray(case.lengths)[:, None]).reshape(-1)]
    return rows[:: max(1, rows.size // _COMPARED)]


class OpenVino:
    """The export in OpenVINO, in its own precision, or in the one that the tool's name ends with."""

    def __init__(self, source: pathlib.Path, whole: Whole, case: Case, label: str, threads: int) -> None:
        import openvino

        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        settings |= {"INFERENCE_PRECISION_HINT": label.split()[1]} if " " in label else {}
        self._request = openvino.Core().compile_model(str(source), "CPU", settings).create_infer_request()
        self._feeds, self._case = whole.feeds(case), case
        for _ in range(WARM):
            self()

    def __call__(self) -> None:
        self._result = self._request.infer(self._feeds)

    def output(self) -> Array:
        """As of ONNX Runtime."""
        return counted(self._result[0], self._case)


def _free(provider: str) -> int:
    """Bytes of the GPU that nothing has taken; allocators give nothing back, so that after the runs is early enough."""
    if provider != "cuda":
        return 0
    torch.cuda.init()
    return int(torch.cuda.mem_get_info()[0])


def by_torch(whole: Whole, module: Any, case: Case, tool: str, device: str) -> Callable[[], None]:
    """A run in torch; `tool` is `eager` or a key of `_MODES`."""
    torch._dynamo.reset()
    values = {name: torch.from_numpy(value).to(device) for name, value in whole.feeds(case).items()}
    if case.steps:
        return _steps_by_torch(whole, module.model, case, tool, device, values)
    called = module if tool == "eager" else torch.compile(module, mode=_MODES[tool], dynamic=False)

    @torch.no_grad()
    def run() -> None:
        called(*values.values())
        _finish(device)

    return run


def module_on(whole: Whole, device: str) -> Any:
    """The model on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, whole.dtype))
    try:
        with torch.device(device):
            return whole.build().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _steps_by_torch(
    whole: Whole, model: Any, case: Case, tool: str, device: str, values: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Single tokens in a row.

    Torch's own growing cache means a new shape and a new compilation at every step, so what is compiled has the static one, as in
    transformers' own documentation.
    """
    from transformers.cache_utils import DynamicCache, StaticCache

    first, batch, static = case.sizes["past"], case.sizes["batch"], tool != "eager"
    pasts = [values[port.name] for port in whole.inputs if "past" in port.name]
    pairs = list(zip(pasts[::2], pasts[1::2], strict=True))
    ones = torch.ones((batch, first + case.steps), dtype=torch.int64, device=device)
    places = [torch.full((batch, 1), first + step, dtype=torch.int64, device=device) for step in range(case.steps)]
    token = torch.empty_like(values["input_ids"]).copy_(values["input_ids"])
    buffer: Any = StaticCache(config=model.config, max_cache_len=first + case.steps)
    for layer, pair in zip(buffer.layers, pairs if static else (), strict=static):
        layer.update(*pair)

    def plain(position_ids: torch.Tensor, cache: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        given: dict[str, Any] = {"position_ids": position_ids, "attention_mask": attention_mask, "past_key_values": cache}
        return model(input_ids=token, **given, use_cache=True).logits

    step_of: Callable[..., torch.Tensor] = torch.compile(plain, mode=_MODES[tool], dynamic=False) if static else plain

    @torch.no_grad()
    def run() -> None:
        for layer in buffer.layers if static else ():
            layer.cumulative_length.fill_(first)
        cache = buffer if static else DynamicCache(pairs)
        for step, place in enumerate(places):
            if tool == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            step_of(place, cache, None if static else ones[:, : first + step + 1])
            _finish(device)

    return run
