"""What a kernel policy leaves of the plans for an attention: the kernel that will run, or why none of the wanted ones does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx_ir as ir
import pytest

from onnx_attnfuse import Policy
from onnx_attnfuse.fusion.plan import PlanContext
from onnx_attnfuse.fusion.plan_policy import endangered, needs_all_kernels, preferred_plans, refuse_packed
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.ort_settings import switches_for
from onnx_attnfuse.options import PaddingPolicy
from onnx_attnfuse.reasons import Reason
from tests.support.planning import model_of, read, said

DEVICES = {"cpu": Device("cpu"), "sm80": Device("cuda", 80), "sm90": Device("cuda", 90)}
FLASH, EFFICIENT, FALLBACK = Policy(flash=True), Policy(efficient=True), Policy(sdpa_fallback=True)
NO_FLASH, NO_EFFICIENT = Policy(flash=False), Policy(efficient=False)
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


def switched(device: Device, policy: Policy) -> Device:
    """The device with the kernels switched off that a policy does without."""
    return dataclasses.replace(device, switches=switches_for(policy, device))


def left(kind: str, dtype: str, name: str, policy: Policy, padding: PaddingPolicy = "auto") -> str:
    """The kernel of the best plan that a policy allows, or `left` and the codes of the reasons why there is none."""
    device = switched(DEVICES[name], policy)
    spec, meaning, context = read(model_of(kind, dtype), device)
    plans, refusals = preferred_plans(spec, meaning, PlanContext(device, padding), policy, context)
    codes = " ".join(reason.code for reason in refusals)
    return plans[0].best.forecast.kernel.removesuffix("_ATTENTION") if plans else f"left: {codes}"


@pytest.mark.parametrize(
    ("policy", "kind", "dtype", "expected"),
    [
        (
            FLASH,
            "plain",
            "float",
            {"cpu": "FLASH", "sm80": "left: old-architecture not-float16", "sm90": "left: not-half not-float16"},
        ),
        (FLASH, "plain", "float16", {"cpu": "left: not-float32", "sm80": "FLASH", "sm90": "CUDNN_FLASH"}),
        (
            FLASH,
            "padded",
            "float16",
            {"cpu": "left: not-float32", "sm80": "left: old-architecture mask-form", "sm90": "CUDNN_FLASH"},
        ),
        (FLASH, "causal", "float16", {"cpu": "left: not-float32", "sm80": "FLASH", "sm90": "CUDNN_FLASH"}),
        (
            FLASH,
            "biased",
            "float16",
            {"cpu": "left: not-float32", "sm80": "left: old-architecture mask-form", "sm90": "CUDNN_FLASH"},
        ),
        (FLASH, "cached", "float16", {"cpu": "left: not-float32", "sm80": "FLASH", "sm90": "FLASH"}),
        (FLASH, "grouped", "float16", {"cpu": "left: not-float32", "sm80": "FLASH", "sm90": "CUDNN_FLASH"}),
        (EFFICIENT, "plain", "float", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (EFFICIENT, "plain", "float16", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (EFFICIENT, "padded", "float16", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "left: unsafe-switch"}),
        (EFFICIENT, "biased", "float16", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "left: unsafe-switch"}),
        (EFFICIENT, "cached", "float16", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (EFFICIENT, "grouped", "float16", {"cpu": "left: no-such-kernel", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (FALLBACK, "plain", "float16", {"cpu": "MATH", "sm80": "FLASH", "sm90": "CUDNN_FLASH"}),
        (FALLBACK, "cached", "float16", {"cpu": "MATH", "sm80": "FLASH", "sm90": "FLASH"}),
        (FALLBACK, "padded", "float16", dict.fromkeys(DEVICES, "left: masked")),
        (FALLBACK, "causal", "float16", dict.fromkeys(DEVICES, "left: masked")),
        (FALLBACK, "biased", "float16", dict.fromkeys(DEVICES, "left: masked")),
        (FALLBACK, "grouped", "float16", dict.fromkeys(DEVICES, "left: masked")),
        (NO_FLASH, "plain", "float", {"cpu": "MATH", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (NO_FLASH, "causal", "float16", {"cpu": "MATH", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (NO_FLASH, "cached", "float16", {"cpu": "MATH", "sm80": "EFFICIENT", "sm90": "EFFICIENT"}),
        (NO_EFFICIENT, "plain", "float16", {"cpu": "MATH", "sm80": "FLASH", "sm90": "CUDNN_FLASH"}),
        (NO_EFFICIENT, "cached", "float16", {"cpu": "MATH", "sm80": "FLASH", "sm90": "FLASH"}),
    ],
)
def test_a_policy_leaves_its_kernel_or_the_reasons_of_each(
    policy: Policy, kind: str, dtype: str, expected: Mapping[str, str]
) -> None:
    assert {name: left(kind, dtype, name, policy) for name in expected} == expected


def test_wishes_are_tried_in_order_and_the_reasons_of_all_are_kept() -> None:
    both, last = Policy(flash=True, efficient=True), Policy(flash=True, sdpa_fallback=True)
    assert [left("padded", "float16", name, both) for name in ("sm80", "sm90")] == ["EFFICIENT", "CUDNN_FLASH"]
    assert left("biased", "float16", "cpu", both) == "left: not-float32 no-such-kernel"
    assert left("padded", "float16", "sm80", last) == "left: old-architecture mask-form masked"
    assert left("plain", "float", "sm80", last) == "EFFICIENT"


@pytest.mark.parametrize(
    ("policy", "padding", "expected"),
    [
        (FLASH, "auto", "left: old-architecture mask-form"),
        (FLASH, "assume-right", "left: old-architecture mask-form"),
        (FLASH, "assume-none", "FLASH"),
        (EFFICIENT, "assume-right", "EFFICIENT"),
    ],
)
def test_batches_that_the_caller_vouches_for_count_for_a_wish(policy: Policy, padding: PaddingPolicy, expected: str) -> None:
    assert left("padded", "float16", "sm80", policy, padding) == expected


def test_a_reason_names_the_kind_of_kernel_that_was_wanted() -> None:
    device = switched(DEVICES["cpu"], EFFICIENT)
    spec, meaning, context = read(model_of("plain"), device)
    _, (reason,) = preferred_plans(spec, meaning, PlanContext(device), EFFICIENT, context)
    assert str(reason) == "MultiHeadAttention has no memory-efficient kernel on cpu"
    (plan, *_), _ = preferred_plans(spec, meaning, PlanContext(device), FLASH, context)
    assert said(plan) == "MultiHeadAttention none"


def params(op: str = "MultiHeadAttention", rows: int = 1100, heads: int = 16) -> AttentionParams:
    """An attention with a bias, whose rows fill no whole vectors: without cuDNN's kernel it is left to the math kernel."""
    return AttentionParams(HALF, 2, heads, rows, rows, 64, 64, "bias", op=op)


