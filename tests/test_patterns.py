"""Patterns by the public door: a reader registered for a new operator, and clashes of two readers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import Facts, OptionError, score_step, steps, weight_step
from onnx_attnfuse.match import registry
from tests.small import parsed

DOMAIN = "com.example"
STABILISED = """<ir_version: 9, opset_import: ["" : 18, "com.example" : 1]>
attention (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v) => (float[b, 2, s, 4] out)
<float[b, 2, s, t] halved, float[b, 2, s, t] checked>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    halved = com.example.Halve(scores)
    weights = Softmax<axis = -1>(halved)
    checked = com.example.Check(weights)
    out = MatMul(checked, v)
}"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    registry.load_packs()
    monkeypatch.setattr(registry, "_score_readers", dict(registry._score_readers))
    monkeypatch.setattr(registry, "_weight_readers", dict(registry._weight_readers))


def halve(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores / 2`, by an operator of our own."""
    scores = node.inputs[0]
    assert scores is not None
    half = ir.Value(name="half", const_value=ir.tensor(0.5), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    return (steps.Scaled(scores, half),)


def check(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """The weights, unchanged."""
    return steps.Kept(node.outputs[0])


def optimized() -> tuple[onnx.ModelProto, onnx_attnfuse.SiteReport]:
    result = onnx_attnfuse.optimize(parsed(STABILISED), verify="none")
    (site,) = result.report.sites
    return result.model, site


def test_operators_that_nobody_reads_stop_the_walk() -> None:
    _, site = optimized()
    assert site.status == "not-attention"
    weight_step("Check", domain=DOMAIN)(check)
    _, site = optimized()
    assert site.status == "skipped"
    assert [reason.code for reason in site.reasons] == ["unreadable-score-step"]
    assert "Halve" in site.reasons[0].message


def test_a_registered_reader_makes_its_operator_readable() -> None:
    score_step("Halve", domain=DOMAIN)(halve)
    weight_step("Check", domain=DOMAIN)(check)
    model, site = optimized()
    assert (site.status, site.op, site.num_heads, site.scale) == ("fused", "MultiHeadAttention", 2, 0.5)
    left = {node.op_type for node in model.graph.node}
    assert left.isdisjoint({"Halve", "Check", "Softmax", "MatMul"})


def test_a_reader_for_one_domain_does_not_read_another() -> None:
    score_step("Halve")(halve)
    weight_step("Check", domain=DOMAIN)(check)
    assert optimized()[1].status == "skipped"


def test_two_readers_of_one_operator_are_an_error_that_names_both() -> None:
    score_step("Halve", domain=DOMAIN)(halve)
    with pytest.raises(OptionError) as error:
        score_step("Other", "Halve", domain=DOMAIN)(lambda node, facts: ())
    message = str(error.value)
    assert f"{DOMAIN}::Halve" in message
    assert message.count("test_patterns.") == 2
    assert "halve" in message
    assert "<lambda>" in message


def test_built_in_readers_are_in_the_way_like_any_other() -> None:
    with pytest.raises(OptionError, match=r"onnx_attnfuse_patterns\.scaling\.multiply"):
        score_step("Mul")(halve)
    with pytest.raises(OptionError, match="onnx_attnfuse_patterns"):
        weight_step("Where")(check)


def test_the_built_in_pack_comes_by_entry_point() -> None:
    assert "builtin" in registry.load_packs()


def test_a_reader_that_fails_costs_its_own_site_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
        raise ZeroDivisionError("on purpose")

    score_step("Halve", domain=DOMAIN)(fail)
    weight_step("Check", domain=DOMAIN)(check)
    _, site = optimized()
    assert site.status == "skipped"
    assert [reason.code for reason in site.reasons] == ["defect"]
    assert "on purpose" in site.reasons[0].message
    assert "attnfuse failed at" in caplog.text
