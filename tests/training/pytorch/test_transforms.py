"""Modules whose forward calls torch.vmap or torch.func, and modules whose padded products change their lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.training.pytorch.comparing import compiled, outcome, same

SIZE = 16


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.mT * 0.25).softmax(-1) @ value


class Beside(torch.nn.Module):
    """An attention, and something else made of its operands."""

    def __init__(self, other: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.other = torch.nn.Linear(SIZE, 3 * SIZE), other
        self.weight = torch.nn.Parameter(torch.randn(4, SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).chunk(3, -1)
        return _attend(query, key, value) + self.other(query, key, value, self.weight)


def _ensemble(query, key, value, weight):
    return torch.vmap(lambda each: query @ each)(weight).mean(0)


def _masked(query, key, value, weight):
    index = torch.arange(query.shape[1])
    seen = torch.vmap(torch.vmap(lambda row, column: row >= column, in_dims=(None, 0)), in_dims=(0, None))(index, index)
    return (query @ key.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ value


def _gradient(query, key, value, weight):
    return torch.func.grad(lambda item: (item**3).sum())(query)


def _directional(query, key, value, weight):
    return torch.func.jvp(torch.sin, (query,), (torch.ones_like(query),))[1]


def _jacobian(query, key, value, weight):
    return torch.func.jacrev(lambda item: torch.sin(item).sum(0))(query[0]).diagonal(dim1=1, dim2=2).sum()


def _inside(query, key, value, weight):
    return torch.vmap(_attend)(query, key, value)


def _inside_unbatched(query, key, value, weight):
    """An attention of tensors that are not batched, called where others are."""
    return torch.vmap(lambda each: each * _attend(query, key, value).sum())(weight).sum()


def _differentiated(query, key, value, weight):
    return torch.func.grad(lambda item: _attend(item, key, value).square().sum())(query)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (_ensemble, (1, 1)),
        (_masked, (2, 2)),
        (_gradient, (1, 1)),
        (_directional, (1, 1)),
        (_jacobian, (1, 1)),
        (_inside, (1, 2)),
        (_inside_unbatched, (1, 2)),
        (_differentiated, (1, 1)),
    ],
)
@pytest.mark.parametrize("rest", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_of_functions_are_trained_as_they_are(other, found, rest) -> None:
    torch.manual_seed(0)
    module = Beside(other).double()
    call, reports = compiled(module, rest=rest)
    inputs = {"x": torch.randn(2, 5, SIZE, dtype=torch.float64)}
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    (report,) = reports
    assert (report.fused, len(report.sites), report.defect) == (*found, None)


class Shifted(torch.nn.Module):
    """Relative positions by a shift of a padded product, as Transformer-XL has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.places = torch.nn.Linear(SIZE, 3 * SIZE), torch.nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        bias = query @ self.places(positions).unflatten(-1, (2, -1)).permute(1, 2, 0)
        length = x.shape[1]
        bias = torch.nn.functional.pad(bias, (1, 0)).view(*bias.shape[:2], length + 1, length)[:, :, 1:].view_as(bias)
        return (((query @ key.mT + bias) * 0.3).softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_padded_products_are_fused_at_every_length() -> None:
    module = Shifted().double()
    call, reports = compiled(module)
    for length in (9, 12, 15):
        inputs = {"x": torch.randn(2, length, SIZE).double(), "positions": torch.randn(length, SIZE).double()}
        same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [(report.fused, len(report.sites)) for report in reports] == [(1, 1), (1, 1)]
