"""Formulas of operators that are no attention: the forms that they are found in, and what is nearly the same."""

from __future__ import annotations

import math

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.scopes import scopes
from onnx_attnfuse.language import Tensor, erf, mean, sigmoid, sqrt
from onnx_attnfuse.language.matcher.formula import Formula, FoundFormula

_TEXT = """<ir_version: 9, opset_import: ["" : 20]>
model ({t}[b, s, 8] x, {t}[b, s, 8] z, {t}[s, b, 8] turned) => ({t}[b, s, n] y) {{ {nodes} }}"""
_NUMBERS = {"root": 2**0.5, "inverse": 0.5**0.5, "one": 1, "mid": 0.5, "two": 2, "three": 3, "small": 1e-6, "factor": 1.702}
_ERF = "e = Erf(d) p = Add(one, e)"
_SQUARES = "q = Mul(x, x) m = ReduceMean(q, last) v = Add(m, small)"


@Formula
def gelu(x: Tensor) -> Tensor:
    return x * (1 + erf(x / math.sqrt(2))) / 2


@Formula
def normal(x: Tensor, epsilon: Tensor) -> Tensor:
    return x / sqrt(mean(x * x) + epsilon)


@Formula
def gated(gate: Tensor, line: Tensor, alpha: Tensor | None = None) -> Tensor:
    return gate * sigmoid(gate if alpha is None else gate * alpha) * line


def found(formula: Formula, nodes: str, dtype: str = "float") -> FoundFormula | None:
    """The formula at `y`."""
    model = onnx.parser.parse_model(_TEXT.format(t=dtype, nodes=nodes))
    kind = {"float": np.float32, "float16": np.float16}[dtype]
    arrays = {name: np.asarray(number, kind) for name, number in _NUMBERS.items()}
    arrays |= {"last": np.asarray([-1]), "first": np.asarray([1])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    loaded, _ = io.from_any(model)
    (scope,) = scopes(loaded)
    return formula.at(scope.graph.outputs[0], scope.facts)


def named(result: FoundFormula | None) -> dict[str, str | None]:
    assert result is not None
    return {name: value.name for name, value in result.values.items()}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("nodes", "x"),
    [
        (f"d = Div(x, root) {_ERF} m = Mul(x, p) y = Mul(m, mid)", "x"),
        (f"d = Mul(inverse, x) {_ERF} m = Mul(x, mid) y = Mul(m, p)", "x"),
        (f"d = Mul(x, inverse) {_ERF} m = Mul(p, mid) y = Mul(m, x)", "x"),
        (f"d = Mul(x, inverse) {_ERF} m = Div(x, two) y = Mul(p, m)", "x"),
        (f"h = Mul(x, z) d = Div(h, root) {_ERF} m = Mul(h, p) y = Mul(mid, m)", "h"),
        (f"h = Mul(x, three) d = Div(h, root) {_ERF} m = Mul(h, mid) y = Mul(m, p)", "h"),
        (f"h, other = Split<axis = -1, num_outputs = 2>(x) d = Div(h, root) {_ERF} m = Mul(h, p) y = Mul(mid, m)", "h"),
    ],
)
def test_factors_come_in_any_order(nodes: str, x: str, dtype: str) -> None:
    assert named(found(gelu, nodes, dtype)) == {"x": x}


@pytest.mark.parametrize(
    "nodes",
    [
        f"d = Mul(x, mid) {_ERF} m = Mul(x, mid) y = Mul(m, p)",
        f"d = Div(x, root) {_ERF} m = Mul(z, mid) y = Mul(m, p)",
        f"d = Div(x, root) {_ERF} y = Mul(x, p)",
        "d = Div(x, root) e = Erf(d) p = Add(two, e) m = Mul(x, p) y = Mul(m, mid)",
        f"h, other = Split<axis = -1, num_outputs = 2>(x) d = Div(h, root) {_ERF} m = Mul(other, p) y = Mul(mid, m)",
        f"c = Cast<to = 10>(x) w = Cast<to = 1>(c) d = Div(w, root) {_ERF} m = Mul(x, p) y = Mul(m, mid)",
    ],
    ids=["another factor inside", "another value", "no half", "another summand", "the other half", "rounded before"],
)
def test_what_is_nearly_the_same_is_another_formula(nodes: str) -> None:
    assert found(gelu, nodes) is None


@pytest.mark.parametrize(
    "nodes",
    [
        f"{_SQUARES} r = Sqrt(v) y = Div(x, r)",
        f"{_SQUARES} r = Sqrt(v) i = Reciprocal(r) y = Mul(i, x)",
        f"{_SQUARES} r = Sqrt(v) i = Div(one, r) y = Mul(x, i)",
        f"{_SQUARES} r = Sqrt(v) y = Div(x, r)".replace("Mul(x, x)", "Pow(x, two)"),
    ],
)
def test_a_mean_runs_along_the_last_axis(nodes: str) -> None:
    result = found(normal, nodes)
    assert named(result) == {"x": "x", "epsilon": "small"}
    assert result is not None
    assert result.numbers == {"epsilon": pytest.approx(1e-6)}
    assert {"ReduceMean", "Sqrt"} < {node.op_type for node in result.nodes}
    assert found(normal, nodes.replace("last", "first")) is None
    assert found(normal, nodes.replace("y = Div(x", "y = Div(z").replace("(i, x)", "(i, z)").replace("(x, i)", "(z, i)")) is None


def test_operands_lie_and_are_typed_as_the_result() -> None:
    nodes = "{x} s = Sigmoid(t) g = Mul(t, s) y = Mul(g, z)"
    assert named(found(gated, nodes.format(x="t = Identity(x)"))) == {"gate": "t", "line": "z"}
    assert found(gated, "t = Transpose<perm = [1, 0, 2]>(turned) s = Sigmoid(t) g = Mul(t, s) y = Mul(g, z)") is not None
    wide = "s = Sigmoid(x) g = Mul(x, s) w = Cast<to = 1>(g) v = Cast<to = 1>(z) y = Mul(w, v)"
    assert found(gated, wide, "float16") is None


@pytest.mark.parametrize(
    ("nodes", "numbers"),
    [
        ("s = Sigmoid(x) g = Mul(x, s) y = Mul(g, z)", {}),
        ("s = Sigmoid(x) g = Mul(z, s) y = Mul(x, g)", {}),
        ("a = Mul(factor, x) s = Sigmoid(a) g = Mul(s, x) y = Mul(z, g)", {"alpha": pytest.approx(1.702)}),
    ],
)
def test_an_operand_may_be_absent(nodes: str, numbers: dict[str, float]) -> None:
    result = found(gated, nodes)
    assert (named(result)["gate"], named(result)["line"]) == ("x", "z")
    assert result is not None
    assert result.numbers == numbers
