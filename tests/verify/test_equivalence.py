"""The judge passes what is equal, and catches every way of being slightly wrong that a rewrite could think of."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.verify.equivalence import EquivalenceChecker
from onnx_attnfuse.verify.inputs import Slot, case_groups, feeds
from tests.support.pairs import (
    GUARDED,
    GUARDED_FUSED,
    MASKED,
    PADDED,
    PADDED_FUSED,
    PLAIN,
    PLAIN_FUSED,
    SEPARATE,
    UNFUSED,
    graph,
    judged,
)

pytest.importorskip("onnxruntime")

SQUARE = "{type}[b, s, 32] q, {type}[b, s, 32] k, {type}[b, s, 32] v"
CAUSAL = """
    length = Shape<start = 1, end = 2>(q)
    size = Squeeze(length)
    both = Concat<axis = 0>(length, length)
    ones = ConstantOfShape<value = int64[1] {1}>(both)
    lower = Trilu<upper = 0>(ones)
    allowed = Greater(lower, none)
    bias = Where(allowed, open, closed)
""" + PADDED.split("bias = Where(row, open, closed)")[1]
CAUSAL_FUSED = PLAIN_FUSED.replace("scale = 0.25", "scale = 0.25, unidirectional = 1")
SHIFTED = """
    start = Slice(mask, one, many, one)
    first = Gather<axis = 1>(mask, zeroth)
    rolled = Concat<axis = 1>(start, first)
    kept2 = Greater(rolled, none)
    row2 = Unsqueeze(kept2, axes)
    bias2 = Where(row2, open, closed)
    many = Constant<value_ints = [1000]>()
    zeroth = Constant<value_ints = [0]>()
"""
SWAPPED = """
    order = Constant<value_ints = [1, 0, 2, 3]>()
    heads = Gather<axis = 1>(vh, order)
    heads2 = Transpose<perm = [0, 2, 1, 3]>(heads)
    v2 = Reshape(heads2, flat)
