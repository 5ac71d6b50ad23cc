"""What a piece is cut from, which sizes and inputs it is run on, and what is kept of a difference."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim, symbol
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify import verdict as verdicts
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.equivalence import EquivalenceChecker
from onnx_attnfuse.verify.inputs import Pattern, kept_positions
from onnx_attnfuse.verify.shape_solver import Equalities
from onnx_attnfuse.verify.subgraph import Subgraph, extract
from onnx_attnfuse.verify.verdict import TIGHT, Verdict, compare
from tests.support.pairs import MASKED, PADDED, PADDED_FUSED, PLAIN, PLAIN_FUSED, graph, judged, values

AROUND = """
    hidden = MatMul(x, weight)
    a = Add(hidden, hidden)
    b = Sigmoid(gate)
    length = Shape<start = 0, end = 1>(x)
    grown = Expand(gate, length)
    c = Mul(a, b)
    old = MatMul(c, c)
    new = Mul(c, grown)
"""


def piece_of(nodes: str, inputs: str, frontier: tuple[str, ...]) -> Subgraph:
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    g ({inputs}) => (float[n, n] old, float[n, n] new) <float[2, 2] weight = {{1, 2, 3, 4}}> {{ {nodes} }}"""
    model = ir.from_onnx_text(text)
    named = values(model)
    return extract((named["old"], named["new"]), [named[stop] for stop in frontier], Facts(model.graph))


def test_heavy_nodes_are_cut_off_unless_data_of_a_stop_flows_into_them() -> None:
    subgraph = piece_of(AROUND, "float[n, 2] x, float[2] gate", ("a",))
    assert {item.value.name: item.role for item in subgraph.inputs} == {"a": "operand", "gate": "given", "x": "given"}
    assert [node.op_type for node in subgraph.nodes].count("MatMul") == 1
    unstopped = piece_of(AROUND, "float[n, 2] x, float[2] gate", ())
    assert {item.value.name: item.role for item in unstopped.inputs}["hidden"] == "activation"
    assert "weight" not in {value.name for value in unstopped.constants}


@pytest.mark.parametrize(("new", "inputs"), [("Transpose<perm = [1, 0]>(x)", {"x"}), ("MatMul(turned, turned)", {"turned"})])
def test_a_stop_is_computed_where_what_it_shows_is_read_too(new: str, inputs: set[str]) -> None:
    """Else the two would be drawn apart, and right nodes would differ."""
    nodes = f"turned = Transpose<perm = [1, 0]>(x) old = MatMul(turned, turned) new = {new}"
    subgraph = piece_of(nodes, "float[n, n] x", ("turned",))
    assert {item.value.name: item.role for item in subgraph.inputs} == dict.fromkeys(inputs, "operand")


_ROTATED = """
    hidden = MatMul(x, weight)
    cos = Cos(hidden)
    half = Mul(hidden, cos)
    turned = Add(half, hidden)
    old = MatMul(turned, {read})
    again = Add(half, hidden)
    length = Shape(hidden)
    new = {new}
"""


@pytest.mark.parametrize(
    ("read", "new", "frontier", "inputs"),
    [
        pytest.param("turned", "MatMul(again, turned)", ("turned", "hidden"), {"hidden"}, id="the new nodes read above it"),
        pytest.param("hidden", "MatMul(turned, hidden)", ("turned", "hidden"), {"hidden", "turned"}, id="both do"),
        pytest.param("turned", "Expand(turned, length)", ("turned",), {"turned"}, id="no stop is above it"),
    ],
)
def test_a_stop_is_computed_where_one_result_alone_reads_what_it_is_made_of(
    read: str, new: str, frontier: tuple[str, ...], inputs: set[str]
) -> None:
    """Keys that are rotated are also values: the operator is given keys before their rotation."""
    subgraph = piece_of(_ROTATED.format(read=read, new=new), "float[n, 2] x", frontier)
    assert {item.value.name for item in subgraph.inputs if item.role == "operand"} == inputs


