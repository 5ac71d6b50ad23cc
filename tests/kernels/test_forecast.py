"""The forecast against the kernels that an H200 ran, and what it says of the faster ones."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir
import pytest

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.sizes import symbol
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.kernels.forecast import forecast, unfused_time

HALF, FLOAT, BRAIN = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.BFLOAT16


def _problem(dtype: ir.DataType, mask: MaskForm, rows: int = 640, head: int = 64, v_head: int | None = None) -> AttentionParams:
    return AttentionParams(dtype, 2, 4, rows, rows, head, head if v_head is None else v_head, mask)


@pytest.mark.parametrize(
    ("params", "hopper", "ampere"),
    [
        (_problem(HALF, "none"), "CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION"),
        (_problem(HALF, "lengths"), "CUDNN_FLASH_ATTENTION", "MATH"),
        (_problem(HALF, "ranges"), "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(HALF, "bias"), "CUDNN_FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(HALF, "bias", rows=1100), "CUDNN_FLASH_ATTENTION", "MATH"),
        (_problem(HALF, "none", head=60), "MATH", "MATH"),
        (_problem(HALF, "none", head=512), "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(HALF, "none", head=64, v_head=128), "CUDNN_FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(BRAIN, "bias"), "CUDNN_FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(FLOAT, "none"), "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(FLOAT, "none", rows=64), "MATH", "MATH"),
        (_problem(FLOAT, "lengths"), "MATH", "MATH"),
    ],
)
def test_is_what_ran(params: AttentionParams, hopper: str, ampere: str) -> None:
    assert forecast(params, resolve("cuda", "sm90")).kernel == hopper
    assert forecast(params, resolve("cuda", "sm80")).kernel == ampere


@pytest.mark.parametrize(
    ("params", "hopper", "ampere"),
    [
        (_problem(HALF, "none"), "CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION"),
        (_problem(BRAIN, "none"), "CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION"),
        (_problem(HALF, "none", rows=512), "CUDNN_FLASH_ATTENTION", "TRT_FLASH_ATTENTION"),
        (_problem(HALF, "lengths", rows=128), "CUDNN_FLASH_ATTENTION", "TRT_FUSED_ATTENTION"),
        (_problem(HALF, "lengths", rows=128, head=128), "CUDNN_FLASH_ATTENTION", "MATH"),
        (_problem(HALF, "ranges", rows=128), "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(HALF, "bias"), "CUDNN_FLASH_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(BRAIN, "bias"), "CUDNN_FLASH_ATTENTION", "MATH"),
        (_problem(FLOAT, "none"), "EFFICIENT_ATTENTION", "EFFICIENT_ATTENTION"),
        (_problem(FLOAT, "none", rows=64), "MATH", "MATH"),
        (_problem(FLOAT, "lengths"), "MATH", "MATH"),
    ],
)
def test_with_the_projections_inside(params: AttentionParams, hopper: str, ampere: str) -> None:
    """As it was read; without a bias and a triangle it was measured to be faster in half precision than with them outside."""
    inside = dataclasses.replace(params, op="Attention")
    for arch, kernel in (("sm90", hopper), ("sm80", ampere)):
        found = forecast(inside, resolve("cuda", arch))
        assert found.kernel == kernel
        outside = forecast(params, resolve("cuda", arch)).time
        spared = params.dtype != ir.DataType.FLOAT and params.mask != "bias" and not params.causal
        assert found.time == pytest.approx(outside * (0.85 if spared else 1.0))
    assert forecast(inside, resolve("cpu")).kernel == "MATH"


def test_every_faster_kernel_has_its_reason() -> None:
    found = forecast(_problem(HALF, "bias"), resolve("cuda", "sm80"))
    assert [(item.kernel, item.code) for item in found.refused] == [
        ("CUDNN_FLASH_ATTENTION", "old-architecture"),
        ("FLASH_ATTENTION", "mask-form"),
    ]


def test_sizes_that_are_not_known_are_said() -> None:
    rows = symbol("s")
    found = forecast(AttentionParams(FLOAT, 2, 4, rows, rows, 64, 64, "bias"), resolve("cuda", "sm90"))
    assert (found.kernel, found.needs) == (
        "EFFICIENT_ATTENTION",
        "the number of queries is a multiple of 16 and there are 256 queries or keys",
    )
    assert found.otherwise is not None
    assert found.otherwise.kernel == "MATH"
    params = AttentionParams(FLOAT, 2, 4, rows, rows, 64, 64, "bias").with_lengths({"s": 250})
    assert forecast(params, resolve("cuda", "sm90")).kernel == "MATH"


@pytest.mark.parametrize(
    ("params", "code"),
    [
        (AttentionParams(HALF, 4, 64, 4096, 4096, 60, 60, "bias"), "too-many-scores"),
        (_problem(FLOAT, "ranges", rows=64), "ranges-ignored"),
        (_problem(BRAIN, "ranges", rows=64), "ranges-ignored"),
        (AttentionParams(HALF, 2, 4, 640, 640, 64, 64, "ranges", causal=True), "ranges-ignored"),
        (AttentionParams(HALF, 2, 4, 1100, 1100, 64, 64, "lengths", causal=True), "causal-lengths"),
    ],
)
def test_what_fails_is_never_worth_it(params: AttentionParams, code: str) -> None:
    device = resolve("cuda", "sm80")
    found = forecast(params, device)
    assert found.fails is not None
    assert found.fails.code == code
    assert found.time == math.inf


def test_what_was_measured_spelled_out() -> None:
    ampere = resolve("cuda", "sm80")
    assert unfused_time(_problem(FLOAT, "none"), ampere) < forecast(_problem(FLOAT, "none"), ampere).time
    assert unfused_time(_problem(HALF, "none"), ampere) > forecast(_problem(HALF, "none"), ampere).time
    assert unfused_time(_problem(HALF, "none", head=60), ampere) < forecast(_problem(HALF, "none", head=60), ampere).time
    assert unfused_time(_problem(FLOAT, "none"), resolve("cpu")) == math.inf


def test_on_the_cpu_a_mask_takes_the_flash_kernel_away() -> None:
    device = resolve("cpu")
    assert forecast(_problem(FLOAT, "none"), device).kernel == "FLASH_ATTENTION"
    assert forecast(_problem(FLOAT, "bias"), device).kernel == "MATH"


@pytest.mark.parametrize(("ep", "arch"), [("tpu", None), ("cuda", "sm42"), ("cpu", "sm80")])
def test_devices_that_do_not_exist(ep: str, arch: str | None) -> None:
    with pytest.raises(OptionError, match="; choose"):
        resolve(ep, arch)
