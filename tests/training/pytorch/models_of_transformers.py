"""Models of transformers, fused on PyTorch: losses and gradients of every parameter with every kind of padding."""

from __future__ import annotations

import pytest
import torch

from tests.training import models
from tests.training.pytorch import trained_models
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
    """The gradient of every parameter, and the results that have one."""
    model.zero_grad(set_to_none=True)
    results = [item for item in call(**inputs).to_tuple() if isinstance(item, torch.Tensor) and item.requires_grad]
    weights = [torch.arange(item.numel(), dtype=torch.float64).reshape(item.shape).sin().to(item) for item in results]
    sum((item * weight).sum() for item, weight in zip(results, weights, strict=True)).backward()
    found = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return {**{f"result {place}": item.detach() for place, item in enumerate(results)}, **found}


def holds(model: torch.nn.Module, given: dict[str, torch.Tensor], **options) -> list:
    """Holds a fused model against itself, and gives its attentions."""
    dtype = next(item.dtype for item in model.parameters())
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
    expected = gradients(model, model, inputs)
    call, reports = compiled(model, **options)
    found = gradients(model, call, inputs)
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values() if value.isfinite().all())
    near = 1e-5 if dtype == torch.float32 else 1e-9
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=near * max(largest, 1.0), rtol=100 * near, equal_nan=True)
    return [site for report in reports for site in report.sites]


@pytest.mark.sampled(every=16)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "spelling", "padding"), CASES)
def test_a_model_gives_what_it_gave(name, spelling, padding) -> None:
    single = (name, spelling) in IN_SINGLE
    model = models.model(name, spelling).to(torch.float32 if single else torch.float64)
    sites = holds(model, models.inputs(name, padding))
    assert sites
    assert all(site.fused for site in sites)


CAUSAL = {"qwen3", "gpt-neox", "falcon"}
"""Decoders whose mask is a triangle where no padding is given."""
CAPPED = {"gemma2"}
"""Whose scores are capped, which flex attention alone does."""


@pytest.mark.sampled(every=8)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("flex", [None, True])
@pytest.mark.parametrize(("name", "spelling", "padding"), trained_models.CASES)
def test_a_model_as_it_is_trained_gives_what_it_gave(name, spelling, padding, flex) -> None:
    model = trained_models.model(name, spelling)
    sites = holds(model, trained_models.MODELS[name][1](padding), flex=flex)
    assert sites
    left = name in CAPPED and not flex
    assert [[reason.code for reason in site.reasons] for site in sites] == [["softcap"] if left else []] * len(sites)
    if name in CAUSAL and padding == "none":
        assert {site.handed for site in sites} == {"causal by attribute"}
