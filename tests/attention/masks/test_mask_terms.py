"""Masks in normal form hold where the terms hold that they are made of, and let go of the graph that they are read from."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks import mask_terms
from onnx_attnfuse.attention.masks.mask_terms import disjunction, element_of, index, negation, normal, position, truth
from onnx_attnfuse.certify.arithmetic import at_most, below, equals
from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.terms import FALSE, TRUE, Term, add, conjoin, disjoin, element, ite, multiply, negate, number
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.verify.mask_check import Evaluator

ROWS, KEYS = Factor(3), Factor(4)
ROW, KEY = index(ROWS), index(KEYS)
VALUES = {
    ir.Value(name="whole", type=ir.TensorType(ir.DataType.INT64)): np.array([0, 2, 1, -1]),
    ir.Value(name="seen", type=ir.TensorType(ir.DataType.BOOL)): np.array([True, False, False, True]),
}
WHOLE, SEEN = (element_of(value, (KEY,), value.dtype) for value in VALUES)
CAUSAL, CLOSE, OWN = at_most(KEY, ROW), at_most(ROW, add(KEY, number(1))), equals(ROW, KEY)
PARTS = [CAUSAL, CLOSE, OWN, SEEN, truth(WHOLE), below(ROW, KEY), equals(WHOLE, number(1)), TRUE, FALSE]


def holds(part: Term) -> list[bool]:
    """The truth value at all places, straight from its operators."""
    indices = {ROWS: np.arange(3).reshape(3, 1), KEYS: np.arange(4).reshape(1, 4)}
    found = Evaluator({}, indices, VALUES).evaluate(part)
    return np.broadcast_to(found, (3, 4)).ravel().tolist()


FORMS: list[Callable[[Term, Term, Term], Term]] = [
    lambda one, two, three: negate(conjoin(one, disjoin(two, three))),
    lambda one, two, three: ite(one, two, negate(three)),
    lambda one, two, three: disjoin(one, conjoin(negate(one), two), three),
    lambda one, two, three: negate(ite(one, negate(two), three)),
]


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_a_normal_form_holds_where_the_term_does(form: int) -> None:
    for parts in itertools.product(PARTS, repeat=3):
        term = FORMS[form](*parts)
        assert holds(normal(term)) == holds(term)
        assert holds(negation(normal(term))) == [not item for item in holds(term)]
        assert not any(item.op == "not" and item.args[0].op in {"and", "or", "le0"} for item in _inside(normal(term)))


def _inside(part: Term) -> list[Term]:
    return [part, *(inner for item in mask_terms.parts_of(part) for inner in _inside(item))]


def test_what_others_imply_is_left_out() -> None:
    assert disjunction(CAUSAL, at_most(add(KEY, number(1)), ROW)) is CAUSAL
    assert disjunction(CAUSAL, conjoin(negation(CAUSAL), SEEN)) is disjoin(CAUSAL, SEEN)
    assert disjunction(CAUSAL, CLOSE) is disjoin(CAUSAL, CLOSE)


def test_a_form_gives_its_places_with_their_factors_in_one_order() -> None:
    width = sizes.symbol("w")
    form = add(multiply(number(-2), WHOLE), multiply(mask_terms.size(width + 1), KEY), ROW, mask_terms.size(width), number(3))
    assert mask_terms.linear(form) == ([(ROW, 1), (KEY, width + 1), (WHOLE, -2)], width + 3)


@pytest.mark.parametrize("text", ["a", "a + 2*b", "a*b - 3", "a // b + a", "max(a, b)*c", "min(a, 1) + a*b*c"])
def test_a_size_is_the_same_from_its_term(text: str) -> None:
    size = sizes.parse(text)
    assert size is not None
    assert mask_terms.dim_of(mask_terms.size(size)) == size


def test_values_of_one_name_are_two() -> None:
    one, other = (ir.Value(name="same", type=ir.TensorType(ir.DataType.BOOL)) for _ in range(2))
    read = [element_of(value, (KEY,), ir.DataType.BOOL) for value in (one, other, one)]
    assert read[0] is read[2]
    assert read[0] is not read[1]
    assert [mask_terms.value_of(item) for item in read] == [one, other, one]
    assert read[0].data != read[1].data


def test_a_place_that_only_a_run_shows_is_of_no_value() -> None:
    rows = mask_terms.Name("rows", ir.Node("", "Slice", [None]))
    for name in ("place", rows):
        with pytest.raises(Unsupported):
            mask_terms.value_of(element(name, "Int", (KEY,)))


def test_a_position_is_that_along_the_factors_of_an_axis() -> None:
    indices = {ROWS: np.arange(3).reshape(3, 1), KEYS: np.arange(4).reshape(1, 4)}
    found = Evaluator({}, indices, {}).evaluate(position((ROWS, KEYS)))
    assert found.ravel().tolist() == list(range(12))


def test_no_term_keeps_a_graph_once_it_is_fused() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[b, 2, s, 4] q, float[b, 2, t, 4] k, float[b, 2, t, 4] v, bool[b, t] seen) => (float[b, 2, s, 4] y)
        <float low = {-1e9}, int64[2] at = {1, 2}>
        { turned = Transpose<perm = [0, 1, 3, 2]>(k)  scores = MatMul(q, turned)  wide = Unsqueeze(seen, at)
          masked = Where(wide, scores, low)  weights = Softmax<axis = -1>(masked)  y = MatMul(weights, v) }""")
    )
    value = weakref.ref(model.graph.inputs[3])
    report = onnx_attnfuse.optimize(model, verify="none").report
    assert [site.mask for site in report.sites] == ["padding"]
    del model
    gc.collect()
    assert value() is None
