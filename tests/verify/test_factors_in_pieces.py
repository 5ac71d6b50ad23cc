"""Inputs that results are multiplied by: of any sign, but not of a size that overflows whatever the order of the products."""

from __future__ import annotations

import pytest

from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.testing import assert_fuses, assert_refuses
from onnx_attnfuse.verify.subgraph import extract, with_factors
from tests.support.pairs import PLAIN, SEPARATE, graph, judged, values

pytest.importorskip("onnxruntime")

GATE = SEPARATE + ", {type}[b, 1, s, 1] gate"
GATED = PLAIN.replace("guarded = Identity(weights)", "guarded = Mul(weights, gate)")
FUSED = """
    fused = com.microsoft.MultiHeadAttention<num_heads = 4, scale = 0.25>(q, k, v)
    flatgate = Squeeze(gate, one)
    {change}
    new = Mul(fused, {by})
"""
ROLLED = """
    two = Constant<value_ints = [2]>()
    first = Constant<value_ints = [0]>()
    last = Constant<value_ints = [1000]>()
    start = Slice(flatgate, one, last, one)
    end = Slice(flatgate, first, one, one)
    rolled = Concat<axis = 1>(start, end)
"""


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_factor_of_the_weights_is_one_of_the_result(dtype: str) -> None:
    verdict = judged(graph(GATED + FUSED.format(change="", by="flatgate"), inputs=GATE, dtype=dtype))
    assert verdict.equal, verdict.detail
    assert verdict.cases >= 8


@pytest.mark.parametrize(
    ("change", "by"),
    [
        pytest.param("", "scale", id="another factor"),
        pytest.param("sized = Abs(flatgate)", "sized", id="the sign lost"),
        pytest.param("kept = Relu(flatgate)", "kept", id="negative ones cut off"),
        pytest.param(ROLLED, "rolled", id="the factor of another row"),
        pytest.param("near = Constant<value_float = 1.01>()\n close = Mul(flatgate, near)", "close", id="off by a hundredth"),
        pytest.param(
            "inverse = Reciprocal(flatgate)\n again = Reciprocal(inverse)\n unsure = Div(flatgate, flatgate)\n"
            " bad = Mul(again, unsure)",
            "bad",
            id="not a number where the factor is zero",
        ),
    ],
)
def test_another_factor_is_caught(change: str, by: str) -> None:
    verdict = judged(graph(GATED + FUSED.format(change=change, by=by), inputs=GATE))
    assert not verdict.equal
    assert verdict.undecided is None, verdict.detail


def roles(nodes: str, inputs: str) -> dict[str, str]:
    """What the inputs of a piece are."""
    model = graph(nodes, inputs=inputs)
    named, facts = values(model), Facts(model.graph)
    piece = with_factors(extract([named["old"], named["new"]], [named[stop] for stop in "qkv"], facts), [named["old"]])
    return {item.value.name or "": item.role for item in piece.inputs}


@pytest.mark.parametrize(
    ("guarded", "masked", "role"),
    [
        ("guarded = Mul(weights, gate)", "masked = Identity(scaled)", "factor"),
        ("turned = Neg(gate)\n guarded = Mul(turned, weights)", "masked = Identity(scaled)", "factor"),
        ("guarded = Identity(weights)", "masked = Add(scaled, gate)", "given"),
        ("guarded = Identity(weights)", "masked = Mul(scaled, gate)", "given"),
        ("guarded = Mul(weights, gate)", "masked = Add(scaled, gate)", "given"),
        ("guarded = Add(weights, gate)", "masked = Identity(scaled)", "factor"),
        ("guarded = Div(weights, gate)", "masked = Identity(scaled)", "given"),
        ("soft = Sigmoid(gate)\n guarded = Mul(weights, soft)", "masked = Identity(scaled)", "given"),
    ],
)
def test_only_what_does_nothing_but_multiply_is_a_factor(guarded: str, masked: str, role: str) -> None:
    nodes = PLAIN.replace("guarded = Identity(weights)", guarded).replace("masked = Identity(scaled)", masked)
    assert roles(nodes + FUSED.format(change="", by="scale"), GATE)["gate"] == role


TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (float[b, n, s, 8] q, float[b, n, 8, t] k, float[b, n, t, 6] v, float[{gate}] gate) => (float[b, n, s, 6] out) {{
    scores = MatMul(q, k)
    w = Softmax<axis = -1>(scores)
    gated = Mul(w, gate)
    out = MatMul(gated, v)
}}"""


@pytest.mark.parametrize("gate", ["b, n, s, 1", "b, 1, s, 1", "s, 1"])
def test_attention_with_a_gate_is_fused_and_the_whole_model_is_the_same(gate: str) -> None:
    assert_fuses(TEXT.format(gate=gate), sites=1, verify="model")


def test_a_gate_that_differs_by_key_is_none_of_the_result() -> None:
    assert_refuses(TEXT.format(gate="b, 1, 1, t"), code="weights-scaled-by-key")
