"""Every spelling of an attention that training meets, on PyTorch: result and gradients as the module has them unfused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.training.modules import CASES, Case
from tests.training.pytorch.comparing import check, compiled

LEFT = {"capped": "softcap", "negated": "scale-not-positive", "gated": "scaled-weights", "triangle_and_padding": "mixed-mask"}
"""What stays, and why. Each differs in one thing from one that is fused."""
KEPT = {name for name in CASES if name.startswith("torch_")} | {"autocast_zeroed"}
"""Calls of scaled_dot_product_attention whose mask is its own already."""
WITHOUT_DROPOUT = [name for name in CASES if "dropout" not in name]


def as_tried(case: Case) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A module and its inputs, in float64 where float32 is rounded too much to tell."""
    module, inputs = case.module(), case.inputs()
    if case.double:
        module = module.double()
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return module, inputs


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
def test_a_spelling_gives_what_it_gave(name) -> None:
    (site,) = check(*as_tried(CASES[name])).sites
    assert site.fused == (name not in LEFT)
    assert [reason.code for reason in site.reasons] == ([LEFT[name]] if name in LEFT else [])
    assert (site.handed == "the module's own call") == (name in KEPT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kernel"), [("plain", "flash (CPU)"), ("padding", "flash (CPU)"), ("value_size", "math")])
def test_the_kernel_that_is_named_is_the_one_that_runs(name, kernel, dtype) -> None:
    case = CASES[name]
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in case.inputs().items()}
    call, reports = compiled(case.module().to(dtype))
    call(**inputs)
    with torch.profiler.profile() as profile:
        call(**inputs)
    ran = {event.key for event in profile.key_averages()}
    assert [site.kernel for site in reports[-1].sites] == [kernel]
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == (kernel != "math")


@pytest.mark.parametrize("name", ["plain", "triangle", "autocast_padding"])
def test_under_autocast_operands_are_in_half_precision(name) -> None:
    module, inputs = CASES[name].module(), CASES[name].inputs()
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = check(module, inputs, tolerance=0.02).sites
    assert site.kernel == "flash (CPU)"


def test_a_float32_mask_beside_half_precision_would_be_rounded_and_stays() -> None:
    module, inputs = CASES["autocast_bias"].module(), CASES["autocast_bias"].inputs()
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = check(module, inputs).sites
    assert [reason.code for reason in site.reasons] == ["narrowed-mask"]


@pytest.mark.parametrize("name", ["dropout", "dropout_padding"])
def test_what_is_dropped_has_the_same_share_and_expectation(name, monkeypatch) -> None:
    """Dropout draws other numbers in a kernel: the mean over many draws is held against the module without dropout."""
    module, inputs = CASES[name].module(), CASES[name].inputs()
    inputs = {key: value.repeat(400, *[1] * (value.dim() - 1)) for key, value in inputs.items()}
    call, reports = compiled(module)
    with torch.no_grad():
        found = call(**inputs).view(400, 3, 7, 32).mean(0)
        expected = dataclasses.replace(CASES[name], attend=_kept(name)).module()
        expected.load_state_dict(module.state_dict())
        whole = expected(**{key: value[:3] for key, value in inputs.items()})
    (site,) = reports[-1].sites
    assert (site.dropout, site.fused) == (0.25, True)
    assert (found - whole).abs().max() < 0.12
    assert (found - whole).abs().mean() < 0.02


def _kept(name: str):
    from tests.training import modules

    return modules.scaled_query if name == "dropout" else modules.added


def test_a_softmax_in_a_narrower_type_than_the_products_stays() -> None:
    """A fill may be infinite there that is not in the type of the products; in a wider type all is well."""
    case = CASES["plain"]
    module = dataclasses.replace(case, attend=_in_single).module().double()
    inputs = {name: value.double() for name, value in case.inputs().items()}
    (site,) = check(module, inputs).sites
    assert [reason.code for reason in site.reasons] == ["narrowed-scores"]
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = check(dataclasses.replace(case, attend=_in_single).module(), case.inputs(), tolerance=0.02).sites
    assert site.fused


def _in_single(query, key, value, module, mask):
    weights = (query @ key.transpose(2, 3) * 0.3).softmax(-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value
