"""A whole model in torch, in float16, with weights of its own: only its time and memory count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticCache

from benchmarks.whole import spec as specs
from benchmarks.whole.measure import Job
from benchmarks.whole.spec import Case
from benchmarks.whole.zoo import Whole

MODES = {"compile": "default", "reduce-overhead": "reduce-overhead"}


def finish(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def module_of(whole: Whole, device: str) -> Any:
    """The model on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            return whole.build().eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)


def job(whole: Whole, module: Any, case: Case, tool: str, device: str) -> Job:
    """What is timed in one case; `tool` is `eager` or a key of `MODES`."""
    torch._dynamo.reset()
    values = {name: torch.from_numpy(value).to(device) for name, value in specs.feeds(whole.spec, case).items()}
    if case.steps:
        return _steps(whole, module.model, case, tool, device, values)
    called = module if tool == "eager" else torch.compile(module, mode=MODES[tool], dynamic=False)

    @torch.no_grad()
    def run() -> None:
        called(*values.values())
        finish(device)

    return Job(run)


@dataclasses.dataclass
class _Past:
    """The cache of a decoder, at the length where steps begin.

    Torch's own growing cache means a new shape and a new compilation at every step, so what is compiled has the static one, as in
    transformers' own documentation.
    """

    config: Any
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    longest: int
    static: bool
    cache: Any = None

    def rewind(self) -> None:
        """Goes back to where steps begin."""
        if not self.static:
            self.cache = DynamicCache(self.layers)
            return
        if self.cache is None:
            self.cache = StaticCache(config=self.config, max_cache_len=self.longest)
            for layer, (keys, values) in zip(self.cache.layers, self.layers, strict=True):
                layer.update(keys, values)
        for layer, (keys, _) in zip(self.cache.layers, self.layers, strict=True):
            layer.cumulative_length.fill_(keys.shape[2])


def _steps(whole: Whole, model: Any, case: Case, tool: str, device: str, values: dict[str, torch.Tensor]) -> Job:
    """Single tokens in a row."""
    first, batch = case.sizes["past"], case.sizes["batch"]
    pasts = [values[port.name] for port in whole.spec.inputs if "past" in port.name]
    pairs = list(zip(pasts[::2], pasts[1::2], strict=True))
    static = tool != "eager"
    past = _Past(model.config, pairs, first + case.steps, static)
    ones = torch.ones((batch, first + case.steps), dtype=torch.int64, device=device)
    places = [torch.full((batch, 1), first + step, dtype=torch.int64, device=device) for step in range(case.steps)]
    token = torch.empty_like(values["input_ids"]).copy_(values["input_ids"])

    def plain(position_ids: torch.Tensor, cache: Any, attention_mask: torch.Tensor | None) -> torch.Tensor:
        found = model(
            input_ids=token, position_ids=position_ids, past_key_values=cache, attention_mask=attention_mask, use_cache=True
        )
        return found.logits

    step_of: Callable[..., torch.Tensor] = plain if tool == "eager" else torch.compile(plain, mode=MODES[tool], dynamic=False)

    @torch.no_grad()
    def run() -> None:
        for step, place in enumerate(places):
            if tool == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            step_of(place, past.cache, None if static else ones[:, : first + step + 1])
            finish(device)

    def rewind() -> None:
        with torch.no_grad():
            past.rewind()

    return Job(run, before=rewind, parts=case.steps)
