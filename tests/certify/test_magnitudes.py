"""Proofs about masks that are numbers: what a number leaves of a score beside it, and what may not be taken for gone."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import parser

from onnx_attnfuse.certify.certificate import certify

_LOWEST = "-3.4028234663852886e38"


def _masked(
    dtype: str, tag: str, scale: float, mask: str = "inverted = Sub(one, kept) added = Mul(inverted, lowest)"
) -> ir.Model:
    """Attention whose mask is a number computed from an input; `tag` keeps the names of two models apart."""
    text = f"""
        ({dtype}[b, h, s, t] m, float[b, h, s, 8] q, float[b, h, 8, t] k, float[b, h, t, 8] v) => (float[b, h, s, 8] y)
        <float one = {{1.0}}, float lowest = {{{_LOWEST}}}, int64[1] last = {{-1}}, float scale = {{{scale}}}>
        {{ queries = Softplus(q) keys = Softplus(k) values = Softplus(v) products = MatMul(queries, keys)
           scores = Mul(products, scale) kept = Cast<to = 1>(m) {mask} sum = Add(scores, added) p = Softmax<axis = -1>(sum)
           y = MatMul(p, values) }}"""
    own = "scores kept inverted added sum scale products biased largest".split()
    for name in own:
        text = (
            text.replace(f"{name} =", f"{name}{tag} =").replace(f"{name},", f"{name}{tag},").replace(f"{name})", f"{name}{tag})")
        )
    text = text.replace("p =", f"p{tag} =").replace("(p,", f"(p{tag},")
    return ir.serde.deserialize_model(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\nagraph {text}'))


@pytest.mark.parametrize("dtype", ["bool", "int64", "float"])
def test_scores_beside_a_mask_that_is_a_product_are_compared(dtype: str) -> None:
    before = _masked(dtype, "A", 0.5)
    assert certify(before, _masked(dtype, "B", 0.5)).is_complete
    assert not certify(before, _masked(dtype, "B", 0.25)).is_complete


def test_the_lowest_number_and_an_ordinary_one_is_no_more_than_the_lowest() -> None:
    same = _masked("bool", "A", 0.5, "added = Identity(scores)")
    chosen = "biased = Add(products, lowest) inverted = {}(biased, lowest) added = Where(inverted, products, scores)"
    assert certify(same, _masked("bool", "B", 0.5, chosen.format("Greater"))).is_complete
    assert not certify(same, _masked("bool", "B", 0.5, chosen.format("GreaterOrEqual"))).is_complete


def test_twice_the_lowest_number_is_minus_infinity() -> None:
    twice = "inverted = Where(m, scores, lowest) biased = Where(m, scores, lowest) added = Add(inverted, biased)"
    once = "inverted = Where(m, scores, lowest) biased = Where(m, scores, one) added = Add(inverted, biased)"
    assert certify(_masked("bool", "A", 0.5, twice), _masked("bool", "B", 0.5, twice)).is_complete
    assert not certify(_masked("bool", "A", 0.5, twice), _masked("bool", "B", 0.5, once)).is_complete


def test_the_largest_of_a_row_is_not_left_out_where_it_may_mask() -> None:
    plain = "added = Where(m, one, lowest)"
    largest = "biased = Where(m, one, lowest) largest = ReduceMax(biased, last) added = Add(biased, largest)"
    shifted = "biased = Where(m, one, lowest) largest = ReduceMax(biased, last) added = Sub(biased, largest)"
    assert not certify(_masked("bool", "A", 0.5, plain), _masked("bool", "B", 0.5, largest)).is_complete
    assert not certify(_masked("bool", "A", 0.5, plain), _masked("bool", "B", 0.5, shifted)).is_complete


def test_a_sum_behind_a_maximum_may_lie_below_all_numbers() -> None:
    mask = "biased = Where(m, scores, lowest) largest = ReduceMax(biased, last) "
    once, twice = mask + "added = Sub(biased, largest)", mask + "added = Add(biased, largest)"
    assert certify(_masked("bool", "A", 0.5, once), _masked("bool", "B", 0.5, once)).is_complete
    assert not certify(_masked("bool", "A", 0.5, once), _masked("bool", "B", 0.5, twice)).is_complete


@pytest.mark.parametrize(("code", "same"), [(2, False), (3, False), (7, True)])
def test_an_integer_of_few_bits_wraps(code: int, same: bool) -> None:
    """A place that may not fit into uint8 (2) or int8 (3) is not followed into it; into int64 (7) it is."""
    compared = f"inverted = Cast<to = {code}>(counted) biased = Cast<to = 7>(inverted) inverted2 = Greater(biased, seven)"
    text = """
        (float[n] x) => (bool[m] y) <int64 zero = {0}, int64 one = {1}, int64[1] seven = {7}>
        { long = Shape(x) limit = Squeeze(long) counted = Range(zero, limit, one) %s }"""
    plain = text % "y = Greater(counted, seven)"
    turned = text % compared.replace("inverted2", "y")
    before, after = (
        ir.serde.deserialize_model(parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\nagraph {item}'))
        for item in (plain, turned)
    )
    assert certify(before, after).is_complete == same


def test_a_logarithm_of_nothing_is_minus_infinity() -> None:
    log = "inverted = Cast<to = 1>(m) added = Log(inverted)"
    fill = "inverted = Where(m, one, lowest) added = Sub(inverted, one)"
    chosen = "added = Where(m, nothing, below)"
    before = _masked("bool", "A", 0.5, log)
    same = _masked("bool", "B", 0.5, chosen.replace("nothing", "scores").replace("below", "scores"))
    assert not certify(before, same).is_complete
    assert not certify(before, _masked("bool", "B", 0.5, fill)).is_complete
    assert certify(before, _masked("bool", "B", 0.5, log)).is_complete
