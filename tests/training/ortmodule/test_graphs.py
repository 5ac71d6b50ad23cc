"""Steps that differ from the first: in what is given, and in what buffers hold. ORTModule by itself looks at neither."""

from __future__ import annotations

import pytest
import torch

from onnx_attnfuse.training import ORTModule
from tests.training.modules import CASES
from tests.training.ortmodule.steps import assert_same, step


class Attention(torch.nn.Module):
    """An attention with a triangle in a buffer, a scale in another, and a mask of keys that may be None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (torch.nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("earlier", torch.ones(9, 9, dtype=torch.bool).tril())
        self.register_buffer("gain", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None, *, twice: bool = False) -> torch.Tensor:
        query, key, value = (
            item(x).view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2) for item in (self.query, self.key, self.value)
        )
        scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~self.earlier[: x.shape[1], : x.shape[1]], -1e9)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
        result = (scores.softmax(-1) @ value).transpose(1, 2) * self.gain
        return result * 2 if twice else result


def x() -> torch.Tensor:
    return torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))


def keep() -> torch.Tensor:
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, 4:] = False
    return mask


def both(module: ORTModule, eager: torch.nn.Module, **named) -> None:
    assert_same(step(module, named), step(eager, named))


def told(capfd) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if "another graph is built" in line]


@pytest.fixture(autouse=True)
def _lines(monkeypatch) -> None:
    monkeypatch.setenv("ATTNFUSE_DEBUG", "1")


def test_a_mask_that_is_given_later_is_no_mask_that_is_ignored(capfd) -> None:
    module, eager = ORTModule(Attention()), Attention()
    both(module, eager, x=x(), keep=None)
    both(module, eager, x=x(), keep=keep())
    assert told(capfd) == ["attnfuse: keep has another form than in the step before; another graph is built for that"]
    both(module, eager, x=x(), keep=None)
    both(module, eager, x=x(), keep=keep().logical_not())
    assert told(capfd) == []
    assert [report.fused for report in module.attention_reports] == [1, 1]


def test_the_same_form_with_other_numbers_and_lengths_has_one_graph(capfd) -> None:
    module, eager = ORTModule(Attention()), Attention()
    for length in (7, 5):
        both(module, eager, x=x()[:, :length], keep=keep()[:, :length])
    assert told(capfd) == []
    assert len(module.attention_reports) == 1


def test_a_flag_that_is_turned_is_not_ignored() -> None:
    module, eager = ORTModule(Attention()), Attention()
    for twice in (False, True, False):
        both(module, eager, x=x(), twice=twice)
    assert len(module.attention_reports) == 2


def test_a_step_that_waits_for_its_backward_part_stays_valid() -> None:
    module, eager = ORTModule(Attention()), Attention()
    for item in (module, eager):
        first, second = item(x()), item(x(), keep())
        (first * second).sum().backward()
    wanted = {name: parameter.grad for name, parameter in eager.named_parameters()}
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name.rpartition("_original_module.")[2]], atol=2e-4, rtol=1e-4)


def test_in_eval_mode_too() -> None:
    module, eager = ORTModule(Attention()).eval(), Attention().eval()
    with torch.no_grad():
        for given in (None, keep()):
            assert torch.allclose(module(x(), given), eager(x(), given), atol=1e-5)


def test_an_input_gets_its_gradient_from_when_it_wants_one() -> None:
    module, eager = ORTModule(Attention()), Attention()
    both(module, eager, x=x())
    inputs = [x().requires_grad_(), x().requires_grad_()]
    for item, given in zip((module, eager), inputs, strict=True):
        item(given).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-4)


def changed(module: torch.nn.Module, way: str) -> None:
    """Takes away a key of the third row, in one of the ways that programs change buffers in."""
    new = module.earlier.clone()
    new[2, 0] = False
    if way == "in place":
        module.earlier[2, 0] = False
    elif way == "past autograd":
        module.earlier.data[2, 0] = False
    elif way == "as another tensor":
        module.earlier = new
    else:
        module.load_state_dict({**module.state_dict(), "earlier": new})


@pytest.mark.parametrize("way", ["in place", "past autograd", "as another tensor", "by a state"])
def test_a_buffer_that_a_mask_was_read_from_changes(way: str, capfd) -> None:
    module, eager = ORTModule(Attention()), Attention()
    both(module, eager, x=x())
    assert module.attention_reports[0].sites[0].handed == "causal by attribute"
    for item in (module.module, eager):
        changed(item, way)
    both(module, eager, x=x())
    assert told(capfd) == ["attnfuse: buffer 'earlier' changed, which a mask was read from; another graph is built"]
    assert module.attention_reports[1].sites[0].handed.startswith("its mask as a bias")
    for item in (module.module, eager):
        item.earlier[4, 1] = False
    both(module, eager, x=x())
    assert told(capfd) == []


def test_a_buffer_that_is_written_with_what_it_held_is_the_same(capfd) -> None:
    module, eager = ORTModule(Attention()), Attention()
    both(module, eager, x=x())
    module.module.earlier = module.module.earlier.clone()
    module.module.load_state_dict(module.module.state_dict())
    both(module, eager, x=x())
    assert told(capfd) == []
    assert len(module.attention_reports) == 1


def test_other_buffers_may_change_without_another_graph(capfd) -> None:
    module, eager = ORTModule(Attention()), Attention()
    both(module, eager, x=x())
    for gain in (torch.tensor([3.0]), torch.tensor([5.0])):
        for item in (module.module, eager):
            item.gain = gain
        both(module, eager, x=x())
    assert told(capfd) == []
    assert len(module.attention_reports) == 1


def test_a_large_triangle_is_read() -> None:
    case = CASES["buffered"]
    module, eager = case.module(), case.module()
    for item in (module, eager):
        item.earlier = torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril()
    wrapped = ORTModule(module)
    both(wrapped, eager, **case.inputs())
    assert wrapped.attention_reports[0].sites[0].handed == "causal by attribute"
