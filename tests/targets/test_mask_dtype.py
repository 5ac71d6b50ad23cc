"""Half operands with scores and masks of float32, as in mixed precision: what operators are given, and what is refused."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.verify.verdict import LOOSE, compare
from tests.support.bundled import run

MIXED = """<ir_version: 10, opset_import: ["" : 18]>
g (float16[b, 2, s, 16] q, float16[b, 2, t, 16] k, float16[b, 2, t, 16] v, bool[b, 1, s, t] seen, {given})
    => (float16[b, 2, s, 16] out)
<float zero = {{0}}, float fill = {{{fill}}}, float scale = {{0.25}}, float[2, 1, 1] table = {{0.5, -1.5}}>
{{
    turned = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(q, turned)
    wide = Cast<to = 1>(product)
    scaled = Mul(wide, scale)
    {mask}
    masked = Add(scaled, mask)
    weights = Softmax<axis = -1>(masked)
    narrow = Cast<to = 10>(weights)
    out = MatMul(narrow, v)
}}"""
FILLED = "mask = Where(seen, zero, fill)"
LEARNED = """half = Cast<to = 10>(table)
    some = Cast<to = 1>(half)
    filled = Where(seen, zero, fill)
    mask = Add(some, filled)"""
NUMBERS = "filled = Where(seen, zero, fill)\n    mask = Add(bias, filled)"
LOWEST = "-3.4028234663852886e38"
HALF_BIAS, BIAS = "float16[b, 1, s, t] bias", "float[b, 1, s, t] bias"


def report_of(mask: str, given: str, fill: str, folder: pathlib.Path, **choices: Any) -> tuple[onnx.ModelProto, Any]:
    model = onnx.parser.parse_model(MIXED.format(mask=mask, given=given, fill=fill))
    return model, onnx_attnfuse.optimize(model, always=True, target="MultiHeadAttention", evidence=folder, **choices)


@pytest.mark.parametrize("device", [{"ep": "cpu"}, {"ep": "cuda", "arch": "sm90"}], ids=["cpu", "cuda"])
@pytest.mark.parametrize("fill", [LOWEST, "-1e13", "-100"])
@pytest.mark.parametrize(("mask", "given"), [(FILLED, HALF_BIAS), (LEARNED, HALF_BIAS)], ids=["fills", "learned"])
def test_numbers_of_the_half_type_and_fills_are_handed_over(
    mask: str, given: str, fill: str, device: dict[str, str], tmp_path: pathlib.Path
) -> None:
    model, result = report_of(mask, given, fill, tmp_path, padding="exact", **device)
    (site,) = result.report.sites
    assert site.status == "fused", site.reasons
    assert site.verified is not None
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((2, 2, 4, 16)).astype(np.float16) for name in "qkv"}
    feeds["bias"] = rng.standard_normal((2, 1, 4, 4)).astype(np.float16)
    feeds["seen"] = rng.random((2, 1, 4, 4)) < 0.7
    feeds["seen"][0, :, 1] = False
    assert compare(run(model, feeds)["out"], run(result.model, feeds)["out"], LOOSE).equal


@pytest.mark.parametrize(
    ("mask", "given", "fill"), [(NUMBERS, BIAS, LOWEST), (FILLED, HALF_BIAS, "-0.1")], ids=["given", "not of the half type"]
)
def test_numbers_that_would_be_rounded_are_not(mask: str, given: str, fill: str, tmp_path: pathlib.Path) -> None:
    _, result = report_of(mask, given, fill, tmp_path)
    (site,) = result.report.sites
    assert [reason.code for reason in site.reasons] == ["narrowed-mask"]
