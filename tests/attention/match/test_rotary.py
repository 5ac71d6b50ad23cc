"""Rotary embeddings: recognised by what they compute however they are spelled, and each with a near miss that is none."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import pytest

import onnx_attnfuse
from tests.support.bundled import Array, run_in, session
from tests.support.graph_builder import GraphBuilder
from tests.support.rotary import (
    GROUPS,
    HEADS,
    SIZE,
    Tables,
    Turn,
    backwards,
    by_head,
    chunks,
    complex_numbers,
    contrib,
    contrib_offset,
    every_other,
    from_zero,
    from_zero_narrow,
    gathered,
    halves,
    in_float16,
    in_float32,
    narrow,
    negative_angles,
    negative_table,
    normalized,
    of_an_odd_number,
    of_some,
    of_the_last,
    of_two_values,
    one_table,
    operator,
    operator_at,
    other_heads,
    other_pairs,
    rounded_otherwise,
    rows_first,
    rows_first_turned,
    same_sign,
    scaled,
    shifted,
    signed,
    sliced,
    stacked,
    swapped,
    two_chunks,
    unequal,
    unequal_columns,
    wide,
    wide_frequencies,
    without_the_first_row,
)


def written(
    tables: Tables, turn: Turn, *, opset: int = 18, dtype: int = onnx.TensorProto.FLOAT, entries: str = "p", shown: bool = False
) -> onnx.ModelProto:
    """An attention with grouped heads, its queries and keys turned.

    Args:
        tables: Its cosines and sines.
        turn: How they turn.
        opset: Of the model.
        dtype: Of queries, keys and values.
        entries: Length of the batch of positions.
        shown: The turned keys are an output too.
    """
    g = GraphBuilder(opset)
    for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        g.given(name, ["b", "s", heads * SIZE], dtype)
    g.given("positions", [entries, "s"], onnx.TensorProto.INT64)
    split = {"q": [0, 0, HEADS, SIZE], "k": [0, 0, GROUPS, SIZE], "v": [0, 0, GROUPS, SIZE]}
    q, k, v = (g.op("Transpose", g.op("Reshape", name, split[name]), perm=[0, 2, 1, 3]) for name in "qkv")
    cos, sin = tables(g)
    q, k = turn(g, q, cos, sin), turn(g, k, cos, sin)
    if shown:
        g.gives(k, "present", ["b", GROUPS, "s", SIZE], dtype)
    wide = [g.op("Expand", g.op("Unsqueeze", part, [2]), [1, 1, HEADS // GROUPS, 1, 1]) for part in (k, v)]
    keys, values = (g.op("Reshape", part, [0, HEADS, -1, SIZE]) for part in wide)
    weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", keys, perm=[0, 1, 3, 2])), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, values), perm=[0, 2, 1, 3])
    g.gives(g.op("Reshape", mixed, [0, 0, HEADS * SIZE]), "out", ["b", "s", HEADS * SIZE], dtype)
    return g.model()


def feeds(model: onnx.ModelProto, b: int, s: int, p: int) -> dict[str, Array]:
    random = np.random.default_rng(s)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    given = {
        name: random.normal(0, 1, (b, s, heads * SIZE)).astype(dtype)
        for name, heads in zip("qkv", (HEADS, GROUPS, GROUPS), strict=True)
    }
    own = model.graph.input[3].type.tensor_type.shape.dim[0].dim_param == "b"
    return {**given, "positions": random.integers(0, 16, (b if own else p, s))}


def turned_by_operator(model: onnx.ModelProto) -> list[dict[str, int]]:
    found = [node for node in model.graph.node if node.op_type == "RotaryEmbedding" and node.domain == "com.microsoft"]
    return [{item.name: onnx.helper.get_attribute_value(item) for item in node.attribute} for node in found]


def same(before: onnx.ModelProto, after: onnx.ModelProto, atol: float = 1e-5) -> None:
    """Outputs are what they were: a batch with its own positions, one for all of them, a single row."""
    original, fused = session(before), session(after)
    for b, s, p in ((2, 5, 2), (3, 4, 1), (1, 1, 1), (2, 1, 2)):
        given = feeds(before, b, s, p)
        expected = run_in(original, given)
        for name, result in run_in(fused, given).items():
            np.testing.assert_allclose(result, expected[name], rtol=1e-3, atol=atol, err_msg=f"{name} of {b}, {s}, {p}")


HALF = {"num_heads": HEADS, "interleaved": 0}
PAIRS = {"num_heads": HEADS, "interleaved": 1}
PART = {"rotary_embedding_dim": 4}
SPELLINGS = [
    (wide, halves, HALF),
    (from_zero, halves, HALF),
    (wide_frequencies, halves, HALF),
    (scaled, halves, HALF),
    (gathered, halves, HALF),
    (sliced, halves, HALF),
    (wide, swapped, HALF),
    (wide, backwards, HALF),
    (rows_first, rows_first_turned, HALF),
    (narrow, chunks, HALF),
    (narrow, complex_numbers, PAIRS),
    (narrow, stacked, HALF),
    (narrow, signed, HALF),
    (negative_angles, same_sign, HALF),
    (negative_table, same_sign, HALF),
    (one_table, every_other, PAIRS),
    (narrow, of_some(two_chunks), HALF | PART),
]


@pytest.mark.parametrize(("tables", "turn", "attributes"), SPELLINGS)
def test_every_spelling_becomes_the_operator(tables: Tables, turn: Turn, attributes: dict[str, int]) -> None:
    model = written(tables, turn)
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert result.report.fused == 1
    query, key = turned_by_operator(result.model)
    assert (query, key) == (attributes, attributes | {"num_heads": GROUPS})
    left = {node.op_type for node in result.model.graph.node}
    assert left.isdisjoint({"Transpose", "Add", "Sub"}), "what was spelled out is gone, and nothing is rearranged"
    same(model, result.model)


@pytest.mark.parametrize(
    ("turn", "attributes"),
    [
        (operator(), HALF),
        (operator(interleaved=1), PAIRS),
        (operator_at, PAIRS),
        (contrib(), HALF),
        (contrib_offset, HALF),
    ],
)
def test_operators_that_rotate_are_read_too(turn: Turn, attributes: dict[str, int]) -> None:
    model = written(narrow, turn, opset=23, entries="b")
    result = onnx_attnfuse.optimize(model, verify="sites", target="MultiHeadAttention")
    assert turned_by_operator(result.model) == [attributes, attributes | {"num_heads": GROUPS}]
    assert "Transpose" not in {node.op_type for node in result.model.graph.node}, "turned as they come from the projection"
    same(model, result.model)


@pytest.mark.parametrize(
    ("tables", "turn"),
    [
        (unequal, halves),
        (unequal_columns, halves),
        (rounded_otherwise, halves),
        (gathered, same_sign),
        (wide, other_heads),
        (wide, every_other),
        (one_table, halves),
        (wide, by_head),
        (wide, without_the_first_row),
        (wide, same_sign),
        (wide, other_pairs),
        (wide, of_an_odd_number),
        (wide, shifted),
        (wide, of_two_values),
        (narrow, contrib(scale=0.5)),
    ],
)
def test_what_is_no_rotation_of_pairs_stays(tables: Tables, turn: Turn) -> None:
    model = written(tables, turn, entries="b")
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert result.report.fused == 1
    assert len(turned_by_operator(result.model)) == len(turned_by_operator(model))
    same(model, result.model)


@pytest.mark.parametrize("turn", [in_float32, in_float16])
def test_half_precision_is_turned_in_half_precision(turn: Turn) -> None:
    model = written(wide, turn, dtype=onnx.TensorProto.FLOAT16)
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert turned_by_operator(result.model) == [HALF, HALF | {"num_heads": GROUPS}]
    types = {item.name: item.type.tensor_type.elem_type for item in result.model.graph.value_info}
    turned = [node.output[0] for node in result.model.graph.node if node.op_type == "RotaryEmbedding"]
    assert {types[name] for name in turned} == {onnx.TensorProto.FLOAT16}
    same(model, result.model, atol=4e-3)


def test_keys_that_are_an_output_are_turned_where_they_stand() -> None:
    model = written(wide, halves, shown=True)
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert {item["num_heads"] for item in turned_by_operator(result.model)} == {GROUPS, HEADS}
    assert "Neg" not in {node.op_type for node in result.model.graph.node}
    same(model, result.model)


@pytest.mark.parametrize("turn", [of_the_last, normalized])
def test_what_is_turned_only_in_part_or_on_the_way_is_turned_where_it_stands(turn: Turn) -> None:
    model = written(wide, turn, entries="b")
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert result.report.notes == ("2 rotary embeddings fused to RotaryEmbedding outside of attentions",)
    assert {item["num_heads"] for item in turned_by_operator(result.model)} == {GROUPS, HEADS}
    same(model, result.model)


def test_layers_share_their_tables() -> None:
    g = GraphBuilder()
    x = g.given("x", ["b", "s", HEADS * SIZE])
    g.given("positions", ["b", "s"], onnx.TensorProto.INT64)
    for _ in range(3):
        cos, sin = wide(g)
        heads = g.op("Transpose", g.op("Reshape", x, [0, 0, HEADS, SIZE]), perm=[0, 2, 1, 3])
        q, k = halves(g, heads, cos, sin), halves(g, g.op("Neg", heads), cos, sin)
        weights = g.op("Softmax", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
        mixed = g.op("Transpose", g.op("MatMul", weights, heads), perm=[0, 2, 1, 3])
        x = g.op("Add", x, g.op("Reshape", mixed, [0, 0, HEADS * SIZE]))
    g.gives(x, "out", ["b", "s", HEADS * SIZE])
    result = onnx_attnfuse.optimize(g.model(), verify="sites")
    turning = [node for node in result.model.graph.node if node.op_type == "RotaryEmbedding"]
    assert len(turning) == 6
    assert len({name for node in turning for name in node.input[1:2]}) == 1, "positions are the same for all"


def cached(dtype: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    """New keys are turned and put after those of earlier positions."""
    g = GraphBuilder()
    for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        g.given(name, ["b", "s", heads * SIZE], dtype)
    past = [g.given(name, ["b", GROUPS, "p", SIZE], dtype) for name in ("past_k", "past_v")]
    g.given("positions", ["b", "s"], onnx.TensorProto.INT64)
    weights = [np.eye(heads * SIZE, dtype=onnx.helper.tensor_dtype_to_np_dtype(dtype)) for heads in (HEADS, GROUPS, GROUPS)]
    q, k, v = (
        g.op("Transpose", g.op("Reshape", g.op("MatMul", name, weight), [0, 0, len(weight) // SIZE, SIZE]), perm=[0, 2, 1, 3])
        for name, weight in zip("qkv", weights, strict=True)
    )
    cos, sin = (g.op("Cast", table, to=dtype) for table in wide(g))
    q, k = halves(g, q, cos, sin), halves(g, k, cos, sin)
    keys, values = (g.op("Concat", old, new, axis=2) for old, new in zip(past, (k, v), strict=True))
    g.gives(keys, "present_k", ["b", GROUPS, "t", SIZE], dtype)
    g.gives(values, "present_v", ["b", GROUPS, "t", SIZE], dtype)
    wider = [g.op("Expand", g.op("Unsqueeze", part, [2]), [1, 1, HEADS // GROUPS, 1, 1]) for part in (keys, values)]
    keys, values = (g.op("Reshape", part, [0, HEADS, -1, SIZE]) for part in wider)
    scores = g.op("MatMul", q, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
    first = g.op("Shape", past[0], start=2, end=3)
    end = g.op("Add", first, g.op("Shape", "q", start=1, end=2))
    rows, columns = g.op("Range", g.op("Squeeze", first), g.op("Squeeze", end), 1), g.op("Range", 0, g.op("Squeeze", end), 1)
    seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", rows, [1]))
    low, high = (np.asarray(number).astype(weights[0].dtype) for number in (-60000, 0))
    masked = g.op("Add", scores, g.op("Where", seen, high, low))
    mixed = g.op("MatMul", g.op("Softmax", masked, axis=-1), values)
    g.gives(g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, HEADS * SIZE]), "out", ["b", "s", 32], dtype)
    return g.model()


@pytest.mark.parametrize("target", ["onnx.Attention", "GroupQueryAttention", "MultiHeadAttention"])
def test_new_keys_are_turned_before_they_are_appended(target: str) -> None:
    model = cached()
    result = onnx_attnfuse.optimize(model, verify="sites", target=target)
    (site,) = result.report.sites
    assert site.status == "fused", site.reasons
    found = turned_by_operator(result.model)
    assert sorted(item["num_heads"] for item in found) == [GROUPS, HEADS]
    assert "Neg" not in {node.op_type for node in result.model.graph.node}
    original, fused = session(model), session(result.model)
    for b, s, p in ((1, 3, 4), (2, 1, 5), (1, 4, 0)):
        random = np.random.default_rng(s)
        given = {
            name: random.normal(0, 1, (b, s, heads * SIZE)).astype(np.float32)
            for name, heads in zip("qkv", (4, 2, 2), strict=True)
        }
        given |= {name: random.normal(0, 1, (b, GROUPS, p, SIZE)).astype(np.float32) for name in ("past_k", "past_v")}
        given["positions"] = np.tile(np.arange(p, p + s), (b, 1))
        expected = run_in(original, given)
        for name, value in run_in(fused, given).items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=f"{name} of {b}, {s}, {p}")


def test_nothing_is_left_for_onnx_runtime_to_fold_wrongly() -> None:
    """It folds MatMul and RotaryEmbedding into a GroupQueryAttention, and takes the tables for those of all positions."""
    model = onnx_attnfuse.optimize(cached(onnx.TensorProto.FLOAT16), verify="none", target="GroupQueryAttention", ep="cuda").model
    graphs, makers, found = [model.graph], dict[str, str](), list[onnx.NodeProto]()
    for graph in graphs:
        for node in graph.node:
            makers.update(dict.fromkeys(node.output, node.op_type))
            graphs += [item.g for item in node.attribute if item.HasField("g")]
            found += [node] if node.op_type == "GroupQueryAttention" else []
    assert [[makers[name] for name in node.input[:3]] for node in found] == [["RotaryEmbedding", "RotaryEmbedding", "Reshape"]]


def test_a_second_run_finds_nothing_left_to_do() -> None:
    for model in (written(wide, halves, shown=True), written(narrow, operator(), opset=23, entries="b"), cached()):
        once = onnx_attnfuse.optimize(model, verify="none").model
        twice = onnx_attnfuse.optimize(once, verify="none")
        assert twice.report.notes == ()
        assert twice.model.SerializeToString(deterministic=True) == once.SerializeToString(deterministic=True)


def test_a_shape_that_is_asked_for_keeps_nothing_alive() -> None:
    model = written(wide, halves)
    asked = next(node.input[0] for node in model.graph.node if node.op_type == "MatMul")
    model.graph.node.insert(len(model.graph.node) - 1, onnx.helper.make_node("Shape", [asked], ["asked"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("asked", onnx.TensorProto.INT64, [4]))
    result = onnx_attnfuse.optimize(model, verify="sites")
    assert "Neg" not in {node.op_type for node in result.model.graph.node}
    same(model, result.model)


def test_an_attention_that_stays_what_it_is_gets_the_operator() -> None:
    g = GraphBuilder(23)
    for name in "qkv":
        g.given(name, ["b", "s", HEADS * SIZE])
    g.given("positions", ["b", "s"], onnx.TensorProto.INT64)
    cos, sin = wide(g)
    q, k, v = (g.op("Transpose", g.op("Reshape", name, [0, 0, HEADS, SIZE]), perm=[0, 2, 1, 3]) for name in "qkv")
    mixed = g.op("Attention", halves(g, q, cos, sin), halves(g, k, cos, sin), v)
    g.gives(g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, 32]), "out", ["b", "s", 32])
    result = onnx_attnfuse.optimize(g.model(), verify="sites", target="onnx.Attention")
    assert [site.op for site in result.report.sites] == ["Attention"]
    assert turned_by_operator(result.model) == [HALF, HALF]
    assert "Transpose" not in {node.op_type for node in result.model.graph.node}
    original, fused = session(g.model()), session(result.model)
    random = np.random.default_rng(0)
    given = {name: random.normal(0, 1, (2, 5, 32)).astype(np.float32) for name in "qkv"}
    given["positions"] = random.integers(0, 16, (2, 5))
    np.testing.assert_allclose(run_in(fused, given)["out"], run_in(original, given)["out"], atol=1e-5)


def test_caches_of_batch_one_need_no_repeating() -> None:
    """What ONNX Runtime refuses as exported is compared as mended, and gone where the operator takes over."""
    model = written(from_zero_narrow, operator(), opset=23)
    result = onnx_attnfuse.optimize(model, verify="sites", target="MultiHeadAttention")
    assert result.report.notes == ()
    assert len(turned_by_operator(result.model)) == 2
    assert {node.domain for node in result.model.graph.node if node.op_type == "RotaryEmbedding"} == {"com.microsoft"}
    spelled = written(from_zero_narrow, chunks)
    given = feeds(spelled, 3, 4, 1)
    actual, expected = run_in(session(result.model), given)["out"], run_in(session(spelled), given)["out"]
    np.testing.assert_allclose(actual, expected, atol=1e-5)
