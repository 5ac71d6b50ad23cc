"""The operator and the encodings that an attention is planned for, and why the other operators are not taken.

The rules are those of docs/targets.md: without a kernel for masks a bias is all that the CPU takes; cuDNN's kernel takes lengths;
before sm90 lengths with offsets run the memory-efficient kernel; a triangle alone is an attribute.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import pytest

from onnx_attnfuse import OptionError
from onnx_attnfuse.fusion import plan as plan_module
from onnx_attnfuse.fusion.plan import PlanContext, make_plans
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.execution_provider import OpSupport
from onnx_attnfuse.kernels.operators import OpInfo
from onnx_attnfuse.options import PaddingPolicy
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.targets import TARGETS
from tests.support.planning import model_of, read, said

CPU, SM80, SM90 = Device("cpu"), Device("cuda", 80), Device("cuda", 90)
BIAS = "MultiHeadAttention bias"
NONE, CAUSAL = "MultiHeadAttention none", "MultiHeadAttention none causal"
UNPADDED = "MultiHeadAttention none if unpadded"
LENGTHS, RANGES = "MultiHeadAttention lengths if right_padded", "MultiHeadAttention ranges if right_padded"
CACHED = "onnx.Attention none cached"
NO_TRIANGLE, FLOAT_ON_CUDA = "not-causal old-opset", "no-kernel-for-type old-opset not-projected"
"""GroupQueryAttention wants a triangle, and has no kernel for float32 on CUDA; ai.onnx Attention needs opset 23; com.microsoft's
Attention, which is not considered on a CPU, wants its projections."""


def planned(kind: str, dtype: str, device: Device, opset: int = 18, **choices: Any) -> tuple[str, str]:
    """The best plan for a kind of attention, `left` if there is none; and the codes of refusals, in order."""
    spec, meaning, context = read(model_of(kind, dtype, opset=opset), device)
    plans, refusals = make_plans(spec, meaning, PlanContext(device, **choices), context)
    return said(plans[0]) if plans else "left", " ".join(reason.code for reason in refusals)


@pytest.mark.parametrize("padding", ["auto", "exact", "guarded", "assume-right", "assume-none"])
@pytest.mark.parametrize(
    ("kind", "dtype", "device", "plan", "codes"),
    [
        ("plain", "float", CPU, NONE, NO_TRIANGLE),
        ("plain", "float", SM80, NONE, FLOAT_ON_CUDA),
        ("plain", "float", SM90, NONE, FLOAT_ON_CUDA),
        ("plain", "float16", CPU, NONE, NO_TRIANGLE),
        ("plain", "float16", SM80, NONE, f"{NO_TRIANGLE} not-projected"),
        ("plain", "float16", SM90, NONE, f"{NO_TRIANGLE} not-projected"),
        ("causal", "float", CPU, CAUSAL, "old-opset"),
        ("causal", "float", SM80, CAUSAL, FLOAT_ON_CUDA),
        ("causal", "float", SM90, CAUSAL, FLOAT_ON_CUDA),
        ("causal", "float16", CPU, CAUSAL, "old-opset"),
        ("causal", "float16", SM80, CAUSAL, "old-opset not-projected"),
        ("causal", "float16", SM90, CAUSAL, "old-opset not-projected"),
        ("biased", "float", CPU, BIAS, NO_TRIANGLE),
        ("biased", "float", SM80, BIAS, FLOAT_ON_CUDA),
        ("biased", "float", SM90, BIAS, FLOAT_ON_CUDA),
        ("biased", "float16", CPU, BIAS, NO_TRIANGLE),
        ("biased", "float16", SM80, BIAS, f"{NO_TRIANGLE} not-projected"),
        ("biased", "float16", SM90, BIAS, f"{NO_TRIANGLE} not-projected"),
        ("cached", "float", CPU, CACHED, "not-causal"),
        ("cached", "float", SM80, CACHED, "no-kernel-for-type cached"),
        ("cached", "float", SM90, CACHED, "no-kernel-for-type cached"),
        ("cached", "float16", CPU, NONE, "not-causal no-kernel-for-type"),
        ("cached", "float16", SM80, CACHED, "not-causal cached"),
        ("cached", "float16", SM90, CACHED, "not-causal cached"),
        ("grouped", "float", CPU, CAUSAL, "old-opset"),
        ("grouped", "float", SM80, CAUSAL, FLOAT_ON_CUDA),
        ("grouped", "float", SM90, CAUSAL, FLOAT_ON_CUDA),
        ("grouped", "float16", CPU, CAUSAL, "old-opset"),
        ("grouped", "float16", SM80, CAUSAL, "old-opset not-projected"),
        ("grouped", "float16", SM90, CAUSAL, "old-opset not-projected"),
    ],
)
def test_without_padding_every_policy_has_the_same_plan(
    kind: str, dtype: str, device: Device, plan: str, codes: str, padding: PaddingPolicy
) -> None:
    assert planned(kind, dtype, device, padding=padding) == (plan, codes)


@pytest.mark.parametrize(
    ("dtype", "padding", "expected"),
    [
        ("float", "auto", {CPU: BIAS, SM80: BIAS, SM90: BIAS}),
        ("float", "exact", {CPU: BIAS, SM80: BIAS, SM90: BIAS}),
        ("float", "guarded", {CPU: BIAS, SM80: f"{RANGES}, else {BIAS}", SM90: f"{RANGES}, else {BIAS}"}),
        # short sequences run the math kernel, which does not look at ranges: a test stays, though padding is on the right
        ("float", "assume-right", {CPU: BIAS, SM80: f"{RANGES}, else {BIAS}", SM90: f"{RANGES}, else {BIAS}"}),
        ("float", "assume-none", {CPU: UNPADDED, SM80: UNPADDED, SM90: UNPADDED}),
        ("float16", "auto", {CPU: BIAS, SM80: BIAS, SM90: BIAS}),
        ("float16", "exact", {CPU: BIAS, SM80: BIAS, SM90: BIAS}),
        ("float16", "guarded", {CPU: BIAS, SM80: f"{UNPADDED}, else {RANGES}, else {BIAS}", SM90: f"{LENGTHS}, else {BIAS}"}),
        ("float16", "assume-right", {CPU: BIAS, SM80: RANGES, SM90: LENGTHS}),
        # on a CPU nothing is faster without a mask in float16; cuDNN's kernel is faster with lengths than without
        ("float16", "assume-none", {CPU: BIAS, SM80: UNPADDED, SM90: LENGTHS}),
    ],
)
def test_padding_is_handed_over_as_the_policy_allows(dtype: str, padding: PaddingPolicy, expected: Mapping[Device, str]) -> None:
    assert {device: planned("padded", dtype, device, padding=padding)[0] for device in expected} == expected


@pytest.mark.parametrize(
    ("target", "kind", "device", "plan", "codes"),
    [
        ("GroupQueryAttention", "grouped", CPU, "GroupQueryAttention none causal", ""),
        ("GroupQueryAttention", "grouped", SM90, "GroupQueryAttention none causal", ""),
        ("GroupQueryAttention", "padded", SM90, "left", "not-causal"),
        ("GroupQueryAttention", "cached", CPU, "left", "not-causal"),
        ("onnx.Attention", "cached", SM80, CACHED, ""),
        ("onnx.Attention", "cached", CPU, "left", "no-kernel-for-type"),
        ("onnx.Attention", "grouped", CPU, "left", "old-opset"),
        ("Attention", "plain", CPU, "left", "not-projected"),
        ("Attention", "cached", SM80, "left", "cached"),
        ("MultiHeadAttention", "cached", SM80, NONE, ""),
    ],
)
def test_an_operator_that_is_asked_for_is_taken_or_refused(target: str, kind: str, device: Device, plan: str, codes: str) -> None:
    assert planned(kind, "float16", device, target=target) == (plan, codes)


@pytest.mark.parametrize("device", [CPU, SM80, SM90], ids=lambda device: device.name)
@pytest.mark.parametrize("kind", ["plain", "padded", "causal", "cached"])
def test_what_is_in_float64_is_read_and_left_as_no_operator_takes_it(kind: str, device: Device) -> None:
    plan, codes = planned(kind, "double", device, opset=23)
    assert plan == "left"
    assert set(codes.split()) == {"no-kernel-for-type"}
    assert planned(kind, "float", device, opset=23)[0] != "left"


@pytest.mark.parametrize("device", [CPU, SM80, SM90], ids=lambda device: device.name)
def test_a_new_opset_leaves_one_refusal_less(device: Device) -> None:
    old, new = (planned("plain", "float", device, opset)[1].split() for opset in (22, 23))
    assert [code for code in old if code != "old-opset"] == new
    assert "old-opset" in old


@pytest.mark.parametrize(
    ("support", "told"),
    [({}, " no-kernel-for-device"), ({"cpu": lambda: OpSupport("made up", frozenset(), frozenset())}, "")],
)
def test_an_operator_that_names_its_providers_is_told_of_nowhere_else(
    support: Mapping[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = OpInfo(name="NewAttention", inputs={"query": "query"}, support=support)
    unknown = Reason("no-kernel-for-device", "made up")
    target = types.SimpleNamespace(INFO=info, ALONE=False, refuse=lambda spec, meaning, context: unknown)
    monkeypatch.setattr(plan_module, "TARGETS", (*TARGETS, target))
    assert planned("plain", "float", SM90) == (NONE, FLOAT_ON_CUDA + told)
    assert planned("plain", "float", SM90, target="NewAttention") == ("left", "no-kernel-for-device")


@pytest.mark.parametrize(
    ("kind", "dtype", "lengths", "plan"),
    [
        ("padded", "float16", {"b": 1, "s": 64}, BIAS),
        ("padded", "float16", {"b": 8, "s": 1024}, BIAS),
        ("padded", "float16", {"b": 8, "s": 16384}, f"{LENGTHS}, else {BIAS}"),
        ("plain", "float", {"b": 1, "s": 64}, NONE),
        ("plain", "float", {"b": 8, "s": 1024}, "left"),
        ("plain", "float16", {"b": 8, "s": 1024}, NONE),
    ],
)
def test_lengths_decide_whether_a_test_spares_memory_and_whether_fusing_pays(
    kind: str, dtype: str, lengths: Mapping[str, int], plan: str
) -> None:
    assert planned(kind, dtype, SM90, lengths=lengths)[0] == plan


def test_what_is_faster_spelled_out_is_fused_where_that_is_asked_for() -> None:
    lengths = {"b": 8, "s": 1024}
    assert planned("plain", "float", SM90, lengths=lengths) == ("left", f"unfused-faster {FLOAT_ON_CUDA}")
    assert planned("plain", "float", SM90, lengths=lengths, always=True) == (NONE, FLOAT_ON_CUDA)


def gains(dtype: str, device: Device) -> list[tuple[str, str]]:
    """The changes that would make padded attention much faster, each with its kernel."""
    spec, meaning, context = read(model_of("padded", dtype), device)
    (best, *_), _ = make_plans(spec, meaning, PlanContext(device, lengths={"b": 1, "s": 64}), context)
    return [(gain.change, gain.kernel) for gain in best.gains]


def test_a_plan_says_what_would_be_faster() -> None:
    assert gains("float", SM80) == [("in float16", "EFFICIENT_ATTENTION")]
    assert gains("float16", SM80) == [
        ("with --padding guarded", "FLASH_ATTENTION"),
        ("with --padding assume-right", "EFFICIENT_ATTENTION"),
    ]
    assert gains("float", CPU) == []


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"target": "SparseAttention"}, "target is 'SparseAttention'; choose auto, MultiHeadAttention"),
        ({"padding": "left"}, "padding is 'left'; choose auto, exact"),
        ({"lengths": {"s": 0}}, "dim 's' is 0; choose a length of 1 or more"),
    ],
)
def test_a_choice_that_does_not_exist_is_an_error(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PlanContext(CPU, **choices)
    assert dataclasses.replace(PlanContext(CPU), lengths={"s": 1}).lengths == {"s": 1}