def test_what_leads_from_a_result_to_another_is_not_cut_off() -> None:
    """A softmax of scores that are given out themselves is part of the piece; one of other data is not."""
    nodes = "old = MatMul(x, x) weights = Softmax({operand}) new = MatMul(weights, x)"
    inside = piece_of(nodes.format(operand="old"), "float[n, n] x, float[n, n] gate", ("x",))
    assert {item.value.name: item.role for item in inside.inputs} == {"x": "operand"}
    outside = piece_of(nodes.format(operand="gate"), "float[n, n] x, float[n, n] gate", ("x",))
    assert {item.value.name: item.role for item in outside.inputs} == {"x": "operand", "weights": "activation"}


def test_a_shape_does_not_carry_data() -> None:
    subgraph = piece_of(AROUND.replace("Expand(gate", "Expand(hidden"), "float[n, 2] x, float[2] gate", ("x",))
    assert "hidden" not in {item.value.name for item in subgraph.inputs}
    shape_only = "hidden = MatMul(x, weight)\n size = Shape(a)\n old = Expand(gate, size)\n new = Identity(old)\n a = Relu(x)\n"
    assert {item.value.name for item in piece_of(shape_only, "float[n, 2] x, float[2] gate", ("x",)).inputs} == {"x", "gate"}


@pytest.mark.parametrize(("asked", "role"), [("Shape", "activation"), ("ReduceMax", None)])
def test_a_value_of_a_length_that_data_decides_is_cut_off_where_only_its_shape_is_read(asked: str, role: str | None) -> None:
    """Else the length would be another than that of stops, which have it too."""
    nodes = f"""
        kept = Compress<axis = 1>(x, keep)
        hidden = MatMul(kept, weight)
        old = MatMul(hidden, hidden)
        asked = {asked}(kept)
        size = Cast<to = 7>(asked)
        new = ConstantOfShape(size)"""
    found = {item.value.name: item.role for item in piece_of(nodes, "float[b, n, 2] x, bool[n] keep", ("hidden",)).inputs}
    assert found.get("kept") == role
    assert ("keep" in found) == (role is None)


def test_control_flow_inside_is_refused() -> None:
    branch = """flag = ReduceMax<keepdims = 0>(x) yes = Cast<to = 9>(flag)
    old = If(yes) <then_branch = t () => (float[n, n] p) { p = Relu(x) }, else_branch = e () => (float[n, n] p) { p = Neg(x) }>
    new = Identity(old)"""
    with pytest.raises(Refused, match="control flow"):
        piece_of(branch, "float[n, n] x", ("yes",))


def test_a_loop_inside_brings_what_its_body_reads() -> None:
    loop = """long = Constant<value = int64 {3}>() on = Constant<value = bool {1}>() other = Neg(gate)
    old = Loop(long, on, x) <body = t (int64 i, bool c, float[n, n] p) => (bool d, float[n, n] q) {
        d = Identity(c) q = Add(p, other) }>
    new = Identity(old)"""
    inside = piece_of(loop, "float[n, n] x, float[n, n] gate", ("x",))
    assert [item.value.name for item in inside.inputs] == ["x", "gate"]
    assert "Loop" in [node.op_type for node in inside.nodes]


@pytest.mark.parametrize(("turned", "equal"), [(False, True), (True, True), (False, False)])
def test_a_weight_that_is_a_stop_is_any_weight(turned: bool, equal: bool) -> None:
    """Its numbers are not read: they are as large as keeps the product as large as its operand."""
    product = "old = Gemm<transB = 1>(x, weight)" if turned else "old = MatMul(x, weight)"
    flat = "tall = Transpose<perm = [1, 0]>(weight)" if turned or not equal else "tall = Identity(weight)"
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 18]> g (float[n, 96] x) => (float[n, 96] old, float[n, 96] new)
        <float[96, 96] weight = {{0}}> {{ {product} {flat} new = MatMul(x, tall) }}"""
    )
    model.graph.initializers["weight"].const_value = ir.tensor(np.full((96, 96), np.nan, np.float32))
    named = values(model)
    frontier = [named["x"], named["weight"]]
    subgraph = extract((named["old"], named["new"]), frontier, Facts(model.graph))
    assert {item.value.name: (item.role, item.summed) for item in subgraph.inputs} == {
        "x": ("operand", 1),
        "weight": ("weight", 96),
    }
    assert subgraph.prepared() == {named["weight"], named["tall"]}
    verdict = EquivalenceChecker().check([(named["old"], named["new"])], frontier, Facts(model.graph), model.opset_imports)
    assert verdict.equal == equal
    if verdict.evidence is not None:
        assert 0.5 < float(np.std(verdict.evidence.old["old"])) < 5.0


def large_table(shift: int) -> ir.Model:
    """A mask read from a table of 160 × 160, too large to stand in the piece."""
    nodes = PADDED.replace("kept = Greater(mask, none)", "looked = Gather(table, mask)\n    kept = Greater(looked, none)")
    nodes = nodes.replace("row = Unsqueeze(kept, axes)", "row = Unsqueeze(kept, axes)\n    turned = Sub(none, none)")
    fused = f"""
    step = Constant<value_int = {shift}>()
    moved = Add(mask, step)
    looked2 = Gather(table, moved)
    kept2 = Greater(looked2, none)
    row2 = Unsqueeze(kept2, axes)
    bias2 = Where(row2, open, closed)
