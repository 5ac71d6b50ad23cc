"""Planning by a table of conformance: exactly the form that failed is left out, and the site says so."""

from __future__ import annotations

import dataclasses

import pytest

from onnx_attnfuse.fusion.plan import PlanContext, make_plans
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome, Verdict
from onnx_attnfuse.kernels.device import Device
from tests.support.planning import model_of, read, said

CPU = Device("cpu")
MHA = "MultiHeadAttention"


def planned(kind: str, opset: int, *failed: Form, verdict: Verdict = "wrong") -> tuple[list[str], set[str]]:
    """All plans for a kind of attention in float32, and the codes of refusals."""
    table = Conformance("cpu", {"onnxruntime": "0"}, tuple(Outcome(form, verdict) for form in failed))
    spec, meaning, context = read(model_of(kind, "float", opset=opset), CPU)
    plans, refusals = make_plans(spec, meaning, PlanContext(CPU, conformance=table), context)
    return [said(plan) for plan in plans], {reason.code for reason in refusals}


@pytest.mark.parametrize("verdict", ["wrong", "unsupported", "on-cpu"])
def test_a_form_that_failed_is_not_planned(verdict: Verdict) -> None:
    plans, codes = planned("plain", 18, Form(MHA, "float32"), verdict=verdict)
    assert not plans
    assert "fails-conformance" in codes


@pytest.mark.parametrize(
    "near",
    [
        Form(MHA, "float16"),
        Form(MHA, "float32", "bias", "full"),
        Form(MHA, "float32", causal=True),
        Form(MHA, "float32", cached=True),
        Form("Attention", "float32"),
        Form(MHA, "float32"),
    ],
    ids=lambda form: form.name,
)
def test_a_near_miss_is_kept(near: Form) -> None:
    verdict: Verdict = "right" if near == Form(MHA, "float32") else "wrong"
    plans, codes = planned("plain", 18, near, verdict=verdict)
    assert plans == ["MultiHeadAttention none"]
    assert "fails-conformance" not in codes


def test_another_operator_takes_the_place() -> None:
    before, _ = planned("plain", 23)
    plans, codes = planned("plain", 23, Form(before[0].split()[0], "float32"))
    assert len(before) == 2
    assert plans == before[1:]
    assert "fails-conformance" in codes


def test_another_form_of_the_same_operator_takes_the_place() -> None:
    causal, _ = planned("causal", 18)
    plans, codes = planned("causal", 18, Form(MHA, "float32", causal=True))
    assert causal[0] == "MultiHeadAttention none causal"
    assert "MultiHeadAttention none causal" not in plans
    assert plans or "fails-conformance" in codes


def test_no_form_that_failed_stands_behind_a_test() -> None:
    device = Device("cuda", 90)
    spec, meaning, context = read(model_of("padded", "float16", opset=18), device)
    lengths = Form(MHA, "float16", "lengths")
    context_of = {
        failed: PlanContext(
            device, padding="guarded", conformance=Conformance("cuda", {}, (Outcome(lengths, "wrong" if failed else "right"),))
        )
        for failed in (False, True)
    }
    before, after = (make_plans(spec, meaning, context_of[failed], context)[0][0] for failed in (False, True))
    assert "lengths" in [item.encoding.mask for item in before.faster]
    assert "lengths" not in [item.encoding.mask for item in after.faster]
    assert dataclasses.replace(before, faster=(), gains=()) == dataclasses.replace(after, faster=(), gains=())
