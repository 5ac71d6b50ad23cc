"""Sizes of inputs that follow from others: where the graph fails at run time unless they are equal, and nowhere else."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.equal_sizes import pasts, solved, with_equal
from onnx_attnfuse.graph.facts import Facts
from tests.support.bundled import run

A, B, C, D = (sizes.symbol(name) for name in "abcd")
_ROWS = sizes.maximum(sizes.minimum(A + B, 8) - sizes.minimum(A, 8), 0)
"""The rows [a : a + b] of a buffer of eight."""


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ([(A, B)], {"b": A}),
        ([(B, A), (C, B)], {"b": A, "c": A}),
        ([(A + B, A + C)], {"c": B}),
        ([(D, A + B)], {"d": A + B}),
        ([(2 * A, 2 * B)], {"b": A}),
        ([(A, 8)], {"a": 8}),
        ([(D, A + B), (C, B)], {"c": B, "d": A + B}),
        ([(2 * A, B)], {"b": 2 * A}),
        ([(2 * A, 3 * B)], {}),
        ([(A * B, C * B)], {}),
        ([(A, B + -1)], {"b": A + 1}),
        ([(A + B, 3)], {}),
        ([(A, sizes.symbol("other"))], {}),
        ([(A, A)], {}),
        ([(_ROWS, B)], {str(_ROWS): B}),
        ([(2 * B, 2 * _ROWS), (C, A + _ROWS)], {str(_ROWS): B, "c": A + B}),
        ([(C, A + _ROWS)], {"c": A + _ROWS}),
        ([(2 * _ROWS, 3 * B)], {}),
        ([(_ROWS, sizes.minimum(B, 3) * -1)], {}),
    ],
)
def test_a_symbol_is_a_positive_sum_of_those_before_it(
    pairs: list[tuple[sizes.Dim, sizes.Dim]], found: dict[str, sizes.Dim]
) -> None:
    assert solved(pairs, "abcd") == found


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ({"d": 9}, {"d": 9, "a": 9}),
        ({"c": 9, "b": 2}, {"c": 9, "b": 2, "a": 7}),
        ({"c": 2, "b": 2}, {"c": 2, "b": 2}),
        ({"c": 1, "b": 2}, {"c": 1, "b": 2}),
        ({"c": 9}, {"c": 9}),
        ({"a": 5}, {"a": 5}),
    ],
)
def test_numbers_go_to_the_sizes_that_are_left(numbers: dict[str, int], found: dict[str, int]) -> None:
    assert with_equal(numbers, {"d": A, "c": A + B}) == found


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        (A + B, A + C, [(A + B, A + C)]),
        (A + B, sizes.minimum(A + B, A + C), [(A + B, A + B), (A + B, A + C)]),
        (A + B, sizes.maximum(A + B, A + C), []),
        (A + B, sizes.minimum(A + B, 8), [(A + B, A + B)]),
        (A + B, sizes.minimum(B, C), []),
    ],
)
def test_pasts_meet_where_a_mask_is_cut_to_its_keys(
    left: sizes.Dim, right: sizes.Dim, found: list[tuple[sizes.Dim, sizes.Dim]]
) -> None:
    assert sorted(pasts([(left, right)]), key=str) == sorted(found, key=str)


def test_sizes_are_put_inside_of_all_that_is_made_of_them() -> None:
    made = [sizes.maximum(A, B), sizes.minimum(A, 4), sizes.floor_quotient(A + 1, 2), A + B, A * B]
    for dim in made:
        put = sizes.substituted(dim, {"a": C + D})
        assert "a" not in sizes.symbols(put)
        assert sizes.evaluate(put, {"b": 5, "c": 2, "d": 7}) == sizes.evaluate(dim, {"a": 9, "b": 5})


_ALWAYS = {
    "MatMul": "g (float[a,b] x, float[c,d] y) => (float[e,f] z) { z = MatMul(x, y) }",
    "MatMul by a vector": "g (float[c,b] x, float[a] y) => (float[e] z) { z = MatMul(x, y) }",
    "Gemm": "g (float[b,a] x, float[d,c] y) => (float[e,f] z) { z = Gemm<transA=1, transB=1>(x, y) }",
    "Concat": "g (float[a,b] x, float[c,d] y) => (float[e,f] z) { z = Concat<axis=0>(x, y) }",
}
_IF = """g (float[a,b] x, float[c,d] y, bool given) => (float[e,f] z) {{
        w = If(given)<then_branch = yes () => (float m) {{ {} }}, else_branch = no () => (float m) {{ {} }}> {} }}"""
_ALWAYS |= {
    "Conv": "g (float[a,b,4] x, float[c,d,1] y) => (float[e,f,h] z) { z = Conv(x, y) }",
    "groups of Conv": "g (float[a,b,4] x, float[2,c,1] y) => (float[e,f,h] z) { z = Conv<group=2>(x, y) }",
    "ConvTranspose": "g (float[a,b,4] x, float[c,d,1] y) => (float[e,f,h] z) { z = ConvTranspose<group=1>(x, y) }",
    "both branches": _IF.format("m = MatMul(x, y)", "n = MatMul(x, y) m = Neg(n)", "z = Identity(w)"),
    "the size that both branches give": _IF.format("m = Neg(x)", "m = Identity(x)", "z = MatMul(w, y)"),
}
_RESHAPED = """g (float[1,{b}] x, float[c,d] y) => (float[e,f] z) {{
    kept = Shape<start=1>(x) asked = Shape<start=0, end=1>(y) shape = Concat<axis=0>(asked, kept) z = Reshape(x, shape) }}"""
_ALWAYS["a length that Reshape leaves one number for"] = _RESHAPED.format(b=4)
_NOT = {
    "a length beside one that may be 0 in Reshape": _RESHAPED.format(b="b"),
    "Add": "g (float[a,b] x, float[a,d] y) => (float[e,f] z) { z = Add(x, y) }",
    "Einsum": 'g (float[a,b] x, float[c,d] y) => (float[e,f] z) { z = Einsum<equation="ij,jk->ik">(x, y) }',
    "leading axes of MatMul": "g (float[a,2,3] x, float[b,3,2] y) => (float[e,f,h] z) { z = MatMul(x, y) }",
    "filters and places of Conv": "g (float[a,3,b] x, float[c,3,d] y) => (float[e,f,h] z) { z = Conv<pads=[3,3]>(x, y) }",
    "filters of ConvTranspose": "g (float[a,1,b] x, float[1,c,d] y) => (float[e,f,h] z) { z = ConvTranspose(x, y) }",
    "sizes that one branch gives": _IF.format("m = Neg(x)", "m = Transpose(y)", "z = MatMul(w, y)"),
    "branches that enforce others": _IF.format("m = MatMul(x, y)", "m = MatMul(y, x)", "z = Identity(w)"),
    "the axis of Concat": "g (float[a,2] x, float[c,2] y) => (float[e,f] z) { z = Concat<axis=0>(x, y) }",
    "a branch": """g (float[a,b] x, float[c,d] y, bool given) => (float[e,f] z) {
        z = If(given)<then_branch = yes () => (float[e,f] m) { m = MatMul(x, y) },
            else_branch = no () => (float[e,f] n) { n = Identity(x) }> }""",
}


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')


def _runs(model: onnx.ModelProto, numbers: dict[str, int]) -> bool:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        item.name: np.asarray(False)
        if item.type == "tensor(bool)"
        else np.zeros([dim if isinstance(dim, int) else numbers[dim] for dim in item.shape], np.float32)
        for item in session.get_inputs()
    }
    try:
        session.run(None, feeds)
    except Exception:  # noqa: BLE001 - onnxruntime has no exception of its own
        return False
    return True


def _equal(text: str) -> dict[str, sizes.Dim]:
    """What input sizes of a graph are known to be equal to, without any assumption."""
    graph = ir.serde.deserialize_model(_model(text)).graph
    facts = Facts(graph, assumed=Assumed(frozenset(["named-sizes"])))
    return {
        str(note.value): dim
        for value in graph.inputs
        for note, dim in zip(value.shape or (), facts.dims(value) or (), strict=True)
        if isinstance(note, ir.SymbolicDim) and str(note.value) != str(dim)
    }


@pytest.mark.parametrize("text", _ALWAYS.values(), ids=_ALWAYS)
def test_what_is_known_to_be_equal_is_wherever_the_graph_runs(text: str) -> None:
    equal = _equal(text)
    assert len(equal) == 1
    ran = 0
    for numbers in itertools.product((1, 2, 3), repeat=4):
        named: dict[str, int] = dict(zip("abcd", numbers, strict=True))
        if _runs(_model(text), named):
            ran += 1
            assert all(named[name] == sizes.evaluate(dim, named) for name, dim in equal.items())
    assert ran


@pytest.mark.parametrize("text", _NOT.values(), ids=_NOT)
def test_what_may_differ_at_run_time_is_not_known_to_be_equal(text: str) -> None:
    assert _equal(text) == {}
    assert _runs(_model(text), {"a": 1, "b": 3, "c": 1, "d": 1})


_LAYERS = """g (float[b,p,4] past, float[b,s,4] new, float[b,q,4] later, bool[8,8] seen) => (float[e,f,h] z, float[i,j,k] y)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] eight = {8}, int64[1] four = {4}, float low = {-inf}> {
    start = Shape<start=1, end=2>(past) added = Shape<start=1, end=2>(new) batch = Shape<start=0, end=1>(new)
    keys = Concat<axis=1>(past, new) turned = Transpose<perm=[0,2,1]>(keys) scores = MatMul(new, turned)
    end = Add(start, added) rows = Slice(seen, start, end, zero) mask = Slice(rows, zero, end, one)
    kept = Where(mask, scores, low) weights = Softmax(kept) z = MatMul(weights, keys)
    last = Min(end, eight) first = Min(start, eight) gap = Sub(last, first) count = Max(gap, zero)
    shape = Concat<axis=0>(batch, count, four) queries = Reshape<allowzero=1>(z, shape)
    more = Concat<axis=1>(later, queries) again = Transpose<perm=[0,2,1]>(more) products = MatMul(queries, again)
    parts = Softmax(products) y = MatMul(parts, more) }"""
"""Two layers of which the second has as many rows as a cut of a buffer, by the arithmetic of an exporter."""


@pytest.mark.parametrize(
    ("assumed", "is_known"), [(("nonempty-axes", "masks-fit"), True), (("masks-fit",), False), (("nonempty-axes",), False)]
)
def test_rows_that_are_asked_for_are_those_that_are_there(assumed: tuple[str, ...], is_known: bool) -> None:
    graph = ir.serde.deserialize_model(_model(_LAYERS)).graph
    facts = Facts(graph, assumed=Assumed(frozenset(["named-sizes", *assumed])))
    (queries,) = (node.outputs[0] for node in graph if node.op_type == "Reshape")
    assert ((facts.dims(queries) or ())[1] == sizes.symbol("s")) == is_known


def test_attention_whose_rows_are_cut_from_a_buffer_is_fused() -> None:
    before = _model(_LAYERS)
    result = onnx_attnfuse.optimize(before)
    assert [site.status for site in result.report.sites] == ["fused", "fused"]
    rng = np.random.default_rng(0)
    for past, new in ((0, 3), (2, 1), (3, 4), (4, 4)):
        feeds = {
            name: rng.standard_normal((2, size, 4), np.float32) for name, size in (("past", past), ("new", new), ("later", 2))
        }
        feeds["seen"] = np.tril(np.ones((8, 8), bool))
        expected, found = run(before, feeds), run(result.model, feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


_CUT = """g (float[b,p,4] past, float[b,q,4] later, float[b,s,4] new) => (float[e,f,h] z)
    <int64[1] zero = {0}, float[1] nothing = {0}> {
    keys = Concat<axis=1>(past, new) all = Shape<start=1, end=2>(keys) mask = Expand(nothing, all)
    more = Concat<axis=1>(later, new) end = Shape<start=1, end=2>(more) cut = Slice(mask, zero, end, zero)
    turned = Transpose<perm=[0,2,1]>(more) scores = MatMul(new, turned) z = Add(scores, cut) }"""
"""A mask as long as the keys of one layer, cut to those of another."""


@pytest.mark.parametrize("assumed", [("equal-pasts",), ()])
def test_a_mask_that_is_cut_to_its_keys_is_as_long_where_pasts_are_equal(assumed: tuple[str, ...]) -> None:
    graph = ir.serde.deserialize_model(_model(_CUT)).graph
    facts = Facts(graph, assumed=Assumed(frozenset(["named-sizes", "nonempty-axes", *assumed])))
    past, later = (facts.dims(value) for value in graph.inputs[:2])
    assert (past == later) == bool(assumed)


_GROWN = """g (float[b,2,p,4] past, float[c,2,q,4] later, float[b,2,s,4] new, float[c,2,t,4] other)
    => (float[e,f,g,h] x, float[i,j,k,l] y) { x = Concat<axis=2>(past, new) y = Concat<axis=2>(later, %s) }"""


@pytest.mark.parametrize(
    ("second", "one_cache", "names", "are_equal"),
    [
        ("new", True, ("equal-pasts",), True),
        ("new", False, ("equal-pasts",), False),
        ("new", True, (), False),
        ("other", True, ("equal-pasts",), False),
    ],
)
def test_pasts_that_grow_by_the_same_positions_are_equal_where_they_become_one_cache(
    second: str, one_cache: bool, names: tuple[str, ...], are_equal: bool
) -> None:
    graph = ir.serde.deserialize_model(_model(_GROWN % second)).graph
    facts = Facts(graph, assumed=Assumed.of(["named-sizes", *names], one_cache=one_cache))
    past, later = ((facts.dims(value) or ())[2] for value in graph.inputs[:2])
    assert (past == later) == are_equal


def test_a_product_of_what_was_repeated_says_nothing() -> None:
    text = "g (float[a,b] x, float[a,c] y, float[d,a] w) => (float[e,f] z) { s = Add(x, y) z = MatMul(s, w) }"
    assert _equal(text) == {}
    assert _runs(_model(text), {"a": 2, "b": 1, "c": 3, "d": 3})
    assert not _runs(_model(text), {"a": 2, "b": 1, "c": 3, "d": 1})


@pytest.mark.parametrize(
    ("same", "equal"),
    [
        ((), {}),
        (("b=c",), {"c": B}),
        (("a=b", "c=d"), {"b": A, "d": C}),
        (("*",), {"b": A, "c": A, "d": A}),
        (("[bd]=c",), {"c": B, "d": B}),
        (("b=other",), {}),
    ],
)
def test_dimensions_that_the_caller_says_are_equal_have_one_size(same: tuple[str, ...], equal: dict[str, sizes.Dim]) -> None:
    model = _model("g (float[a,b] x, float[c,d] y) => (float[e,f] z, float[g,h] w) { z = Relu(x) w = Relu(y) }")
    graph = ir.serde.deserialize_model(model).graph
    facts = Facts(graph, assumed=Assumed.of(["named-sizes"], same))
    dims = [dim for value in graph.inputs for dim in facts.dims(value) or ()]
    assert dict(zip("abcd", dims, strict=True)) == {"a": A, "b": B, "c": C, "d": D} | equal
