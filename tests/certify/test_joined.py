"""Sums with their normalization, and with their Gelu, as one operator: proved, and refused where one thing is wrong."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import onnx
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.certify import claims, terms
from onnx_attnfuse.certify.pairing import Pair
from onnx_attnfuse.certify.solvers import Solver

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"
_NORMS = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
_BEFORE = """<ir_version: 10, opset_import: ["" : 20]> g (float[B,S,8] x) => (float[B,S,8] y) <float[8] b = {1,2,3,4,5,6,7,8}> {
s = Add(x, b)  half = Constant<value_float = 0.5>()  one = Constant<value_float = 1.0>()  RULE }"""
_AFTER = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]> g (float[B,S,8] x) => (float[B,S,8] y)
<float[8] b = {1,2,3,4,5,6,7,8}> { y = RULE }"""
_GELU = """root = Constant<value_float = 0.70710677>()  r = Mul(s, root)  e = Erf(r)  p = Add(e, one)
m = Mul(s, p)  y = Mul(m, half)"""
_TANH = """c = Constant<value_float = 0.044715>()  k = Constant<value_float = 0.7978846>()  q = Mul(s, s)  t = Mul(q, s)
u = Mul(t, c)  v = Add(s, u)  w = Mul(v, k)  e = Tanh(w)  p = Add(e, one)  m = Mul(s, half)  y = Mul(m, p)"""
_QUICK = """a = Constant<value_float = 1.702>()  r = Mul(x, a)  e = Sigmoid(r)  y = Mul(x, e)"""


def unproved(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    pair, found = Pair(ir.serde.deserialize_model(before), ir.serde.deserialize_model(after)), list[str]()
    judge = Solver("z3").proves
    assert pair.claims
    for claim in pair.claims:
        terms.restart()
        if not claims.prove(pair, claim, judge).proved:
            found.append(claim.name)
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_GELU, "com.microsoft.BiasGelu(x, b)"),
        (_GELU, "com.microsoft.Gelu(s) s = Add(x, b)"),
        (_TANH, "com.microsoft.FastGelu(x, b)"),
        (_QUICK, "com.microsoft.QuickGelu<alpha = 1.702>(x)"),
    ],
)
def test_a_gelu_that_is_spelled_out_is_one_operator(before: str, after: str) -> None:
    assert unproved(_model(_BEFORE, before), _model(_AFTER, after)) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_GELU, "com.microsoft.Gelu(x)"),
        (_GELU, "com.microsoft.FastGelu(x, b)"),
        (_GELU.replace("0.70710677", "0.75"), "com.microsoft.BiasGelu(x, b)"),
        (_GELU.replace("Mul(s, p)", "Mul(x, p)"), "com.microsoft.BiasGelu(x, b)"),
        (_GELU.replace("Mul(m, half)", "Identity(m)"), "com.microsoft.BiasGelu(x, b)"),
        (_TANH.replace("0.044715", "0.047"), "com.microsoft.FastGelu(x, b)"),
        (_TANH, "com.microsoft.BiasGelu(x, b)"),
        (_QUICK, "com.microsoft.QuickGelu<alpha = 1.5>(x)"),
    ],
)
def test_another_gelu_is_not_proved(before: str, after: str) -> None:
    assert unproved(_model(_BEFORE, before), _model(_AFTER, after)) == ["y"]


def _model(text: str, rule: str) -> onnx.ModelProto:
    if " s = " in rule:  # what is below stands behind what it reads
        last, first = rule.split(" s = ")
        return onnx.parser.parse_model(text.replace("y = RULE", f"s = {first}  y = {last}"))
    return onnx.parser.parse_model(text.replace("RULE", rule))


def _fused(name: str, folder: pathlib.Path) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    source, result = BUNDLED / f"{name}.onnx", folder / "fused.onnx"
    onnx_attnfuse.optimize(source, verify="none", ep="cuda").save(result)
    return onnx.load(source), onnx.load(result)


@pytest.mark.parametrize("name", ["llama_past__dyn18__sdpa", "gpt2__ts17__eager"])
def test_a_sum_that_goes_on_and_its_normalization_are_proved_as_one_operator(name: str, tmp_path: pathlib.Path) -> None:
    before, after = _fused(name, tmp_path)
    made = {output for node in after.graph.node if node.op_type in _NORMS for output in node.output if output}
    assert len(made) == 6
    assert made.isdisjoint(unproved(before, after))


def _other_epsilon(node: onnx.NodeProto) -> None:
    for item in node.attribute:
        item.f *= 100


def _skip_twice(node: onnx.NodeProto) -> None:
    node.input[1] = node.input[0]


def _outputs_turned(node: onnx.NodeProto) -> None:
    node.output[0], node.output[3] = node.output[3], node.output[0]


@pytest.mark.parametrize("change", [_other_epsilon, _skip_twice, _outputs_turned])
@pytest.mark.parametrize("name", ["llama_past__dyn18__sdpa", "gpt2__ts17__eager"])
def test_a_normalization_that_is_wrong_by_one_thing_is_not_proved(
    name: str, change: Callable[[onnx.NodeProto], None], tmp_path: pathlib.Path
) -> None:
    before, after = _fused(name, tmp_path)
    node = next(node for node in after.graph.node if node.op_type in _NORMS)
    wanted = {output for output in node.output if output}
    change(node)
    assert wanted & set(unproved(before, after))