"""


@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_plain_attention_and_its_fused_form_are_equal(dtype: str) -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED, dtype=dtype))
    assert verdict.equal, verdict.detail
    assert verdict.cases >= 3
    assert verdict.evidence is None
    assert ("bfloat16 verified as float32" in verdict.detail) == (dtype == "bfloat16")


@pytest.mark.parametrize("closed", ["-3.4028234663852886e38", "inf"])
def test_padded_attention_and_its_fused_form_are_equal(closed: str) -> None:
    verdict = judged(graph(PADDED + PADDED_FUSED, inputs=MASKED, closed=closed))
    assert verdict.equal, verdict.detail
    assert verdict.cases >= 8


def test_guarded_attention_and_its_fused_form_are_equal() -> None:
    verdict = judged(graph(GUARDED + GUARDED_FUSED, inputs=MASKED, closed="inf"))
    assert verdict.equal, verdict.detail


def test_causal_attention_and_its_fused_form_are_equal() -> None:
    verdict = judged(graph(CAUSAL + CAUSAL_FUSED, inputs=SQUARE))
    assert verdict.equal, verdict.detail


@pytest.mark.parametrize(
    ("old", "wrong", "inputs"),
    [
        pytest.param(PLAIN, PLAIN_FUSED.replace("0.25", "0.2525"), None, id="scale off by one per cent"),
        pytest.param(PLAIN, PLAIN_FUSED.replace("(q, k, v)", "(q, k, k)"), None, id="keys for values"),
        pytest.param(PLAIN, PLAIN_FUSED.replace("heads = 4", "heads = 2"), None, id="other number of heads"),
        pytest.param(PLAIN, SWAPPED + PLAIN_FUSED.replace("(q, k, v)", "(q, k, v2)"), None, id="heads swapped"),
        pytest.param(PLAIN, CAUSAL_FUSED, SQUARE, id="causal added"),
        pytest.param(CAUSAL, PLAIN_FUSED, SQUARE, id="causal dropped"),
        pytest.param(PADDED, PLAIN_FUSED, MASKED, id="mask dropped"),
        pytest.param(PADDED, SHIFTED + PADDED_FUSED.replace("Expand(bias,", "Expand(bias2,"), MASKED, id="mask shifted"),
        pytest.param(GUARDED, PADDED_FUSED, MASKED, id="guard against NaN dropped"),
    ],
)
def test_what_is_slightly_wrong_is_caught(old: str, wrong: str, inputs: str | None) -> None:
    closed = "inf" if old is GUARDED else "-3.4028234663852886e38"
    verdict = judged(graph(old + wrong, closed=closed, inputs=SEPARATE if inputs is None else inputs))
    assert not verdict.equal
    assert verdict.undecided is None, verdict.detail
    assert "; case: " in verdict.detail
    assert "; sizes: q " in verdict.detail
    assert verdict.evidence is not None
    assert set(verdict.evidence.inputs) >= {"q", "k", "v"}


def test_a_row_that_is_masked_to_uniform_is_told_from_one_that_is_not_masked() -> None:
    weak = PADDED_FUSED.replace("full = Expand(bias, whole)", "soft = Clip(bias, floor)\n    full = Expand(soft, whole)")
    floor = "    floor = Constant<value_float = -10000.0>()\n"
    verdict = judged(graph(floor + PADDED + weak, inputs=MASKED))
    assert not verdict.equal
    assert "a fully masked row" in verdict.detail


def test_float16_is_also_judged_in_float32() -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED.replace("0.25", "0.2501"), dtype="float16"))
    assert not verdict.equal
    assert "not in float32" in verdict.detail


def test_an_operator_that_does_not_load_is_a_difference_with_its_message() -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED.replace("num_heads = 4, ", "")))
    assert not verdict.equal
    assert verdict.undecided is None
    assert "num_heads" in verdict.detail


def test_an_operator_that_does_not_run_is_a_difference_with_its_message() -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED.replace("heads = 4", "heads = 5")))
    assert not verdict.equal
    assert verdict.undecided is None
    assert "the new nodes do not run" in verdict.detail


def test_inputs_on_which_arithmetic_of_sizes_does_not_run_show_no_difference() -> None:
    """As where a function is given a number that is an index; what takes operands and does not run is a difference."""
    inputs = "float[x, y, 32] q, float[x, z, 32] k, float[x, z, 32] v, int64 place"
    index = "shape = Shape(q) counted = Gather(shape, place) size = Cast<to = 1>(counted) none32 = Sub(size, size)"
    fused = PLAIN_FUSED.replace("new =", "attended =") + f"{index} new = Add(attended, none32)"
    verdict = judged(graph(PLAIN + fused, inputs=inputs))
    assert verdict.undecided is not None
    assert "indices element out of data bounds" in verdict.undecided


def test_a_result_of_another_shape_is_a_difference() -> None:
    wrong = PLAIN_FUSED.replace("new =", "fused =") + "\n    new = Transpose<perm = [1, 0, 2]>(fused)"
    verdict = judged(graph(PLAIN + wrong))
    assert not verdict.equal
    assert "float32 [2, 5, 32] became float32 [5, 2, 32]" in verdict.detail


def test_equal_pieces_are_judged_once() -> None:
    checker = EquivalenceChecker()
    first = judged(graph(PADDED + PADDED_FUSED, inputs=MASKED), checker=checker)
    renamed = (PADDED + PADDED_FUSED).replace("bias", "other").replace("full", "complete")
    assert judged(graph(renamed, inputs=MASKED), checker=checker) is first
    assert judged(graph(PADDED + PADDED_FUSED, inputs=MASKED, closed="inf"), checker=checker) is not first


def test_the_verdict_is_the_same_every_time() -> None:
    model = graph(PLAIN + PLAIN_FUSED.replace("0.25", "0.2525"))
    assert judged(model).detail == judged(model).detail


ATTENTION = """
    kept = Greater(mask, none)
    row = Unsqueeze(kept, axes)
    old = Attention<q_num_heads = 4, kv_num_heads = 4, scale = 0.25>(q, k, v, row)
    bias = Where(row, open, closed)
