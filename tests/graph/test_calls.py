"""What functions return: shapes and types that a run of the model confirms, and no more than follows from the inputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.scopes import scopes
from tests.support.bundled import run

_HEAD = '<ir_version: 10, opset_import: ["" : 18, "own" : 1]>'
_BODY = """
<domain: "own", opset_import: ["" : 18]> f (p, q) => (r) {{ {} }}
"""
A, B, C, D = (sizes.symbol(name) for name in "abcd")


def _result(body: str, more: str = "", call: str = "z = own.f(x, y)") -> tuple[Dims | None, ir.DataType | None, onnx.ModelProto]:
    """Shape and type of what a call returns that no annotation describes, and the model."""
    graph = f"g (float[a,b,c] x, float[a,b,d] y) => (float z) {{ {call} }}"
    proto = onnx.parser.parse_model(_HEAD + graph + _BODY.format(body) + more)
    proto.graph.output[0].ClearField("type")
    model = ir.from_proto(proto)
    facts = next(iter(scopes(model))).facts
    return facts.dims(model.graph.outputs[0]), facts.dtype(model.graph.outputs[0]), proto


_KNOWN: list[tuple[str, Dims, ir.DataType]] = [
    ("r = Transpose<perm=[2, 0, 1]>(p)", (C, A, B), ir.DataType.FLOAT),
    ("r = Concat<axis=-1>(p, q)", (A, B, C + D), ir.DataType.FLOAT),
    ("s = Identity(p) t = Neg(s) r = Add(s, t)", (A, B, C), ir.DataType.FLOAT),
    ("r = Shape(p)", (3,), ir.DataType.INT64),
    ("r = Cast<to=10>(q)", (A, B, D), ir.DataType.FLOAT16),
]


@pytest.mark.parametrize(("body", "dims", "dtype"), _KNOWN, ids=[body for body, *_ in _KNOWN])
def test_a_call_returns_what_its_function_makes(body: str, dims: Dims, dtype: ir.DataType) -> None:
    found, kind, proto = _result(body)
    assert (found, kind) == (dims, dtype)
    numbers = {"a": 2, "b": 3, "c": 4, "d": 5}
    feeds = {name: np.zeros([2, 3, length], np.float32) for name, length in (("x", 4), ("y", 5))}
    flat = onnx.inliner.inline_local_functions(proto)
    flat.graph.output[0].type.tensor_type.elem_type = dtype
    assert run(flat, feeds)["z"].shape == tuple(sizes.evaluate(dim, numbers) for dim in dims)


@pytest.mark.parametrize(
    "body",
    [
        "r = Mul(p, q)",
        "r = own.unknown(p)",
        "r = Compress<axis=-1>(p, q)",
    ],
)
def test_a_length_that_does_not_follow_from_the_inputs_is_new(body: str) -> None:
    dims, _, _ = _result(body)
    assert dims is None or dims[-1] not in {C, D}


def test_functions_that_call_functions_are_known_by_their_innermost() -> None:
    more = _BODY.replace(" f ", " g ").format("r = Concat<axis=-1>(p, q)")
    dims, dtype, _ = _result("s = own.g(p, q) r = own.g(s, q)", more)
    assert (dims, dtype) == ((A, B, C + D + D), ir.DataType.FLOAT)


def test_each_call_has_the_sizes_of_its_own_inputs() -> None:
    dims, _, _ = _result("r = Concat<axis=-1>(p, q)", call="s = own.f(x, y) z = own.f(s, s)")
    assert dims == (A, B, 2 * (C + D))


def test_a_function_that_calls_itself_returns_what_is_unknown() -> None:
    assert _result("r = own.f(p, q)")[0] is None


def test_values_of_two_branches_with_one_name_have_sizes_of_their_own() -> None:
    branch = "{name} () => (int64 m) {{ m = NonZero({of}) }}"
    both = f"then_branch = {branch.format(name='yes', of='x')}, else_branch = {branch.format(name='no', of='y')}"
    text = f"g (float[a] x, float[b] y, bool given) => (int64 z) {{ z = If(given)<{both}> }}"
    proto = onnx.parser.parse_model(_HEAD + text)
    proto.graph.output[0].ClearField("type")
    model = ir.from_proto(proto)
    facts = next(iter(scopes(model))).facts
    inside = [facts.dims(graph.as_graph().outputs[0]) for graph in next(iter(model.graph)).attributes.values()]
    shapes = [*inside, facts.dims(model.graph.outputs[0])]
    assert len({dims[1] for dims in shapes if dims is not None}) == len(shapes)
