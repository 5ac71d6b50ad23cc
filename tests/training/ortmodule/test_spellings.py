"""Every spelling of one attention in the real ORTModule, on the CPU's kernel and on those of a GPU computed by PyTorch."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from onnx_attnfuse.training import ORTModule, Policy
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule import hook
from tests.training.kernels_in_torch import KERNELS
from tests.training.modules import CASES
from tests.training.ortmodule.steps import assert_same, step


@pytest.fixture(scope="session", autouse=True)
def _kernels_of_a_gpu():
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        library.impl(name, _defined(kernel), "CPU")
    yield
    library._destroy()


def _defined(kernel):
    """The same with something in the place of tensors that are not defined, which Python cannot give."""

    def call(*values, **named):
        return tuple(torch.empty(0) if item is None else item for item in kernel(*values, **named))

    return call


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_arguments_are_those_of_pytorch(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    assert [item.name for item in schema.arguments] == list(inspect.signature(KERNELS[name]).parameters)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.refused is None and not case.double and not case.autocast]
)
def test_on_the_cpu(name: str) -> None:
    case = CASES[name]
    module = ORTModule(case.module())
    found = step(module, case.inputs())
    assert module.attention_reports[0].fused == 1
    assert_same(found, step(case.module(), case.inputs()))


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.refused and "dropout" not in name and not case.autocast]
)
def test_what_is_left_alone_is_right_too(name: str) -> None:
    case = CASES[name]
    module = ORTModule(case.module())
    found = step(module, case.inputs())
    assert module.attention_reports[0].fused == 0
    assert_same(found, step(case.module(), case.inputs()))


@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if (not case.refused or name == "trained_bias") and not (case.double or case.autocast)],
)
def test_plan_for_a_gpu(name: str, monkeypatch) -> None:
    monkeypatch.setattr(hook, "_device", lambda: TrainingDevice("cuda", 90))
    case = CASES[name]
    module = ORTModule(case.module(), policy=Policy(flash=False))
    found = step(module, case.inputs())
    assert [site.kernel for site in module.attention_reports[0].sites] == ["efficient"]
    assert_same(found, step(case.module(), case.inputs()))


DROPPED = ["dropout", "torch_dropout", "torch_dropout_masked"]


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_the_same_forward_and_backward(name: str, monkeypatch) -> None:
    """The gradient along a direction is how the result changes in that direction, the random state being the same."""
    monkeypatch.setattr(hook, "_device", lambda: TrainingDevice("cuda", 90))
    case = CASES[name]
    module = ORTModule(case.module(), policy=Policy(flash=False))
    named = case.inputs()
    torch.manual_seed(7)
    found = step(module, named)
    assert [site.kernel for site in module.attention_reports[0].sites] == ["efficient"]
    direction = {
        key: torch.randn(item.shape, generator=torch.Generator().manual_seed(8)) for key, item in found.gradients.items()
    }
    slope = sum(float((found.gradients[key] * item).sum()) for key, item in direction.items())
    results: list[float] = []
    for sign in (1, -1):
        moved = case.module()
        with torch.no_grad():
            for key, parameter in moved.named_parameters():
                parameter.add_(direction.get(key, torch.zeros(())), alpha=sign * 1e-3)
        again = ORTModule(moved, policy=Policy(flash=False))
        torch.manual_seed(7)
        result = step(again, named).result
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
        results.append(float((result.double() * weights.double()).sum()))
    assert np.isclose((results[0] - results[1]) / 2e-3, slope, rtol=2e-3)


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_right_on_average(name: str, monkeypatch) -> None:
    monkeypatch.setattr(hook, "_device", lambda: TrainingDevice("cuda", 90))
    case = CASES[name]
    module = ORTModule(case.module(), policy=Policy(flash=False))
    found = torch.stack([step(module, case.inputs()).result for _ in range(400)])
    original = case.module()
    wanted = torch.stack([step(original, case.inputs()).result for _ in range(400)])
    spread = (found.var(0) / 400 + wanted.var(0) / 400).sqrt()
    assert float(((found.mean(0) - wanted.mean(0)) / spread).abs().max()) < 5
    assert float((found.var(0) / wanted.var(0)).mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_that_is_left_alone_drops_as_much(name: str) -> None:
    """ONNX Runtime's own random numbers on the CPU are too much alike from step to step for a sharper test."""
    case = CASES[name]
    module, original = ORTModule(case.module()), case.module()
    found, wanted = (torch.stack([step(item, case.inputs()).result for _ in range(200)]) for item in (module, original))
    assert not module.attention_reports[0].fused
    assert float((found.std(0) / wanted.std(0)).mean()) == pytest.approx(1, abs=0.2)