"""


@pytest.mark.parametrize(("scale", "equal"), [("0.25", True), ("0.2525", False)])
def test_what_the_runtime_refuses_is_run_by_the_reference(scale: str, equal: bool) -> None:
    nodes = ATTENTION + GUARDED_FUSED.replace("0.25", scale)
    verdict = judged(graph(nodes, inputs=MASKED, closed="inf", opset=23))
    assert verdict.undecided is None
    assert verdict.equal == equal, verdict.detail
    assert ("by ONNX's reference" in verdict.detail) == equal


def test_what_does_not_run_is_undecided_with_the_reason() -> None:
    broken = PLAIN.replace("old = Reshape(back, flat)", "first = Reshape(back, flat)\n    old = Reshape(first, wrong)")
    constant = "    wrong = Constant<value_ints = [7, 11]>()\n"
    verdict = judged(graph(constant + broken + PLAIN_FUSED))
    assert not verdict.equal
    assert verdict.undecided is not None
    assert "Reshape" in verdict.undecided


LENGTHS = """
    number = Cast<to = 6>(kept)
    counts = ReduceSum<keepdims = 0>(number, one)
    new = com.microsoft.MultiHeadAttention<num_heads = 4, scale = 0.25>(q, k, v, , counts)
    widths = Shape<start = 1, end = 2>(k)
    width = Squeeze(widths)
    step = Constant<value_int = 1>()
    places = Range(none, width, step)
    wide = Cast<to = 7>(counts)
    column = Unsqueeze(wide, one)
    inside = Less(places, column)
    same = Equal(inside, kept)
    same32 = Cast<to = 6>(same)
    least = ReduceMin<keepdims = 0>(same32)
    right = Cast<to = 9>(least)
    always = Equal(none, none)
    never = Not(always)
"""


def test_a_claim_about_some_batches_is_judged_on_those() -> None:
    model = graph(PADDED + LENGTHS, inputs=MASKED, closed="-10000")
    everywhere = judged(model, given="always")
    assert not everywhere.equal
    assert "padding" in everywhere.detail or "holes" in everywhere.detail
    claimed = judged(model, given="right")
    assert claimed.equal, claimed.detail
    assert 0 < claimed.cases < 12


def test_what_is_wrong_where_it_is_claimed_is_caught() -> None:
    wrong = LENGTHS.replace("scale = 0.25", "scale = 0.3")
    assert not judged(graph(PADDED + wrong, inputs=MASKED, closed="-10000"), given="right").equal


def test_a_claim_about_no_batch_shows_nothing() -> None:
    verdict = judged(graph(PADDED + LENGTHS, inputs=MASKED, closed="-10000"), given="never")
    assert not verdict.equal
    assert verdict.undecided is not None


TWO_FLOATS = SEPARATE + ", float[b, 1, s, t] bias, float[b, 1, 1, t] fed"
BIASED = UNFUSED.format(
    mask="first = Add(scaled, bias)\n    {turned}\n    masked = Add(first, low)", guard="guarded = Identity(weights)"
)
SUMMED = """
    length = Shape<start = 1, end = 2>(q)
    both = Add(low, bias)
    whole = Concat<axis = 0>(one, one, length, one)
    full = Expand(both, whole)
    new = com.microsoft.MultiHeadAttention<num_heads = 4, scale = 0.25>(q, k, v, , , full)
