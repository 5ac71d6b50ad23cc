"""Operators of other domains by their definitions: read where that helps, put back where not, held against their reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import onnx_attnfuse
from onnx_attnfuse.language import Tensor, columns, operator, rearrange, rows, softmax, where
from onnx_attnfuse.testing import as_model, assert_fuses

HEAD = '<ir_version: 10, opset_import: ["" : 18, "acme" : 1]>\n'
OPERANDS = "float[b, s, 16] q, float[b, t, 16] k, float[b, t, 16] v"


def split_in_numpy(x: Any, *, heads: int) -> Any:
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


@operator("acme::SplitHeads", reference=split_in_numpy)
def split_heads(x: Tensor, *, heads: int) -> Tensor:
    """(b, s, n·h) to (b, n, s, h)."""
    return rearrange(x, "b s (n h) -> b n s h", n=heads)


def causal_in_numpy(scores: Any) -> Any:
    kept = np.arange(scores.shape[-1]) <= np.arange(scores.shape[-2])[:, None]
    return np.where(kept, np.float32(0), np.float32(-1e9))


@operator("acme::CausalMask", reference=causal_in_numpy)
def causal_mask(scores: Tensor) -> Tensor:
    """0 where a row may look, else -1e9."""
    return where(columns(scores) <= rows(scores), 0.0, -1e9)


SPLIT = (
    HEAD
    + f"""g ({OPERANDS}) => (float[b, 2, s, 8] out)
{{
    q4 = acme.SplitHeads<heads = 2>(q)
    k4 = acme.SplitHeads<heads = 2>(k)
    v4 = acme.SplitHeads<heads = 2>(v)
    kt = Transpose<perm = [0, 1, 3, 2]>(k4)
    scores = MatMul(q4, kt)
    w = Softmax<axis = -1>(scores)
    out = MatMul(w, v4)
}}"""
)
MASKED = (
    HEAD
    + """g (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v) => (float[b, 2, s, 8] out)
{
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    mask = acme.CausalMask(scores)
    masked = Add(scores, mask)
    w = Softmax<axis = -1>(masked)
    out = MatMul(w, v)
}"""
)


def domains(result: onnx_attnfuse.Result) -> set[str]:
    return {node.domain for node in result.model.graph}


def test_a_view_is_read_and_gone() -> None:
    result = assert_fuses(SPLIT, split_heads, into="MultiHeadAttention")
    assert "acme" not in domains(result)
    assert {node.op_type for node in result.model.graph} == {"MultiHeadAttention", "Reshape", "Transpose"}


def test_without_its_definition_nothing_is_known_behind_it() -> None:
    report = onnx_attnfuse.explain(as_model(SPLIT))
    assert (report.fused, [reason.code for reason in report.sites[0].reasons]) == (0, ["unknown-rank"])


def test_a_mask_is_understood() -> None:
    (site,) = assert_fuses(MASKED, causal_mask).report.sites
    assert (site.mask, site.mask_form) == ("causal", "unidirectional")


def test_what_is_used_elsewhere_too_stays_there() -> None:
    text = SPLIT.replace("[b, 2, s, 8] out)", "[b, 2, s, 8] out, float[b, 2, t, 8] shown)")
    result = assert_fuses(text.replace("MatMul(w, v4)", "MatMul(w, v4)\n    shown = Neg(v4)"), split_heads)
    assert [node.op_type for node in result.model.graph if node.domain == "acme"] == ["SplitHeads"]


def test_what_has_nothing_to_do_with_attention_stays_as_it_is() -> None:
    text = HEAD + "g (float[b, s, 16] q) => (float[b, 2, s, 8] out) {\n x = acme.SplitHeads<heads = 2>(q)\n out = Relu(x)\n}"
    result = onnx_attnfuse.optimize(as_model(text), patterns=(split_heads,))
    assert [node.op_type for node in result.model.graph] == ["SplitHeads", "Relu"]
    assert [value.name for value in result.model.graph.outputs] == ["out"]
    assert result.report.notes == ()


def test_a_definition_that_is_wrong_is_not_used() -> None:
    wrong = dataclasses.replace(causal_mask, reference=lambda scores: causal_in_numpy(scores).T)
    result = onnx_attnfuse.optimize(as_model(MASKED), patterns=(wrong,), evidence=None)
    assert "acme" in domains(result)
    reasons = [reason for site in result.report.sites for reason in site.reasons]
    assert "differs" in [reason.code for reason in reasons]
    assert "pattern 'acme::CausalMask'" in str(reasons)


def fails(scores: Tensor) -> Tensor:
    raise ZeroDivisionError("on purpose")


PLAIN = "acme.CausalMask(scores)"
BAD: dict[str, tuple[Any, str, str]] = {
    "it fails": (fails, PLAIN, ", line 111: ZeroDivisionError: on purpose"),
    "no formula": (lambda scores: 3, PLAIN, "its definition returned 3, which is not a formula"),
    "other attributes": (lambda x: x, "acme.CausalMask<window = 3>(scores)", "its definition has no attribute 'window'"),
    "an attribute missing": (split_heads.define, PLAIN, "it has no attribute 'heads'"),
    "other inputs": (lambda scores: scores, "acme.CausalMask(scores, q)", "its definition has 1 inputs, the node 2"),
    "no rearrangement": (lambda x: rearrange(x, "b n s t -> b n"), PLAIN, "is no rearrangement; write each axis"),
    "too few axes": (lambda x: rearrange(x, "a b -> b a"), PLAIN, "is not known to have the 2 axes of 'a b -> b a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_node_that_a_definition_does_not_fit_says_why(name: str) -> None:
    define, call, message = BAD[name]
    made = operator("acme::CausalMask")(define)
    report = onnx_attnfuse.explain(as_model(MASKED.replace("acme.CausalMask(scores)", call)), patterns=(made,))
    assert message in str([site.reasons for site in report.sites])


def test_optional_inputs_are_left_out_or_given() -> None:
    @operator("acme::Attn")
    def attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return softmax(q @ k.T if mask is None else q @ k.T + mask) @ v

    operands = "float[b, 2, s, 8] q, float[b, 2, t, 8] k, float[b, 2, t, 8] v, float[b, 1, 1, t] m"
    text = HEAD + f"g ({operands}) => (float[b, 2, s, 8] out) {{\n out = acme.Attn(q, k, v%s)\n}}"
    for given, mask in (("", "no_mask"), (", m", "computed_bias")):
        report = onnx_attnfuse.explain(as_model(text % given), patterns=(attn,))
        assert [(site.status, site.mask) for site in report.sites] == [("fused", mask)]
        assert report.notes == ("1 acme::Attn taken by their definition, which was compared with no reference",)


def test_definitions_stand_on_each_other() -> None:
    """What one gives has a shape only once it is defined, which the next one needs."""

    @operator("acme::MergeHeads", reference=lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1))
    def merge_heads(x: Tensor) -> Tensor:
        return rearrange(x, "b n s h -> b s (n h)")

    text = SPLIT.replace("[b, 2, s, 8] out)", "[b, s, 16] out)")
    text = text.replace("out = MatMul(w, v4)", "o4 = MatMul(w, v4)\n    out = acme.MergeHeads(o4)")
    result = assert_fuses(text, split_heads, merge_heads)
    assert [node.op_type for node in result.model.graph] == ["MultiHeadAttention"]
