"""Gradients end where a module ends them: at `detach`, and at what it computes while none are recorded."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.training.pytorch.comparing import check

HEADS, SIZE, WIDTH, LENGTH = 4, 8, 32, 9


class Ending(torch.nn.Module):
    """Two projections and a trained bias, with an attention that a function spells."""

    def __init__(self, spell) -> None:
        super().__init__()
        self.spell = spell
        self.first, self.second = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.bias = torch.nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))

    def heads(self, layer: torch.nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(len(x), -1, HEADS, SIZE).transpose(1, 2) for part in layer(x).chunk(3, -1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.spell(self, x, *self.heads(self.first, x))
        return found.transpose(1, 2).reshape(len(x), -1, WIDTH)


def attend(query, key, value, bias=None):
    scores = query @ key.transpose(-1, -2) * 0.3
    return (scores if bias is None else scores + bias).softmax(-1) @ value


def as_it_is(module, x, query, key, value):
    return attend(query, key, value, torch.tanh(module.bias))


def of_keys(module, x, query, key, value):
    return attend(query, key.detach(), value)


def of_keys_as_data(module, x, query, key, value):
    return attend(query, key.data, value)


def before_views(module, x, query, key, value):
    return attend(query, *module.second(x).detach().view(len(x), -1, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)[:2])


def of_bias(module, x, query, key, value):
    return attend(query, key, value, torch.tanh(module.bias).detach())


def of_a_view(module, x, query, key, value):
    with torch.no_grad():
        turned = key.transpose(-1, -2)
    return (query @ turned * 0.3).softmax(-1) @ value


def of_values(module, x, query, key, value):
    with torch.no_grad():
        value = value * 1.0
        value = value.contiguous()
    return attend(query, key, value)


def of_the_result(module, x, query, key, value):
    found = attend(query, key, value)
    return found.transpose(1, 2).detach().transpose(1, 2) + 0.5 * found + query


def in_inference(module, x, query, key, value):
    with torch.no_grad():
        found = attend(query, key, value)
    return found + query


def beside_a_teacher(module, x, query, key, value):
    """What is added is the same tensor, once where gradients are recorded and once where they are not."""
    bias = torch.tanh(module.bias)
    with torch.no_grad():
        other = attend(*module.heads(module.second, x), bias)
    return attend(query, key, value, bias) - other


def written_in_between(module, x, query, key, value):
    """A factor that no gradient knows of."""
    query = query * 1
    with torch.no_grad():
        query.mul_(2.0)
    return attend(query, key, value)


def inside_a_checkpoint(module, x, query, key, value):
    return checkpoint(lambda *given: attend(given[0], given[1].detach(), given[2]), query, key, value, use_reentrant=False)


def of_scores(module, x, query, key, value):
    return (query @ key.transpose(-1, -2) * 0.3).detach().softmax(-1) @ value


def of_weights(module, x, query, key, value):
    return (query @ key.transpose(-1, -2) * 0.3).softmax(-1).detach() @ value


def of_weights_not_recorded(module, x, query, key, value):
    with torch.no_grad():
        weights = torch.dropout((query @ key.transpose(-1, -2) * 0.3).softmax(-1), 0.1, False)
    return weights @ value


FUSED = {
    as_it_is: 1, of_keys: 1, of_keys_as_data: 1, before_views: 1, of_bias: 1, of_a_view: 1, of_values: 1, of_the_result: 1,
    in_inference: 1, beside_a_teacher: 2, written_in_between: 1, inside_a_checkpoint: 1,
}  # fmt: skip
LEFT = [of_scores, of_weights, of_weights_not_recorded]


def given() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("spell", FUSED)
def test_attention_beside_an_end_is_fused_and_no_gradient_passes_it(spell) -> None:
    sites = check(Ending(spell).double(), given()).sites
    assert [site.fused for site in sites] == [True] * FUSED[spell]


@pytest.mark.parametrize("spell", LEFT)
def test_attention_inside_of_which_a_gradient_ends_stays(spell) -> None:
    (site,) = check(Ending(spell).double(), given()).sites
    assert [reason.code for reason in site.reasons] == ["gradient-ends"]


def test_only_what_has_a_gradient_is_kept_from_kernels_without_one() -> None:
    """Of float32, so that a CPU has a kernel at all."""
    inputs = {"x": given()["x"].float()}
    assert [site.kernel for site in check(Ending(of_bias), inputs).sites] == ["flash (CPU)"]
    assert [site.kernel for site in check(Ending(as_it_is), inputs).sites] == ["math"]
