"""The closed world of operators: what is not understood of a node makes it unknown to every reader."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.graph.ops import is_contrib, is_standard, read_as
from onnx_attnfuse.graph.schemas import table, why_unknown
from tests.support.operator_schemas import line, schemas

SCHEMAS = schemas()


def node(op: str, domain: str = "", inputs: int = 1, **attributes: object) -> ir.Node:
    values = [ir.Value(name=f"x{place}") for place in range(inputs)]
    return ir.node(op, values, attributes, domain=domain)  # pyright: ignore[reportArgumentType]


def test_the_table_lacks_nothing_that_the_installed_versions_have() -> None:
    known = table()
    assert set(SCHEMAS) <= set(known)
    for key, versions in SCHEMAS.items():
        told = line(key, versions).translate(str.maketrans("", "", "!?+"))
        _, _, changed, inputs, outputs, *attributes = told.split(" ")
        schema = known[key]
        assert set(map(int, changed.split(","))) <= set(schema.versions), key
        assert {name for name in inputs.split(",") if name != "-"} <= set(schema.inputs), key
        assert len(outputs.split(",")) <= max(1, len(schema.outputs)), key
        told = {name: default for name, _, default in (item.partition("=") for item in attributes)}
        assert set(told) <= set(schema.attributes), key


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (node("Attention", inputs=3, left_window_size=2), None),
        (node("Attention", inputs=3, newest_size=-1), "newest_size of Attention is not read"),
        (node("Attention", inputs=7), None),
        (node("Attention", inputs=8), "input 7 of Attention is not read"),
        (node("GroupQueryAttention", "com.microsoft", 16), None),
        (node("GroupQueryAttention", "com.microsoft", 17), None),
        (node("GroupQueryAttention", "com.microsoft", 7, sliding_window_cache=0), None),
        (node("GroupQueryAttention", "com.microsoft", 7, qk_output=1), "qk_output of GroupQueryAttention is not read"),
        (node("Cast", to=1, saturate=1), None),
        (node("Attention", inputs=3, softcap=1.5), None),
        (node("Attention", inputs=3, softcap=-1.5), "softcap of Attention is not read"),
        (node("ReduceMax", keepdims=0), None),
        (node("ReduceMax", keepdims=2), "keepdims of ReduceMax is not read"),
        (node("Cast", to=1, saturate=0), "saturate of Cast is not read"),
        (node("Concat", inputs=40, axis=0), None),
        (node("Add", inputs=2, alpha=2.0), "alpha of Add is not read"),
        (node("Never", inputs=2), "Never of ai.onnx is not known"),
        (node("Never", "acme", inputs=2, alpha=2.0), None),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_unknown(made: ir.Node, why: str | None) -> None:
    assert why_unknown(made) == why
    named = is_standard(made) or is_contrib(made) or made.domain == "acme"
    assert named == (why is None)
    assert (read_as(made)[0] in {"", "com.microsoft", "acme"}) == (why is None)


def test_an_input_that_is_left_out_at_the_end_says_nothing() -> None:
    made = ir.node("GroupQueryAttention", [ir.Value(name="x")] * 7 + [None] * 10, domain="com.microsoft")
    assert why_unknown(made) is None


@pytest.mark.parametrize(("opset", "known"), [(6, False), (7, True), (13, True), (24, True)])
def test_a_version_from_before_opset_7_is_unknown(opset: int, known: bool) -> None:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[2] a, float[2] b) => (float[2] y) {{ y = Add(a, b) }}'
    model, _ = from_any(onnx.parser.parse_model(text))
    assert is_standard(next(iter(model.graph)), "Add") == known


def test_the_version_that_an_exporter_left_at_a_node_is_not_asked() -> None:
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[2] a, float[2] b) => (float[2] y) { y = Add(a, b) }'
    model = ir.from_proto(onnx.parser.parse_model(text))
    next(iter(model.graph)).version = 18
    assert is_standard(next(iter(from_any(model)[0].graph)), "Add")


@pytest.mark.newest
def test_a_version_that_came_after_the_table_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict(table()["", "Mod"].versions)
    newest = max(versions)
    monkeypatch.setitem(table()["", "Mod"].versions, newest, False)  # type: ignore[arg-type]
    text = '<ir_version: 8, opset_import: ["" : {}]> g (float[2] a, float[2] b) => (float[2] y) {{ y = Mod <fmod = 1> (a, b) }}'
    for opset, known in ((newest, False), (newest - 1, True)):
        model, _ = from_any(onnx.parser.parse_model(text.format(opset)))
        assert is_standard(next(iter(model.graph)), "Mod") == known
