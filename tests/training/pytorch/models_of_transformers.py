"""Models of transformers, fused on PyTorch: losses and gradients of every parameter with every kind of padding."""

from __future__ import annotations

import pytest
import torch

from tests.training import models
from tests.training.pytorch.comparing import compiled

CASES = [
    (name, spelling, padding)
    for name, spelling in models.SPELLINGS
    for padding in models.PADDINGS
    if name != "vit" or padding == "none"
]


IN_SINGLE = {("llama", "eager"), ("mistral", "eager"), ("vit", "eager")}
"""These take the softmax in float32, whatever the type."""


def gradients(model: torch.nn.Module, call, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, and the result."""
    model.zero_grad(set_to_none=True)
    result = call(**inputs)[0]
    weight = torch.arange(result.numel(), dtype=torch.float64).reshape(result.shape).sin().to(result)
    (result * weight).sum().backward()
    found = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return {"result": result.detach(), **found}


@pytest.mark.sampled(every=16)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "spelling", "padding"), CASES)
def test_a_model_gives_what_it_gave(name, spelling, padding) -> None:
    single = (name, spelling) in IN_SINGLE
    model = models.model(name, spelling).to(torch.float32 if single else torch.float64)
    given = models.inputs(name, padding).items()
    inputs = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given}
    expected = gradients(model, model, inputs)
    call, reports = compiled(model)
    found = gradients(model, call, inputs)
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values() if value.isfinite().all())
    near = 1e-5 if single else 1e-9
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=near * max(largest, 1.0), rtol=100 * near, equal_nan=True)
    sites = [site for report in reports for site in report.sites]
    assert sites
    assert all(site.fused for site in sites)
