"""Scores and weights that are rounded between the products to a type that holds less: left as they are."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_attnfuse
from tests.support.bundled import Array, run
from tests.support.small_models import parsed

TEXT = """<ir_version: 9, opset_import: ["" : 18]>
attention (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v) => (float[b, 2, s, 8] out)
<float scale = {0.25}>
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    product = MatMul(q, kt)
    a = Cast<to = 1>(product)
    scaled = Mul(a, scale)
    c = Cast<to = 1>(scaled)
    weights = Softmax<axis = -1>(c)
    d = Cast<to = 1>(weights)
    out = MatMul(d, v)
}"""
HALF = TEXT.replace("(float[", "(float16[").replace(", float[", ", float16[").replace("d = Cast<to = 1>", "d = Cast<to = 10>")
PLACES = {"the product": "(product)", "scores": "(scaled)", "weights": "(weights)"}


def narrowed(place: str, kind: int) -> str:
    """The attention with a rounding to a type and back in one place."""
    old = f"Cast<to = 1>{PLACES[place]}"
    name = f"x{PLACES[place]}".translate({ord("("): None, ord(")"): None})
    lines = TEXT.split("\n")
    at = next(index for index, line in enumerate(lines) if old in line)
    lines.insert(at, f"    {name} = Cast<to = {kind}>{PLACES[place]}")
    lines[at + 1] = lines[at + 1].replace(PLACES[place], f"({name})")
    return "\n".join(lines)


@pytest.mark.parametrize("ep", ["cpu", "cuda", "openvino", "qnn", "tensorrt"])
@pytest.mark.parametrize("kind", [10, 16])
@pytest.mark.parametrize("place", PLACES)
def test_such_a_rounding_is_kept_by_every_form(place: str, kind: int, ep: str) -> None:
    source = parsed(narrowed(place, kind))
    found = onnx_attnfuse.optimize(source, ep=ep, verify="none")
    code = "narrowed-weights" if place == "weights" else "narrowed-scores"
    assert [site.reasons[0].code for site in found.report.sites] == [code]
    assert [node.op_type for node in found.model.graph.node].count("Softmax") == 1
    if kind == 10:
        feeds: dict[str, Array] = {
            name: 6 * np.random.default_rng(index).normal(size=(2, 2, 5, 8)).astype(np.float32)
            for index, name in enumerate("qkv")
        }
        expected = run(source, feeds)["out"]
        np.testing.assert_array_equal(run(found.model, feeds)["out"], expected)
        assert np.abs(run(parsed(TEXT), feeds)["out"] - expected).max() > 1e-3, "the rounding tells"


@pytest.mark.parametrize(
    "text", [TEXT, TEXT.replace("Cast<to = 1>(scaled)", "Identity(scaled)"), HALF], ids=["float", "none", "half"]
)
def test_casts_that_round_nothing_or_to_the_type_of_the_operands_are_no_hindrance(text: str) -> None:
    assert [site.status for site in onnx_attnfuse.optimize(parsed(text), ep="cpu").report.sites] == ["fused"]
