"""How often the blocks of a mask are made: once for all layers of a step, and anew where what the mask reads has changed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onnx_attnfuse.training.pytorch import flex
from tests.training.pytorch import masked
from tests.training.pytorch.comparing import compiled, outcome, same
from tests.training.pytorch.masked import Masked, given

LAYERS = 3


class Layers(torch.nn.Module):
    """Layers with a rule of each, one after the other."""

    def __init__(self, *rules, again: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Masked(rule) for rule in rules])
        self.again = again

    def forward(self, x: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False, **inputs) if self.again else layer(x, **inputs))
        return x


class Crossed(torch.nn.Module):
    """Two attentions of one mask; what is softened first is multiplied last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 96), torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1])
        kept = masked.documents(place[:, None], place, self, {"documents": documents})
        (query, key, value), others = (
            [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer(x).chunk(3, -1)] for layer in (self.first, self.second)
        )
        weights = (query @ key.mT).masked_fill(~kept, masked.LOWEST).softmax(-1)
        other = (others[0] @ others[1].mT).masked_fill(~kept, masked.LOWEST).softmax(-1) @ others[2]
        return (weights @ value + 2 * other).transpose(1, 2).flatten(2)


@pytest.fixture
def made(monkeypatch) -> list[tuple]:
    """The rules whose blocks were made since."""
    found: list[tuple] = []
    blocks = flex._blocks

    def noted(program, *others):
        found.append(program)
        return blocks(program, *others)

    monkeypatch.setattr(flex, "_blocks", noted)
    flex._KEPT.clear()
    return found


def test_blocks_of_a_rule_that_reads_nothing_are_made_once_for_all_layers_and_steps(made) -> None:
    module = Layers(*[masked.window] * LAYERS)
    call, reports = compiled(module, flex=True)
    for _ in range(2):
        same(outcome(module, module, given()), outcome(module, call, given()))
    assert [site.kernel for site in reports[-1].sites] == ["flex"] * LAYERS
    assert len(made) == 1


@pytest.mark.parametrize(("rule", "name"), [(masked.documents, "documents"), (masked.padded_triangle, "mask")])
def test_blocks_of_a_rule_that_reads_an_input_are_made_once_a_step_and_follow_it_in_place_too(made, rule, name) -> None:
    module, inputs = Layers(*[rule] * LAYERS), given(name)
    call, reports = compiled(module, flex=True)
    results = []
    for step in range(3):
        if step:
            inputs[name][:, 7:30] = step - 1
        expected = outcome(module, module, inputs)
        same(expected, outcome(module, call, inputs))
        results.append(expected["result"])
        assert len(made) == step + 1
    assert not torch.allclose(results[0], results[1])
    assert not torch.allclose(results[1], results[2])
    assert [site.kernel for site in reports[-1].sites] == ["flex"] * LAYERS


def test_blocks_of_two_rules_are_not_one(made) -> None:
    module = Layers(masked.window, masked.documents, masked.window)
    call, _ = compiled(module, flex=True)
    same(outcome(module, module, given("documents")), outcome(module, call, given("documents")))
    assert len(made) == 2


def test_blocks_are_made_before_the_first_attention_that_takes_them(made) -> None:
    module, inputs = Crossed(), given("documents")
    call, reports = compiled(module, flex=True)
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    assert [site.kernel for site in reports[-1].sites] == ["flex"] * 2


def test_checkpoints_make_blocks_that_read_nothing_no_second_time(made) -> None:
    module = Layers(*[masked.window] * LAYERS, again=True)
    call, reports = compiled(module, flex=True)
    same(outcome(module, module, given()), outcome(module, call, given()))
    assert [site.kernel for site in reports[-1].sites] == ["flex"] * LAYERS
    assert len(made) == 1


def test_a_step_without_gradients_leaves_blocks_that_one_with_them_can_take(made) -> None:
    module = Layers(*[masked.window] * LAYERS)
    call, _ = compiled(module, flex=True)
    with torch.inference_mode():
        call(**given())
    same(outcome(module, module, given()), outcome(module, call, given()))
    assert len(made) == 1


@pytest.mark.exhaustive
def test_more_rules_are_compiled_than_pytorch_compiles_of_one_function(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    query, place = torch.zeros(2, 4, 300, 16), torch.arange(300)
    program = ("le", ("j",), ("i",))
    for width in range(1, 13):
        program = ("and", program, ("le", ("i",), ("sum", 30 * width, (1, ("j",)))))
        kept = (place <= place[:, None]) & (place[:, None] - place <= 30)
        blocks = torch.nn.functional.pad(kept, (0, 84, 0, 84)).view(3, 128, 3, 128).any(3).any(1)
        found = flex._compiled(flex._blocks, program)(program, (), query, query)
        assert (found[2] + found[4]).flatten().tolist() == blocks.sum(-1).tolist()
