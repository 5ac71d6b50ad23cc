"""Softmaxes in other words, in training: each as eager PyTorch has it, beside one that differs in one thing and stays."""

from __future__ import annotations

import pytest
import torch

from tests.training.pytorch import masked
from tests.training.pytorch.comparing import check, compiled, outcome, same
from tests.training.pytorch.masked import given

Tensor = torch.Tensor


class Spelled(torch.nn.Module):
    """An attention whose weights a function computes from the scores."""

    def __init__(self, weigh, fill: float | None = None) -> None:
        super().__init__()
        self.parts, self.weigh, self.fill = torch.nn.Linear(masked.WIDTH, 3 * masked.WIDTH), weigh, fill

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT * 0.3
        if self.fill is not None:
            place = torch.arange(x.shape[1])
            scores = scores.masked_fill(place > place[:, None], self.fill)
        return self.weigh(scores, value).transpose(1, 2).flatten(2)


def _less_largest(scores: Tensor, value: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ value


def _less_largest_apart(scores: Tensor, value: Tensor) -> Tensor:
    return (scores - scores.max(-1, keepdim=True).values.detach()).softmax(-1) @ value


def _by_exponentials(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def _divided_late(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return (weights @ value) / weights.sum(-1, keepdim=True)


def _by_logarithms(scores: Tensor, value: Tensor) -> Tensor:
    return scores.log_softmax(-1).exp() @ value


@pytest.mark.parametrize("fill", [None, -torch.inf, -1e9])
@pytest.mark.parametrize("weigh", [_less_largest, _less_largest_apart, _by_exponentials, _divided_late, _by_logarithms])
def test_a_softmax_in_other_words_is_one(weigh, fill) -> None:
    (site,) = check(Spelled(weigh, fill).double(), {"x": given()["x"].double()}).sites
    assert (site.kernel, site.handed) == ("flash (CPU)", "without a mask" if fill is None else "causal by attribute")


def _less_half_of_largest(scores: Tensor, value: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True) / 2).softmax(-1) @ value


def _less_largest_of_all(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax((-1, -2), keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def _as_they_are(scores: Tensor, value: Tensor) -> Tensor:
    weights = scores.exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def _dropped_above_alone(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return torch.nn.functional.dropout(weights, 0.5) / weights.sum(-1, keepdim=True) @ value


def _largest_apart_as_a_number(scores: Tensor, value: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return weights / (1 + weights.sum(-1, keepdim=True)) @ value


@pytest.mark.parametrize(
    "weigh", [_less_half_of_largest, _less_largest_of_all, _as_they_are, _dropped_above_alone, _largest_apart_as_a_number]
)
def test_what_is_almost_a_softmax_stays(weigh) -> None:
    torch.manual_seed(0)
    module, inputs = Spelled(weigh), given()
    call, reports = compiled(module)
    results = []
    for run in (module, call):
        torch.manual_seed(1)
        results.append(outcome(module, run, inputs))
    same(*results)
    assert not reports[-1].fused


def test_weights_that_are_masked_after_the_softmax_and_divided_stay() -> None:
    def weigh(scores: Tensor, value: Tensor) -> Tensor:
        place = torch.arange(scores.shape[-1])
        weights = scores.softmax(-1) * (place <= place[:, None])
        return weights / weights.sum(-1, keepdim=True) @ value

    (site,) = check(Spelled(weigh), {"x": given()["x"]}).sites
    assert [reason.code for reason in site.reasons] == ["scaled-weights"]


def test_patterns_of_users_are_read_by_the_same_files(tmp_path) -> None:
    file = tmp_path / "doubled.py"
    file.write_text(
        """from onnx_attnfuse.language import Tensor, equation, exp, pattern, softmax, sum

@pattern
def squared(scores: Tensor, v: Tensor):
    \"\"\"Squares of exponentials are exponentials of twice the scores.\"\"\"
    weights = exp(scores) * exp(scores)
    return equation(written=weights / sum(weights) @ v, meaning=softmax(scores + scores) @ v)
"""
    )

    def weigh(scores: Tensor, value: Tensor) -> Tensor:
        shifted = scores - scores.amax(-1, keepdim=True)
        weights = shifted.exp() * shifted.exp()
        return weights / weights.sum(-1, keepdim=True) @ value

    module, inputs = Spelled(weigh), {"x": given()["x"]}
    assert not check(module, inputs).fused
    assert check(module, inputs, patterns=(str(file),)).fused == 1
