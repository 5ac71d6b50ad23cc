"""Causal convolutions of one token as CausalConvWithState, against torch token by token, and what is left as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch

from onnx_attnfuse import Options, optimize
from onnx_attnfuse.certify.certificate import certify
from onnx_attnfuse.graph import io

_STEP = """<ir_version: 9, opset_import: ["" : 18]>
step (float[b, 6, 4] past, float[b, 6, 1] x, float[6, 1, 4] weight, float[6] bias) => (float[b, 6, 1] y, float[b, 6, 4] present)
<int64[1] oldest = {-4}, int64[1] newest = {-1}, int64[1] zero = {0}, int64[1] one = {1},
 int64[1] end = {9223372036854775807}, int64[1] axis = {2}> {
  whole = Concat<axis = -1>(past, x)
  present = Slice(whole, oldest, end, axis)
  all = Conv<group = 6>(whole, weight, bias)
  last = Slice(all, newest, end, axis)
  gate = Sigmoid(last)
  y = Mul(last, gate)
}"""
_SHORT = """<ir_version: 9, opset_import: ["" : 18]>
step (float[b, 6, 4] past, float[b, 6, 1] x, float[6, 1, 3] weight) => (float[b, 6, 1] y, float[b, 6, 4] present)
<int64[1] oldest = {1}, int64[1] end = {9223372036854775807}, int64[1] axis = {2}> {
  whole = Concat<axis = -1>(past, x)
  present = Slice(whole, oldest, end, axis)
  y = Conv<group = 6, dilations = [2]>(whole, weight)
}"""


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def ran(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> list[Any]:
    """What ONNX Runtime computes, with optimisations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, given)


def _operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.newest
def test_tokens_one_by_one_are_those_of_torch() -> None:
    model = optimize(onnx.parser.parse_model(_STEP)).model
    assert _operators(model)[-1] == "CausalConvWithState"
    weight, bias, state, tokens = _numbers(6, 1, 4), _numbers(6), _numbers(2, 6, 4), _numbers(2, 6, 9)
    whole = torch.cat([torch.from_numpy(state), torch.from_numpy(tokens)], -1)
    wanted = torch.nn.functional.conv1d(whole, torch.from_numpy(weight), torch.from_numpy(bias), groups=6)
    wanted = torch.nn.functional.silu(wanted)[..., -9:].numpy()
    for now in range(9):
        given = {"past": state, "x": tokens[..., now : now + 1], "weight": weight, "bias": bias}
        found, state = ran(model, given)
        np.testing.assert_allclose(found[..., 0], wanted[..., now], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(state, whole[..., -4:].numpy())


@pytest.mark.newest
def test_a_state_that_is_as_long_as_the_kernel_reaches() -> None:
    model = onnx.parser.parse_model(_SHORT)
    fused = optimize(model).model
    assert _operators(fused) == ["CausalConvWithState"]
    given = {"past": _numbers(3, 6, 4), "x": _numbers(3, 6, 1), "weight": _numbers(6, 1, 3)}
    for one, other in zip(ran(model, given), ran(fused, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.newest
@pytest.mark.parametrize("text", [_STEP, _SHORT], ids=["longer", "short"])
def test_a_certificate_proves_output_and_state(text: str) -> None:
    pytest.importorskip("z3")
    model = onnx.parser.parse_model(text)
    found = certify(io.from_any(model)[0], io.from_any(optimize(model).model)[0])
    assert found.is_complete
    assert len(found.claims) > 0


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("[b, 6, 1]", "[b, 6, t]", "mixer-convolution"),  # Conv is faster for several tokens
        ("Slice(all, newest, end, axis)", "Slice(all, zero, one, axis)", "mixer-unequal"),  # the token before
        ("oldest = {-4}", "oldest = {0}", ""),  # the state is no state any more
        ("Conv<group = 6>(whole, weight, bias)", "Conv<group = 6, strides = [2]>(whole, weight, bias)", "mixer-unequal"),
        ("Conv<group = 6>(whole, weight, bias)", "Conv<group = 6, pads = [0, 1]>(whole, weight, bias)", "mixer-unequal"),
        ("float[", "double[", "no-kernel-for-type"),
    ],
)
def test_what_is_left(old: str, new: str, code: str) -> None:
    assert old in _STEP
    model = onnx.parser.parse_model(_STEP.replace(old, new))
    result = optimize(model, Options(verify="none", onnxruntime="1.32"))
    assert "CausalConvWithState" not in _operators(result.model) or not code
    assert [reason.code for item in result.report.mixers for reason in item.reasons] == ([code] if code else [])


def test_an_older_onnxruntime_keeps_the_convolution() -> None:
    result = optimize(onnx.parser.parse_model(_STEP), Options(onnxruntime="1.28"))
    assert [reason.code for item in result.report.mixers for reason in item.reasons] == ["no-kernel-for-device"]


def test_the_last_line_counts_what_is_fused() -> None:
    result = optimize(onnx.parser.parse_model(_STEP), Options(verify="none", onnxruntime="1.32"))
    assert [(item.operator, item.reasons) for item in result.report.mixers] == [("CausalConvWithState", ())]
    assert repr(result) == "<Result: found no attention; fused 1 of 1 other sequence mixer>"
