"""Operators without a kernel on the CPU are judged by their references, in every element type."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.verify.equivalence import EquivalenceChecker
from onnx_attnfuse.verify.references import OPERATORS
from onnx_attnfuse.verify.runtime import PieceSession, Reference, load, without_kernel
from onnx_attnfuse.verify.verdict import LOOSE, compare
from tests.support.kernel_cases import DTYPES, by_reference, feeds_of, model_of
from tests.support.pairs import LOWEST, PADDED, PLAIN, PLAIN_FUSED, graph, judged
from tests.support.reference_cases import cases

INPUTS = "{type}[b, s, 32] q, {type}[b, s, 32] k, {type}[b, s, 32] v, int64[b, s] mask"
ZEROED = (
    PADDED.replace("old = Reshape(back, flat)", "all = Reshape(back, flat)")
    + """
    last = Constant<value_ints = [2]>()
    column = Unsqueeze(kept, last)
    old = Where(column, all, open)
"""
)
COUNTED = """
    number = Cast<to = 6>(kept)
    counts = ReduceSum<keepdims = 0>(number, one)
    widths = Shape<start = 1, end = 2>(k)
    width = Squeeze(widths)
    step = Constant<value_int = 1>()
    places = Range(none, width, step)
    wide = Cast<to = 7>(counts)
    counted = Unsqueeze(wide, one)
    inside = Less(places, counted)
    same = Equal(inside, kept)
    same32 = Cast<to = 6>(same)
    least = ReduceMin<keepdims = 0>(same32)
    right = Cast<to = 9>(least)
"""
PACKED = (
    COUNTED
    + """
    pq, offsets, , longest = com.microsoft.RemovePadding(q, counts)
    pk, , starts, = com.microsoft.RemovePadding(k, counts)
    pv = com.microsoft.RemovePadding(v, counts)
    attended = com.microsoft.PackedMultiHeadAttention<num_heads = 4, scale = 0.25>(pq, pk, pv, , offsets, starts)
    new = com.microsoft.RestorePadding(attended, offsets)
"""
)
MISTAKES = [("scale = 0.25>(pq", "scale = 0.3>(pq"), ("(pq, pk, pv", "(pq, pv, pk"), ("(k, counts)", "(v, counts)")]
NAMES = "PackedMultiHeadAttention, RemovePadding, RestorePadding"


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_packed_attention_is_padded_attention_where_padding_is_right(dtype: str, rounds: bool) -> None:
    closed = LOWEST if dtype == "float" else "-60000"
    model = graph(ZEROED + PACKED, inputs=INPUTS, dtype=dtype, closed=closed)
    verdict = judged(model, checker=EquivalenceChecker(rounds_float16=rounds), given="right")
    assert verdict.equal, verdict.detail
    assert verdict.cases > 2
    assert f"by NumPy references, as ONNX Runtime has no kernel on the CPU for {NAMES}" in verdict.detail


@pytest.mark.sampled
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize(("one", "other"), MISTAKES)
def test_what_is_wrong_is_caught(one: str, other: str, dtype: str, rounds: bool) -> None:
    assert one in PACKED
    model = graph(ZEROED + PACKED.replace(one, other), inputs=INPUTS, dtype=dtype, closed="-60000")
    verdict = judged(model, checker=EquivalenceChecker(rounds_float16=rounds), given="right")
    assert not verdict.equal
    assert verdict.undecided is None, verdict.detail
    assert "by NumPy references" in verdict.detail


def test_padding_that_is_not_zero_is_caught() -> None:
    verdict = judged(graph(PADDED + PACKED, inputs=INPUTS, closed=LOWEST), given="right")
    assert not verdict.equal
    assert "right padding" in verdict.detail


def test_padding_on_another_side_is_caught() -> None:
    verdict = judged(graph(ZEROED + PACKED, inputs=INPUTS, closed=LOWEST))
    assert not verdict.equal


def test_an_original_that_the_references_do_not_know_is_run_by_the_runtime() -> None:
    spelled = ZEROED.replace("qk = MatMul(", "qk = com.microsoft.TransposeMatMul(")
    verdict = judged(graph(spelled + PACKED, inputs=INPUTS, closed=LOWEST), given="right")
    assert verdict.equal, verdict.detail


def test_pieces_with_all_kernels_stay_with_the_runtime() -> None:
    for case in cases():
        lacking = without_kernel(model_of(case, case.inputs()))
        assert lacking == ([case.op] if "cpu" not in case.providers and case.op != "MultiHeadAttention" else [])
    assert isinstance(load(ir.to_proto(graph(PLAIN + PLAIN_FUSED))), PieceSession)


def test_what_has_no_name_is_not_taken_for_what_is_absent() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
    g (float[b, s, 8] x, int32[b] counts) => (float[t, 8] y) {
        tokens, offsets, starts = com.microsoft.RemovePadding(x, counts)
        y = com.microsoft.PackedMultiHeadAttention<num_heads = 2>(tokens, tokens, tokens, , offsets, starts)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.node[0].output.append("")
    feeds = {"x": np.ones((2, 3, 8), np.float32), "counts": np.asarray([3, 1], np.int32)}
    np.testing.assert_allclose(Reference(model).run(None, feeds)[0], 1, atol=1e-6)


_ROUNDS_BEFORE = {"BiasSplitGelu"}
"""Takes no bfloat16, and rounds the sum with its bias first."""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "operator",
    [operator for operator in OPERATORS if operator.__name__ not in _ROUNDS_BEFORE],
    ids=lambda operator: f"{operator.op_domain}.{operator.__name__}",
)
def test_every_operator_computes_half_precision_in_float32(operator: type) -> None:
    named = (operator.op_domain, operator.__name__)
    for case in [case for case in cases() if (case.domain, case.op) == named][::3]:
        inputs = case.inputs(DTYPES["bfloat16"])
        wide = [array if array is None or array.dtype.kind in "bi" else array.astype(np.float32) for array in inputs]
        expected = Reference(model_of(case, wide)).run(None, feeds_of(wide))
        for one, other in zip(expected, by_reference(case, "bfloat16"), strict=True):
            result = compare(one, other, LOOSE)
            assert result.equal, f"{case.name}: {result.detail}"
