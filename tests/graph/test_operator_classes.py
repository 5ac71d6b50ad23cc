"""The classes of operators, held against ONNX's own evaluator and list of operators."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnx_attnfuse.graph import dtypes, ops
from onnx_attnfuse.graph.facts import Facts

CLASSES = {
    name: found
    for name, found in vars(ops).items()
    if name.isupper() and not name.startswith("_") and name not in {"STANDARD", "CONTRIB"}
}
DATA = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
SECOND = {
    "Expand": [2, 2, 3],
    "GatherElements": [[[1, 0, 1]]],
    "GatherND": [[0, 1]],
    "Reshape": [3, 2],
    "Squeeze": [0],
    "Tile": [1, 2, 1],
    "Unsqueeze": [0],
}


def run(op: str, data: np.ndarray) -> np.ndarray:
    """What an operator makes of its first input."""
    attributes = {"to": onnx.TensorProto.DOUBLE} if op == "Cast" else {"num_outputs": 2} if op == "Split" else {}
    more = {"Gather": [1, 0], "Slice": [1], "Split": None} | SECOND
    inputs = {"x": data} | ({"second": np.asarray(more[op], np.int64)} if more.get(op) is not None else {})
    inputs |= {"ends": np.asarray([2], np.int64)} if op == "Slice" else {}
    attributes |= {"axis": 1} if op in {"Gather", "GatherElements"} else {}
    outputs = ["y", "z"] if op == "Split" else ["y"]
    node = onnx.helper.make_node(op, [*inputs], outputs, **attributes)
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    graph = onnx.helper.make_graph([node], "one", values, [onnx.ValueInfoProto(name=name) for name in outputs])
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])).run(None, inputs)[
        0
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_every_operator_of_a_class_is_one_of_the_standard(name: str) -> None:
    assert {op for op in CLASSES[name] if not onnx.defs.has(op)} == set()


@pytest.mark.parametrize("op", sorted(ops.REARRANGES | ops.CASTS))
def test_what_rearranges_or_casts_keeps_every_element_once(op: str) -> None:
    assert sorted(run(op, DATA).reshape(-1).tolist()) == DATA.reshape(-1).tolist()


@pytest.mark.parametrize("op", sorted(ops.RESHAPES))
def test_what_reshapes_keeps_the_order_too(op: str) -> None:
    found = run(op, DATA)
    assert found.reshape(-1).tolist() == DATA.reshape(-1).tolist()
    assert found.shape != DATA.shape


def test_a_transpose_changes_the_order_and_is_no_reshape() -> None:
    assert run("Transpose", DATA).reshape(-1).tolist() != DATA.reshape(-1).tolist()
    assert "Transpose" not in ops.RESHAPES


@pytest.mark.parametrize("op", sorted(ops.REPEATS))
def test_what_repeats_gives_the_same_elements_more_than_once(op: str) -> None:
    found = run(op, DATA)
    assert found.size > DATA.size
    assert set(found.reshape(-1).tolist()) == set(DATA.reshape(-1).tolist())


@pytest.mark.parametrize("op", sorted(ops.SLICES | ops.GATHERS))
def test_what_selects_gives_elements_of_its_first_input(op: str) -> None:
    assert set(run(op, DATA + 10).reshape(-1).tolist()) <= set((DATA + 10).reshape(-1).tolist())


@pytest.mark.parametrize("op", sorted(ops.ASKS_SHAPE))
def test_what_asks_for_a_shape_reads_no_element(op: str) -> None:
    assert run(op, DATA).tolist() == run(op, DATA + 1).tolist()


def test_the_standard_has_two_names_and_others_keep_theirs() -> None:
    assert [ops.plain_domain(name) for name in ("", "ai.onnx", "ai.onnx.ml", ops.CONTRIB)] == ["", "", "ai.onnx.ml", ops.CONTRIB]


@pytest.mark.parametrize("dtype", sorted(dtypes.WHOLE_TO))
def test_a_float_type_holds_integers_up_to_its_limit_and_not_the_next(dtype: ir.DataType) -> None:
    limit, kind = dtypes.WHOLE_TO[dtype], dtype.numpy()
    assert [int(np.asarray(number).astype(kind)) for number in (limit - 1, limit)] == [limit - 1, limit]
    assert int(np.asarray(limit + 1).astype(kind)) != limit + 1


@pytest.mark.parametrize(("op", "number"), [("Flatten", 2.0), ("Tile", 2.0), ("Sign", None)])
def test_a_number_is_read_through_what_rearranges_or_repeats_it_and_nothing_else(op: str, number: float | None) -> None:
    text = """<ir_version: 10, opset_import: ["" : 18]> one (float[1] x) => (float[a, b] y)
    <float[2] two = {2.0, 2.0}, int64[1] times = {3}> { y = %s (two%s) }"""
    model = ir.from_proto(onnx.parser.parse_model(text % (op, ", times" if op == "Tile" else "")))
    assert Facts(model.graph).number(model.graph.outputs[0]) == number