"""
COMPUTED = "float1 = Constant<value_float = 1.0>() lost = Sub(float1, fed) low = Mul(lost, closed)"


@pytest.mark.parametrize(("fill", "equal"), [("-3.4028234663852886e38", True), ("-1000000", False)])
def test_a_mask_of_ones_and_a_bias_of_numbers_are_fed_together(fill: str, equal: bool) -> None:
    verdict = judged(graph(BIASED.format(turned=COMPUTED) + SUMMED, inputs=TWO_FLOATS, closed=fill))
    assert verdict.equal is equal, verdict.detail
    assert equal or "float inputs of several kinds" in verdict.detail


def test_each_of_several_masks_that_are_added_has_an_encoding_of_its_own() -> None:
    slots = [Slot(name, "given", ir.DataType.FLOAT, 4, blank=False, addend=name != "truth") for name in ("a", "b", "truth")]
    (first, second) = (case for case in case_groups(slots)[0] if case.encoding == "mixed")
    found = [feeds(slots, [(2, 1, 8, 9)] * 3, case) for case in (first, second)]
    lows = [{name: float(array.min()) for name, array in fed.items()} for fed in found]
    assert [fed["truth"] for fed in lows] == [0.0, 0.0]
    assert len({fed["a"] for fed in lows} | {fed["b"] for fed in lows}) == 4
    assert all(set(np.unique(fed["truth"])) == {0.0, 1.0} for fed in found)
    assert not [case for case in case_groups(slots[1:2])[0] if case.encoding == "mixed"]


def test_two_masks_empty_a_row_together_that_neither_empties() -> None:
    slots = [
        Slot(name, role, ir.DataType.BOOL, 4, blank=False) for name, role in (("a", "given"), ("q", "weight"), ("b", "given"))
    ]
    (case,) = (case for case in case_groups(slots)[0] if case.pattern == "apart")
    found = feeds(slots, [(2, 1, 5, 6)] * 3, case)
    assert all(found[name].any(axis=-1).all() for name in "ab")
    assert np.argwhere(~(found["a"] & found["b"]).any(axis=-1)).tolist() == [[0, 0, 2]]
    assert not [case for case in case_groups(slots[:2])[0] if case.pattern == "apart"]


@pytest.mark.parametrize(("fill", "equal"), [("inf", True), ("-50", False)])
def test_a_fill_that_large_or_low_scores_reach_is_no_mask(fill: str, equal: bool) -> None:
    weak = f"weak = Where(row, open, {'closed' if equal else 'fifty'})\n    full = Expand(weak,"
    fused = PADDED_FUSED.replace("full = Expand(bias,", weak)
    extra = "    fifty = Constant<value_float = -50.0>()\n"
    verdict = judged(graph(extra + PADDED + fused, inputs=MASKED, closed="inf"))
    assert verdict.equal is equal, verdict.detail


LONG_SUMS = """
    kt = Transpose<perm = [0, 2, 1]>(k)
    small = Constant<value_float = 0.05>()
    qk = MatMul(q, kt)
    scaled = Mul(qk, small)
    weights = Softmax<axis = -1>(scaled)
    old = MatMul(weights, v)
    new = com.microsoft.MultiHeadAttention<num_heads = 1, scale = {scale}>(q, k, {values})
"""


@pytest.mark.parametrize(
    ("scale", "values", "equal"),
    [
        pytest.param("0.05", "v", True, id="another order of thousands of additions"),
        pytest.param("0.050015", "v", False, id="scale off by three ten-thousandths"),
        pytest.param("0.05", "k", False, id="keys for values"),
    ],
)
def test_large_scores_are_no_difference_by_the_order_of_their_sums(scale: str, values: str, equal: bool) -> None:
    inputs = ", ".join(f"{{type}}[2, 64, 8192] {name}" for name in "qkv")
    verdict = judged(graph(LONG_SUMS.format(scale=scale, values=values), inputs=inputs))
    assert verdict.equal == equal, verdict.detail


GATED = """
    shift = Constant<value_float = {old}>()
    far = Add(q, shift)
    share = Sigmoid(far)
    old = Mul(v, share)
    shift2 = Constant<value_float = {new}>()
    far2 = Add(q, shift2)
    near = Neg(far2)
    power = Exp(near)
    unit = Constant<value_float = 1.0>()
    whole = Add(power, unit)
    share2 = Reciprocal(whole)
    new = Mul(v, share2)
"""
TWICE = GATED.replace("share = Sigmoid(far)", "shareless = Neg(far)\n    grown = Exp(shareless)\n    share = Reciprocal(grown)")


@pytest.mark.parametrize(
    ("text", "old", "new", "equal"),
    [
        pytest.param(GATED, "-15.0", "-15.0", True, id="a Sigmoid far below 0, which ONNX Runtime computes with a fixed error"),
        pytest.param(GATED, "-6.0", "-6.01", False, id="a Sigmoid of another value"),
        pytest.param(TWICE, "-15.0", "-15.01", False, id="as small a share without a Sigmoid"),
    ],
)
def test_the_error_of_a_sigmoid_is_no_difference(text: str, old: str, new: str, equal: bool) -> None:
    verdict = judged(graph(text.format(old=old, new=new), inputs=SQUARE))
    assert verdict.equal == equal, verdict.detail