@pytest.mark.parametrize(
    ("found", "is_dangerous"),
    [
        (params(), False),
        (params(heads=1 << 12), True),
        (params("GroupQueryAttention"), False),
        (dataclasses.replace(params("GroupQueryAttention"), head_size=2000, v_head_size=2000), False),
        (params("onnx.Attention", heads=1 << 12), False),
    ],
    ids=["few scores", "many scores", "another kernel is left", "no kernel was there before", "a math kernel that is safe"],
)
def test_switching_off_is_dangerous_where_the_math_kernel_is_not_safe(found: AttentionParams, is_dangerous: bool) -> None:
    device = switched(DEVICES["sm90"], NO_FLASH)
    assert (endangered(found, device) is not None) == is_dangerous
    assert endangered(found, DEVICES["sm90"]) is None
    assert endangered(found, switched(DEVICES["cpu"], NO_FLASH)) is None


def test_of_a_math_kernel_that_nothing_is_known_of_no_size_is_safe() -> None:
    off = Policy(flash=False, efficient=False)
    few = params("GroupQueryAttention", rows=8)
    danger = endangered(few, switched(DEVICES["sm80"], off))
    assert danger is not None
    assert danger.code == "unsafe-switch"
    assert endangered(params(rows=8), switched(DEVICES["sm80"], off)) is None


def test_an_operator_of_which_nothing_can_be_told_keeps_all_kernels_on_but_not_on_a_cpu() -> None:
    unknown = Reason("unknown-operator", "the kernels of PagedAttention are not forecast")
    assert needs_all_kernels(unknown, switched(DEVICES["sm90"], NO_FLASH))
    assert not needs_all_kernels(unknown, DEVICES["sm90"])
    assert not needs_all_kernels(unknown, switched(DEVICES["cpu"], NO_FLASH))


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        (Policy(), []),
        (FLASH, []),
        (EFFICIENT, []),
        (FALLBACK, ["masked"]),
        (NO_FLASH, []),
        (Policy(flash=False, efficient=False), ["unsafe-switch"]),
    ],
)
def test_packed_attention_is_asked_too(policy: Policy, codes: list[str]) -> None:
    packed = AttentionParams(HALF, 2, 16, 640, 640, 48, 48, "none", op="PackedMultiHeadAttention")
    found = refuse_packed(packed, policy, switched(DEVICES["sm80"], policy))
    assert [reason.code for reason in found] == codes
