"""Readers of single steps by the public door: a new operator read, near misses that are not, and clashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse import Facts, OptionError, score_step, steps, weight_step
from onnx_attnfuse.language.registry import discovery
from tests.support.small_models import parsed

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


@score_step("Halve", domain=DOMAIN)
def halve(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`scores / 2`, by an operator of our own."""
    scores = node.inputs[0]
    assert scores is not None
    half = ir.Value(name="half", const_value=ir.tensor(0.5), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
    return (steps.Scaled(scores, half),)


@weight_step("Check", domain=DOMAIN)
def check(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """The weights, unchanged."""
    return steps.Kept(node.outputs[0])


def optimized(*patterns: Any, **choices: Any) -> tuple[onnx.ModelProto, onnx_attnfuse.SiteReport]:
    result = onnx_attnfuse.optimize(parsed(STABILISED), verify="none", patterns=patterns, **choices)
    (site,) = result.report.sites
    return result.model, site


def test_operators_that_nobody_reads_stop_the_walk() -> None:
    _, site = optimized()
    assert site.status == "not-attention"
    _, site = optimized(check)
    assert site.status == "skipped"
    assert [reason.code for reason in site.reasons] == ["unreadable-score-step"]
    assert "Halve" in site.reasons[0].message


def test_a_reader_makes_its_operator_readable() -> None:
    model, site = optimized(halve, check)
    assert (site.status, site.op, site.num_heads, site.scale) == ("fused", "MultiHeadAttention", 2, 0.5)
    left = {node.op_type for node in model.graph.node}
    assert left.isdisjoint({"Halve", "Check", "Softmax", "MatMul"})


def test_a_reader_for_one_domain_does_not_read_another() -> None:
    assert optimized(score_step("Halve")(halve.read), check)[1].status == "skipped"


def test_a_skipped_reader_reads_nothing() -> None:
    assert optimized(halve, check, skip_patterns=("test_step_readers.halve",))[1].status == "skipped"
    assert optimized(halve, check, skip_patterns=("test_step_readers",))[1].status == "not-attention"


def test_a_name_that_is_skipped_in_vain_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(OptionError, match=r"no pattern is called 'scaling\.multpily'; did you mean scaling\.multiply\?"):
        optimized(skip_patterns=("scaling.multpily",))


def test_two_readers_of_one_operator_are_an_error_that_names_both() -> None:
    def other(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
        return ()

    with pytest.raises(OptionError, match=rf"{DOMAIN}::Halve.*test_step_readers\.halve.*other"):
        optimized(halve, score_step("Other", "Halve", domain=DOMAIN)(other))


def test_built_in_readers_are_in_the_way_like_any_other() -> None:
    with pytest.raises(OptionError, match=r"onnx_attnfuse_patterns\.scaling\.multiply"):
        optimized(score_step("Mul")(halve.read))
    with pytest.raises(OptionError, match="onnx_attnfuse_patterns"):
        optimized(weight_step("Where")(check.read))


def test_two_patterns_of_one_name_are_an_error_that_names_both_owners() -> None:
    with pytest.raises(OptionError, match=r"two patterns are called 'test_step_readers\.halve': in given and in given"):
        optimized(halve, score_step("Third", domain=DOMAIN)(halve.read))


def test_what_is_registered_serves_every_run_until_it_is_forgotten() -> None:
    onnx_attnfuse.register(halve, check)
    try:
        assert optimized()[1].status == "fused"
    finally:
        discovery.forget()
    assert optimized()[1].status == "not-attention"


def test_what_is_no_pattern_cannot_be_registered() -> None:
    with pytest.raises(OptionError, match="registered: 3 holds no pattern; decorate a function"):
        onnx_attnfuse.register(3)


def test_the_built_in_pack_comes_first() -> None:
    assert discovery.load(onnx_attnfuse.Options()).entries[0].owner == "pack builtin"


def test_a_reader_that_fails_costs_its_own_site_only() -> None:
    def fail(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
        raise ZeroDivisionError("on purpose")

    _, site = optimized(score_step("Halve", domain=DOMAIN)(fail), check)
    assert site.status == "skipped"
    assert [reason.code for reason in site.reasons] == ["pattern-failed"]
    assert "on purpose" in site.reasons[0].message
