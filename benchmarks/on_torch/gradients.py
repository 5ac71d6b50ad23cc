"""Which gradients are right: of every parameter, with each way to train a model of one block, beside the same model in float64.

torch.compile is tried as it is, without the patterns by which inductor finds attention, and without one kernel of
`scaled_dot_product_attention` or the other, so that what is wrong has a place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Benchmark, Race, Setting, one_line
from benchmarks.on_torch._models import Case, Model, cases, seen, spelled
from benchmarks.on_torch.steps import VARIANTS

WAYS = {
    **{name: {} for name in ("eager", "by hand + compile", "ours", "ours + inductor", "torch.compile")},
    "torch.compile, no patterns": {"patterns": False},
    **{f"torch.compile, no {kernel}": {"without": kernel} for kernel in ("cudnn", "flash", "mem_efficient")},
}


@contextlib.contextmanager
def switched(*, patterns: bool = True, without: str = "") -> Iterator[None]:
    """Inductor without its patterns, and PyTorch without a kernel."""
    config: Any = __import__("torch._inductor.config", fromlist=["config"])
    switch = getattr(torch.backends.cuda, f"enable_{without}_sdp") if without else lambda _: None
    before = config.pattern_matcher
    config.pattern_matcher = patterns
    switch(False)
    try:
        yield
    finally:
        config.pattern_matcher = before
        switch(True)


def step(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss, and the gradient of each parameter."""
    module.zero_grad(set_to_none=True)
    loss = module(**inputs)
    loss.backward()
    gradients = {name: item.grad.double() for name, item in module.named_parameters() if item.grad is not None}
    return {"loss": loss.detach().double(), **gradients}


def told(case: Case, way: str, setting: Setting, dtype: torch.dtype) -> str:
    """The gradients that are furthest from those in float64, in parts of them, and the kernels of attention that ran."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    true = Model(case, spelled, seen).to(setting.provider, torch.float64)
    torch.manual_seed(0)
    module = VARIANTS[way.partition(", ")[0]](case).to(setting.provider, dtype)
    state = module.state_dict()
    true.load_state_dict({key: state[key].double() for key in true.state_dict() if key in state}, strict=False)
    inputs = case.inputs(setting.provider, dtype)
    expected = step(true, {key: item.double() if item.is_floating_point() else item for key, item in inputs.items()})
    with switched(**WAYS[way]):
        step(module, inputs)
        with torch.profiler.profile() as profile:
            found = step(module, inputs)
    distances = {
        key: float((found[key] - item).norm() / item.norm()) for key, item in expected.items() if not key.endswith("key.bias")
    }
    worst = sorted(distances.items(), key=lambda pair: -pair[1])[:3]
    kernels = {event.name.removeprefix("aten::") for event in profile.events() or () if event.name.startswith("aten::_scaled")}
    return "; ".join(
        [*(f"{name} {distance:.1e}" for name, distance in worst), ", ".join(sorted(kernels)) or "no kernel of attention"]
    )


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """One way."""
    case, dtype = race.truth
    try:
        return {"worst gradients, kernels": told(case, race.label.partition(": ")[2], setting, dtype)}
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        return {"worst gradients, kernels": one_line(error)}


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model without a mask, type and way."""
    for dtype in (torch.bfloat16, torch.float16) if setting.cuda else (torch.float32,):
        for case in cases(small=setting.quick):
            for way in WAYS if case.mask == "none" else ():
                one = dataclasses.replace(case, layers=1), dtype
                yield Race(f"{case.name}, {str(dtype).removeprefix('torch.')}: {way}", {}, one)


BENCHMARK = Benchmark("Gradients beside float64", races, "The worst three, in parts of them.", measure)