""" + PADDED_FUSED.replace("Expand(bias,", "Expand(bias2,")
    model = graph(nodes + fused, inputs=MASKED)
    table = np.arange(25600) % 2
    value = ir.Value(
        name="table", shape=ir.Shape(table.shape), type=ir.TensorType(ir.DataType.INT64), const_value=ir.tensor(table)
    )
    missing = next(item for node in model.graph for item in node.inputs if item is not None and item.name == "table")
    model.graph.register_initializer(value)
    missing.replace_all_uses_with(value)
    return model


@pytest.mark.parametrize(("shift", "equal"), [(0, True), (1, False), (2, True)])
def test_large_constants_are_fed_with_their_own_numbers(shift: int, equal: bool) -> None:
    pytest.importorskip("onnxruntime")
    verdict = judged(large_table(shift))
    assert verdict.equal == equal, verdict.detail
    assert verdict.evidence is None or verdict.evidence.inputs["table"].size == 25600


b, past, seq, total, other = (symbol(name) for name in ("batch", "past", "seq", "total", "other"))


def lengths(pairs: list[tuple[Dim, Dim]], *shape: Dim) -> list[tuple[int, ...]]:
    found = Equalities(pairs).assignments([shape])
    return [tuple(sizes.evaluate(dim, numbers) for dim in shape) for numbers in found]


def test_sizes_are_unequal_where_nothing_ties_them() -> None:
    first = lengths([], b, seq, total)[0]
    assert len(set(first)) == 3
    assert first[0] == 2


def test_lengths_that_meet_are_equal() -> None:
    assert all(x == y for x, y in lengths([(seq, other)], seq, other))
    assert all(x == y == 7 for x, y in lengths([(seq, other), (other, 7)], seq, other))


def test_a_sum_is_solved_for_the_symbol_that_stands_alone() -> None:
    assert all(x + y == z for x, y, z in lengths([(past + seq, total)], past, seq, total))
    assert all(x + y == z for x, y, z in lengths([(seq, total - past)], past, seq, total))


def test_a_length_that_strides_make_too_small_is_lifted() -> None:
    frames = sizes.floor_quotient(seq - 10, 320)
    assert frames is not None
    assert lengths([], seq, frames)[0][1] == 5


def test_a_product_that_must_come_out_even_does() -> None:
    found = lengths([(12 * seq, 48 * other)], seq, other)[:3]
    assert found
    assert all(12 * x == 48 * y for x, y in found)


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("full", [[1, 1, 1, 1], [1, 1, 1, 1]]),
        ("right", [[1, 1, 1, 0], [1, 1, 0, 0]]),
        ("left", [[0, 1, 1, 1], [0, 0, 1, 1]]),
        ("empty", [[1, 1, 1, 1], [0, 0, 0, 0]]),
    ],
)
def test_masks_have_every_kind_of_padding(pattern: Pattern, kept: list[list[int]]) -> None:
    assert kept_positions(pattern, (2, 4), np.random.default_rng(0)).astype(int).tolist() == kept


def test_holes_leave_something_in_every_row() -> None:
    kept = kept_positions("holes", (64, 9), np.random.default_rng(0))
    assert kept.any(axis=-1).all()
    assert not kept.all(axis=-1).all()


@pytest.mark.parametrize(
    ("old", "new", "equal"),
    [
        ([1.0, np.nan], [1.0, np.nan], True),
        ([1.0, np.nan], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([np.inf, -np.inf], [np.inf, -np.inf], True),
        ([np.inf], [-np.inf], False),
        ([100.0, 0.0], [100.0, 0.005], True),
        ([100.0, 0.0], [100.0, 0.05], False),
    ],
)
def test_numbers_are_compared_by_magnitude_and_nan_as_nan(old: list[float], new: list[float], equal: bool) -> None:
    assert compare(np.asarray(old, np.float32), np.asarray(new, np.float32), TIGHT).equal == equal


def test_evidence_can_be_run_again(tmp_path: pathlib.Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    verdict = judged(graph(PADDED + PLAIN_FUSED, inputs=MASKED))
    files = verdicts.save(verdict, tmp_path / "evidence", "/layers.0/attn/Softmax")
    assert {path.name for path in files} == {f"layers.0_attn_Softmax{suffix}" for suffix in (".txt", ".npz", ".onnx")}
    text, archive, model = sorted(files, key=lambda path: ".txt .npz .onnx".split().index(path.suffix))
    assert verdict.detail in text.read_text()
    arrays = np.load(archive)
    session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {name.removeprefix("input:"): arrays[name] for name in arrays.files if name.startswith("input:")}
    old, new = session.run(["old", "new"], feeds)
    assert compare(old, arrays["old:old"], TIGHT).equal
    assert not compare(old, new, TIGHT).equal


@pytest.mark.parametrize("length", [900, 1100, 70_000])
def test_evidence_can_be_run_again_whatever_the_length_of_names(tmp_path: pathlib.Path, length: int) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = graph(PADDED + PLAIN_FUSED, inputs=MASKED)
    for value in model.graph.inputs:
        value.name = f"{value.name}{'n' * length}"
    verdict = judged(model, frontier=tuple(value.name or "" for value in model.graph.inputs))
    text, archive, piece = verdicts.save(verdict, tmp_path, "層" * 200)
    named = dict(line.split(" is ", 1) for line in text.read_text().splitlines() if line.startswith("input ") and " is " in line)
    assert bool(named) == (length > 1000)
    arrays = np.load(archive)
    keys = [key for key in arrays.files if key.startswith("input")]
    feeds = {named.get(key, key.removeprefix("input:")): arrays[key] for key in keys}
    session = runtime.InferenceSession(piece, providers=["CPUExecutionProvider"])
    assert compare(session.run(["old"], feeds)[0], arrays["old:old"], TIGHT).equal


def test_nothing_is_written_where_nothing_differs(tmp_path: pathlib.Path) -> None:
    assert verdicts.save(Verdict(True, 0.0, 1, "equal"), tmp_path / "evidence", "site") == []
    assert not any(tmp_path.iterdir())


def whole(result: str) -> onnx.ModelProto:
    model = graph(PADDED + PADDED_FUSED, inputs=MASKED)
    model.graph.outputs[:] = [values(model)[result]]
    values(model)[result].name = "result"
    return ir.to_proto(model)


def test_whole_models_are_compared_whatever_they_come_as(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    path.write_bytes(whole("old").SerializeToString())
    for before in (path, whole("old"), ir.from_proto(whole("old"))):
        verdict = check_models(before, whole("new"))
        assert verdict.equal, verdict.detail
        assert verdict.cases >= 8


def test_a_whole_model_that_differs_is_told_by_its_output() -> None:
    pytest.importorskip("onnxruntime")
    wrong = ir.from_proto(whole("new"))
    node = next(node for node in wrong.graph if node.op_type == "MultiHeadAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", 0.5)
    verdict = check_models(whole("old"), wrong)
    assert not verdict.equal
    assert "output 'result'" in verdict.detail
    assert verdict.evidence is not None
    assert verdict.evidence.model is None
    assert check_models(whole("old"), graph(PLAIN + PLAIN_FUSED)).detail.startswith("the outputs ['result'] became")


@pytest.mark.parametrize("names", [("one", "one"), ("one", "two"), ("", "")])
def test_a_piece_of_several_graphs_may_have_nodes_of_one_name(names: tuple[str, str]) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]>
    g (float[n, 2] x) => (float[n, 2] a, float[n, 2] b) { c = Exp(x) a = Neg(c) d = Exp(x) b = Neg(d) }"""
    model = ir.from_onnx_text(text)
    for node, name in zip(model.graph, 2 * names, strict=True):
        node.name = name
    verdict = judged(model, old="a", new="b", frontier=("x",))
    assert verdict.equal, verdict.detail
