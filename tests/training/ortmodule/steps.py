"""One step of training, by ORTModule or by PyTorch, and how far two of them are apart."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TOLERANCE = 2e-6
"""Of the largest result or gradient."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step gives."""

    result: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(module: torch.nn.Module, named: dict[str, torch.Tensor]) -> Step:
    """The result and every gradient; PyTorch's own fused kernels are off, whose gradients of fully masked rows are wrong."""
    module.zero_grad(set_to_none=True)
    with sdpa_kernel(SDPBackend.MATH):
        found = module(**named)
        result = found if isinstance(found, torch.Tensor) else found[0]
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
        (result * weights).sum().backward()
    gradients = {
        name.removeprefix("_torch_module._flattened_module._original_module."): parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return Step(result.detach(), gradients)


def apart(one: Step, other: Step) -> tuple[float, float]:
    """The largest differences of results and gradients, relative to the largest value; NaN where NaN is not met by NaN."""
    results = _apart(one.result, other.result) / float(other.result.nan_to_num().abs().max())
    scale = max(float(item.nan_to_num().abs().max()) for item in other.gradients.values())
    assert one.gradients.keys() >= other.gradients.keys()
    return results, max(_apart(one.gradients[name], item) for name, item in other.gradients.items()) / scale


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if not torch.equal(one.isnan(), other.isnan()):
        return float("nan")
    return float((one - other).nan_to_num().abs().max())


def assert_same(one: Step, other: Step) -> None:
    result, gradients = apart(one, other)
    assert result <= TOLERANCE
    assert gradients <= TOLERANCE
