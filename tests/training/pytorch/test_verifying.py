"""`verify`: the first step of each graph beside the module as it is; what is wrong is taken back, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch

from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.training import fuse
from onnx_attnfuse.training.pytorch import comparison, runtime_calls
from onnx_attnfuse.training.pytorch.comparison import apart
from tests.training.modules import CASES
from tests.training.pytorch import masked
from tests.training.pytorch.comparing import compiled, outcome, same
from tests.training.pytorch.masked import Masked, given


def first_step(module: torch.nn.Module, inputs, **options):
    """The report after a first step, which is held against the module as it is."""
    call, reports = compiled(module, verify=True, **options)
    same(outcome(module, module, inputs), outcome(module, call, inputs))
    return reports[-1]


@pytest.mark.parametrize("padding", masked.PADDINGS)
@pytest.mark.parametrize("fill", [masked.LOWEST, -math.inf])
def test_a_right_step_is_verified_with_every_padding(padding, fill) -> None:
    report = first_step(Masked(masked.padded_triangle, fill), given("mask", padding=padding))
    assert report.first_step.startswith("verified: results and gradients ")
    assert report.fused == 1
    assert report.lines()[-1] == f"attnfuse: {report.first_step}"


def wrong_forward(monkeypatch) -> None:
    right = runtime_calls.attend
    monkeypatch.setattr(runtime_calls, "attend", lambda query, *rest: right(query * 1.001, *rest))


def wrong_backward(monkeypatch) -> None:
    right = runtime_calls.attend
    monkeypatch.setattr(
        runtime_calls, "attend", lambda query, key, *rest: right(query, key.detach() + 0.99 * (key - key.detach()), *rest)
    )


def wrong_in_one_entry(monkeypatch) -> None:
    def attend(query, *rest):
        return torch.cat([right(query, *rest)[:1], right(query * 1.5, *rest)[1:]])

    right = runtime_calls.attend
    monkeypatch.setattr(runtime_calls, "attend", attend)


@pytest.mark.parametrize("wrong", [wrong_forward, wrong_backward, wrong_in_one_entry])
def test_a_wrong_step_is_taken_back_before_anybody_sees_it(wrong, monkeypatch) -> None:
    wrong(monkeypatch)
    report = first_step(Masked(masked.triangle), given())
    assert report.fused == 0
    assert [reason.code for reason in report.sites[0].reasons] == ["differs"]
    assert report.first_step.startswith("wrong, so all attentions are taken back, please report it")


def test_a_wrong_step_goes_unseen_where_nobody_asks(monkeypatch) -> None:
    wrong_backward(monkeypatch)
    module = Masked(masked.triangle)
    call, reports = compiled(module)
    with pytest.raises(AssertionError):
        same(outcome(module, module, given()), outcome(module, call, given()))
    assert (reports[-1].fused, reports[-1].first_step) == (1, "")


def test_what_half_precision_rounds_is_no_difference_and_a_wrong_entry_is_one(monkeypatch) -> None:
    module, inputs = Masked(masked.window, -math.inf).to(torch.bfloat16), {"x": given()["x"].to(torch.bfloat16)}
    call, reports = compiled(module, verify=True)
    outcome(module, call, inputs)
    assert reports[-1].first_step.startswith("verified")
    wrong_in_one_entry(monkeypatch)
    call, reports = compiled(module, verify=True)
    outcome(module, call, inputs)
    assert reports[-1].first_step.startswith("wrong")


def test_each_graph_is_verified_once() -> None:
    module = Masked(masked.buffer)
    call, reports = compiled(module, verify=True)
    for length in (37, 23, 11):
        same(outcome(module, module, given(length=length)), outcome(module, call, given(length=length)))
    assert [report.first_step[:9] for report in reports] == ["verified:"] * 2
    module.triangle[3, 5] = True
    same(outcome(module, module, given()), outcome(module, call, given()))
    assert [report.first_step[:9] for report in reports] == ["verified:"] * 3


def test_dropout_is_not_verified_and_told() -> None:
    case = CASES["dropout"]
    call, reports = compiled(case.module(), verify=True)
    call(**case.inputs())
    assert reports[-1].first_step == "not verified: something is drawn at random, as dropout does"
    assert reports[-1].fused == 1


class Counting(Masked):
    """An attention behind a normalization that counts and averages what it sees."""

    def __init__(self) -> None:
        super().__init__(masked.triangle)
        self.norm = torch.nn.BatchNorm1d(masked.WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), **given)


def test_a_verified_step_counts_once_and_leaves_random_numbers_and_gradients_alone() -> None:
    torch.manual_seed(3)
    module, other = Counting(), Counting()
    other.load_state_dict(module.state_dict())
    inputs, state = given(), torch.random.get_rng_state()
    call, reports = compiled(other, verify=True)
    call(**inputs)
    module(**inputs)
    assert reports[-1].first_step.startswith("verified")
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(item.grad is None for item in other.parameters())
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], expected)


def test_inputs_that_repeat_what_they_hold_are_copied_as_they_are() -> None:
    module, inputs = Masked(masked.padding), given("mask")
    inputs["mask"] = inputs["mask"][:1].expand(masked.BATCH, -1)
    assert first_step(module, inputs).first_step.startswith("verified")


def test_a_step_without_gradients_is_verified_by_its_results(monkeypatch) -> None:
    module = Masked(masked.triangle)
    for wrong in (False, True):
        if wrong:
            wrong_forward(monkeypatch)
        call, reports = compiled(module, verify=True)
        with torch.no_grad():
            torch.testing.assert_close(call(**given()), module(**given()))
        assert reports[-1].first_step.startswith("wrong" if wrong else "verified")


def test_memory_that_does_not_suffice_is_told_and_training_goes_on(monkeypatch) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(comparison, "_outcome", exhausted)
    report = first_step(Masked(masked.triangle), given())
    assert report.first_step == "not verified: the memory does not suffice for a step without fusing"
    assert report.fused == 1


def test_a_failure_of_ours_costs_the_verification_alone(monkeypatch) -> None:
    monkeypatch.delattr(comparison, "_epsilon")
    report = first_step(Masked(masked.triangle), given())
    assert report.first_step.startswith("not verified: ")
    assert "_epsilon" in report.first_step
    assert report.fused == 1


def test_inputs_that_are_no_plain_tensors_are_not_copied() -> None:
    class Share(torch.Tensor):
        pass

    with pytest.raises(Refused, match="not a plain tensor"):
        comparison.compare(lambda x: x, None, [torch.zeros(2).as_subclass(Share)])  # pyright: ignore[reportArgumentType]


def test_fuse_takes_the_option() -> None:
    torch._dynamo.reset()
    module = fuse(Masked(masked.triangle), rest="eager", verify=True)
    module(**given())
    assert module.attention_reports[0].first_step.startswith("verified")


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([math.nan, 2.0], [math.nan, 2.0], 0.0),
        ([-math.inf, 2.0], [-math.inf, 2.0], 0.0),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [math.nan, 2.0], math.inf),
        ([3.0, 4.0], [0.0, 5.0], math.sqrt(10) / 5),
    ],
)
def test_distances_are_parts_of_the_whole_nan_for_nan(found, expected, distance) -> None:
    assert apart([torch.tensor(found)], [torch.tensor(expected)]) == pytest.approx(distance)


def test_small_gradients_are_told_by_the_largest_and_missing_ones_are_zeros() -> None:
    large, small = torch.tensor([100.0]), torch.tensor([1e-6])
    assert apart([large, 2 * small], [large, small]) == pytest.approx(1e-6)
    assert apart([large, None], [large, torch.zeros(1)]) == 0
    assert apart([large, None], [large, large]) == pytest.approx(1)
    assert apart([small], [torch.zeros(1)]) == math.inf
