"""Sequence mixers in exports of PyTorch, and in graphs that differ from one in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx.parser
import onnx_ir as ir
import pytest
import torch

from onnx_attnfuse import Options, optimize

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch, of itself
_STEP = """<ir_version: 9, opset_import: ["" : 18]>
mixer (float[b, 2, 4, 4] past, float[b, 2, 4, 1] decay, float[b, 2, 4, 1] key, float[b, 2, 1, 4] value)
=> (float[b, 2, 4, 4] present) {
  faded = Mul(past, decay)
  outer = Mul(key, value)
  present = Add(faded, outer)
}"""
_CONVOLUTION = """<ir_version: 9, opset_import: ["" : 18]>
mixer (float[b, 3, 2] past, float[b, 3, t] x, float[3, 1, 3] weight) => (float[b, 3, t] y) {
  whole = Concat<axis = -1>(past, x)
  y = Conv<group = 3>(whole, weight)
}"""


def kinds(model: ir.Model) -> list[str]:
    """The kinds of the mixers of a model, in order."""
    return [item.kind for item in optimize(model, Options(verify="none")).report.mixers]


def parsed(text: str) -> ir.Model:
    """A model of its text."""
    return ir.from_proto(onnx.parser.parse_model(text))


class _Called(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def exported(function: Callable[..., Any], *inputs: torch.Tensor) -> ir.Model:
    """What dynamo makes of a function."""
    program = torch.onnx.export(_Called(function).eval(), inputs, dynamo=True, opset_version=18, verbose=False)
    assert program is not None
    return program.model


def _gated_delta(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule, token by token."""
    query, key, value, decay, rate, state = inputs
    results: list[torch.Tensor] = []
    for now in range(query.shape[1]):
        state = state * decay[:, now].exp()[..., None, None]
        change = (value[:, now] - (state * key[:, now, ..., None]).sum(-2)) * rate[:, now, ..., None]
        state = state + key[:, now, ..., None] * change[..., None, :]
        results.append((state * query[:, now, ..., None]).sum(-2))
    return torch.stack(results, 1), state


def operands(length: int) -> list[torch.Tensor]:
    """Queries, keys, values, decays, rates and a state."""
    wide = [torch.randn(2, length, 2, 8) for _ in range(3)]
    return [*wide, -torch.rand(2, length, 2), torch.rand(2, length, 2), torch.randn(2, 2, 8, 8)]


@pytest.mark.parametrize(("length", "kind"), [(1, "recurrence"), (3, "unrolled recurrence")])
def test_tokens_of_a_gated_delta_rule_are_one_mixer(length: int, kind: str) -> None:
    assert kinds(exported(_gated_delta, *operands(length))) == [kind]


def test_a_recurrence_in_a_scan_is_that_of_the_scan() -> None:
    from torch._higher_order_ops.scan import scan  # pyright: ignore[reportMissingTypeStubs]

    def step(state: torch.Tensor, now: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay = now
        state = state * decay[..., None] + key[..., None] * value[..., None, :]
        return state, (state * query[..., None]).sum(-2)

    def whole(state: torch.Tensor, *now: torch.Tensor) -> Any:
        return scan(step, state, now)

    rows = [torch.rand(3, 2, 2, 4) for _ in range(4)]
    assert kinds(exported(whole, torch.randn(2, 2, 4, 4), *rows)) == ["recurrence in a loop"]


def test_a_step_and_a_convolution() -> None:
    assert kinds(parsed(_STEP)) == ["recurrence"]
    assert kinds(parsed(_CONVOLUTION)) == ["causal convolution"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("float[b, 2, 1, 4] value", "float[b, 2, 4, 1] value"),  # what is added is no outer product
        ("present = Add(faded, outer)", "whole = Add(faded, outer)  present = Abs(whole)"),  # the state goes nowhere
        ("Add(faded, outer)", "Sub(faded, outer)"),
        ("faded = Mul(past, decay)", "other = Abs(past)  faded = Mul(other, decay)"),
    ],
)
def test_what_is_no_step(old: str, new: str) -> None:
    assert old in _STEP
    assert kinds(parsed(_STEP.replace(old, new))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Conv<group = 3>(whole, weight)", "Conv<group = 3, pads = [1, 1]>(x, weight)"),  # as far behind as before
        ("Conv<group = 3>", "Conv"),
        ("Concat<axis = -1>(past, x)", "Concat<axis = -1>(x, x)"),
    ],
)
def test_what_is_no_causal_convolution(old: str, new: str) -> None:
    assert old in _CONVOLUTION
    text = _CONVOLUTION.replace(old, new)
    assert kinds(parsed(text if "Conv(" not in text else text.replace("[3, 1, 3] weight", "[3, 3, 3] weight"))) == []


def test_running_sums_without_decays_are_no_mixer() -> None:
    text = """<ir_version: 9, opset_import: ["" : 18]>
    sums (float[b, t] x, int64 axis) => (float[b, t] y) { s = CumSum(x, axis)  y = Sigmoid(s) }"""
    assert kinds(parsed(text)) == []
    decays = text.replace("y = Sigmoid(s)", "e = Exp(s)  y = Mul(e, x)")
    assert kinds(parsed(decays)) == ["chunked recurrence"]


def test_the_report_has_each_mixer_with_its_reason() -> None:
    report = optimize(parsed(_STEP), Options(verify="none")).report
    assert [(item.name, item.reasons[0].code) for item in report.mixers] == [("present", "mixer-step")]
    assert report.to_dict()["mixers"][0]["kind"] == "recurrence"
