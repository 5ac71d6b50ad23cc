"""A module run as it is and fused: results, and gradients of inputs and parameters, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onnx_attnfuse.training import TrainingReport
from onnx_attnfuse.training.pytorch.backend import attnfuse
from onnx_attnfuse.training.pytorch.reports import Reports

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def compiled(module: torch.nn.Module, **options: Any) -> tuple[Any, Reports]:
    """The module compiled by the backend, the rest left eager, with its reports."""
    torch._dynamo.reset()
    reports = Reports()
    return reports.around(torch.compile(module, backend=attnfuse, options={"rest": "eager", **options})), reports


def outcome(module: torch.nn.Module, call: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The result of a call, and every gradient, by name; masks have none."""
    module.zero_grad(set_to_none=True)
    given = {name: _leaf(value) if name in {"x", "other"} else value for name, value in inputs.items()}
    result = call(**given)
    result = result if isinstance(result, torch.Tensor) else result[0]
    weight = torch.arange(result.numel(), dtype=torch.float64).reshape(result.shape).sin().to(result)
    (result * weight).sum().backward()
    found: dict[str, torch.Tensor | None] = {"result": result.detach()}
    found |= {name: value.grad for name, value in given.items() if value.requires_grad}
    return found | {name: None if item.grad is None else item.grad.clone() for name, item in module.named_parameters()}


def check(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], tolerance: float | None = None, **options: Any
) -> TrainingReport:
    """Holds a fused module against itself as it is; returns the last report."""
    call, reports = compiled(module, **options)
    expected, actual = outcome(module, module, inputs), outcome(module, call, inputs)
    same(expected, actual, tolerance)
    return reports[-1]


def same(
    expected: Mapping[str, torch.Tensor | None], actual: Mapping[str, torch.Tensor | None], tolerance: float | None = None
) -> None:
    """Results and gradients are the same, NaN for NaN, up to a part of the largest, or what their type rounds."""
    assert expected.keys() == actual.keys()
    gradients = [value for name, value in expected.items() if name != "result" and value is not None]
    largest = max(float(value.abs().max()) for value in gradients)
    for name, value in expected.items():
        other = actual[name]
        if value is None or other is None:
            assert value is other, name
            continue
        near = TOLERANCE[value.dtype] if tolerance is None else tolerance * largest
        torch.testing.assert_close(other, value, atol=near, rtol=10 * TOLERANCE[value.dtype], equal_nan=True)


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_()
