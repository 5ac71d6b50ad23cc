"""Rules of token-wise operators: tokens in another order give the same results in that order, as ONNX Runtime computes them."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.reasons import Reason
from tests.fusion.packing.encoders import run_source

_B, _S = 2, 3
_TOKENS: Marks = ("b", "s", "")
_HEADS: Marks = ("b", "", "s", "")
_MODEL = """<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>
one ({inputs}) => (float[{out}] y) <{constants}> {{ y = {node} }}"""
_WHOLE = "float[b, s, 4] x"
_MORE = f"{_WHOLE}, float[b, s, 4] z"
_FEW = "float[4] g = {1, 2, 3, 4}, float[4] a = {0, 1, 2, 3}"
_MATRIX = "float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}"


def _given(inputs: str, node: str, out: str, constants: str = _FEW) -> tuple[ir.Node, onnx.ModelProto, Tokens]:
    model = onnx.parser.parse_model(_MODEL.format(inputs=inputs, node=node, out=out, constants=constants))
    graph = ir.from_proto(model).graph
    (found,) = graph
    return found, model, Tokens(Facts(graph), sizes.symbol("b"), sizes.symbol("s"))


def _turned(array: np.ndarray, marks: Marks, order: np.ndarray) -> np.ndarray:
    """An array with its tokens in another order; one that is shorter is repeated for all entries and positions first."""
    lengths = [math.prod({"b": _B, "s": _S}[letter] for letter in mark) for mark in marks]
    padded = array.reshape((1,) * (len(marks) - array.ndim) + array.shape)
    shape = [length if mark else dim for mark, length, dim in zip(marks, lengths, padded.shape, strict=True)]
    whole = np.broadcast_to(padded, shape)
    split = whole.reshape([part for mark, dim in zip(marks, whole.shape, strict=True) for part in _parts(mark, dim)])
    letters = [letter for mark in marks for letter in (mark or "-")]
    places = [letters.index("b"), letters.index("s")]
    front = np.moveaxis(split, places, [0, 1])
    rows = front.reshape(_B * _S, *front.shape[2:])[order].reshape(front.shape)
    return np.moveaxis(rows, [0, 1], places).reshape(whole.shape)


def _parts(mark: str, dim: int) -> list[int]:
    return [{"b": _B, "s": _S}[letter] for letter in mark] or [dim]


def _feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), dict[str, np.ndarray]()
    for item in model.graph.input:
        shape = [{"b": _B, "s": _S}.get(dim.dim_param, dim.dim_value) for dim in item.type.tensor_type.shape.dim]
        is_float = item.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
        found[item.name] = rng.standard_normal(shape, np.float32) if is_float else rng.integers(0, 4, shape)
    return found


@pytest.mark.parametrize(
    ("inputs", "node", "out", "marks", "constants"),
    [
        (_WHOLE, "Tanh(x)", "b, s, 4", _TOKENS, _FEW),
        (_MORE, "Add(x, z)", "b, s, 4", _TOKENS, _FEW),
        (f"{_WHOLE}, float[s, 4] z", "Add(x, z)", "b, s, 4", _TOKENS, _FEW),
        (f"{_WHOLE}, float[b, 1, 4] z", "Sub(x, z)", "b, s, 4", _TOKENS, _FEW),
        (_WHOLE, "Mul(x, g)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, 2, s, 4] x, float[s, 4] z", "Mul(x, z)", "b, 2, s, 4", _HEADS, _FEW),
        (_MORE, "Concat<axis=-1>(x, z)", "b, s, 8", _TOKENS, _FEW),
        (_WHOLE, "Slice(x, start, end, axis)", "b, s, 2", _TOKENS, "int64[1] start={1}, int64[1] end={3}, int64[1] axis={2}"),
        (_WHOLE, "Gather<axis=2>(x, at)", "b, s, 3", _TOKENS, "int64[3] at = {3, 0, 3}"),
        (_WHOLE, "Gather<axis=2>(x, at)", "b, s", ("b", "s"), "int64 at = {3}"),
        (_WHOLE, "MatMul(x, w)", "b, s, 2", _TOKENS, _MATRIX),
        (_WHOLE, "com.microsoft.FusedMatMul<alpha=2.0>(x, w)", "b, s, 2", _TOKENS, _MATRIX),
        (_WHOLE, "LayerNormalization(x, g, a)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, s, 2, 2] x", "LayerNormalization<axis=2>(x, g)", "b, s, 2, 2", (*_TOKENS, ""), "float[2, 2] g = {1, 2, 3, 4}"),
        (_MORE, "com.microsoft.SkipLayerNormalization(x, z, g, a)", "b, s, 4", _TOKENS, _FEW),
        (_WHOLE, "Softmax(x)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, 2, s, 4] x", "Softmax<axis=1>(x)", "b, 2, s, 4", _HEADS, _FEW),
        (_WHOLE, "ReduceMax(x, axis)", "b, s, 1", _TOKENS, "int64[1] axis = {-1}"),
        ("float[b, 2, s, 4] x", "ReduceMean<keepdims=0>(x, axis)", "b, s, 4", _TOKENS, "int64[1] axis = {1}"),
        ("float[b, s, 2, 2] x", "ReduceSum<keepdims=0>(x, axis)", "b, s", ("b", "s"), "int64[2] axis = {2, -1}"),
        ("float[b, 2, s, 4] x", "Transpose<perm=[2, 0, 1, 3]>(x)", "s, b, 2, 4", ("s", "b", "", ""), _FEW),
        (_WHOLE, "Reshape(x, to)", "b, s, 2, 2", (*_TOKENS, ""), "int64[4] to = {0, 0, 2, 2}"),
        (_WHOLE, "Unsqueeze(x, at)", "b, 1, s, 4", _HEADS, "int64[1] at = {1}"),
        ("float[9, 4] x, int64[b, s] z", "Gather(x, z)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, 4, s] x", "MatMul(w, x)", "b, 2, s", ("b", "", "s"), "float[2, 4] w = {1, 2, 3, 4, 5, 6, 7, 8}"),
        ("float[b, s, 2, 4] x, float[4, 2] w", "MatMul(x, w)", "b, s, 2, 2", (*_TOKENS, ""), _FEW),
        ("float[b, s, 3, 2, 4] x, float[3, 4, 2] w", "MatMul(x, w)", "b, s, 3, 2, 2", (*_TOKENS, "", ""), _FEW),
        ("float[b, s, 1, 4] x, float[b, s, 4, 2] z", "MatMul(x, z)", "b, s, 1, 2", (*_TOKENS, ""), _FEW),
    ],
)  # fmt: skip
def test_results_move_with_their_tokens(inputs: str, node: str, out: str, marks: Marks, constants: str) -> None:
    found, model, tokens = _given(inputs, node, out, constants)
    step = read_step(found, found.outputs[0], marks, tokens, in_place=True)
    assert isinstance(step, Step), step
    feeds, order = _feeds(model), np.random.default_rng(1).permutation(_B * _S)
    moved = {value.name or "": own for value, own in step.inputs()}
    turned = {name: _turned(array, moved[name], order) if name in moved else array for name, array in feeds.items()}
    for item in model.graph.input:  # one that is the same for all is handed over once for each
        del item.type.tensor_type.shape.dim[:]
        item.type.tensor_type.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=dim) for dim in turned[item.name].shape)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    once = _given(inputs, node, out, constants)[1]
    np.testing.assert_allclose(run_source(model, turned)[0], _turned(run_source(once, feeds)[0], marks, order), rtol=1e-6)
    for value, own in step.inputs():  # the same step, from an input
        again = read_step(found, value, own, tokens, in_place=True)
        assert isinstance(again, Step)
        assert (again.marks, again.outputs) == (step.marks, step.outputs)


@pytest.mark.parametrize(
    ("inputs", "node", "out", "marks", "constants"),
    [
        (_WHOLE, "Softmax<axis=1>(x)", "b, s, 4", _TOKENS, _FEW),
        (_WHOLE, "ReduceMean(x, axis)", "b, 1, 4", _TOKENS, "int64[1] axis = {1}"),
        (_WHOLE, "CumSum(x, axis)", "b, s, 4", _TOKENS, "int64 axis = {1}"),
        (_WHOLE, "Slice(x, start, end, axis)", "b, t, 4", _TOKENS, "int64[1] start={0}, int64[1] end={3}, int64[1] axis={1}"),
        (_WHOLE, "Gather<axis=1>(x, at)", "b, 4", _TOKENS, "int64 at = {0}"),
        (_MORE, "Concat<axis=1>(x, z)", "b, t, 4", _TOKENS, _FEW),
        (_WHOLE, "LayerNormalization<axis=1>(x, g)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, s, 4] x, float[b, 4, s] z", "MatMul(x, z)", "b, s, s", _TOKENS, _FEW),
        ("float[s, b, 4] x", "Reshape(x, to)", "b, s, 4", _TOKENS, "int64[3] to = {2, 3, 4}"),
        ("float[b, s, 4] x, float[b, 4, 4] z", "MatMul(x, z)", "b, s, 4", _TOKENS, _FEW),
        ("float[b, s, s] x, float[b, s, 4] z", "MatMul(x, z)", "b, s, 4", _TOKENS, _FEW),
    ],
)
def test_operators_that_mix_positions_are_no_steps(inputs: str, node: str, out: str, marks: Marks, constants: str) -> None:
    found, _, tokens = _given(inputs, node, out, constants)
    step = read_step(found, found.outputs[0], marks, tokens, in_place=True)
    assert isinstance(step, Reason)
    assert step.code == "not-position-wise"


@pytest.mark.parametrize(
    ("inputs", "node", "out", "marks"),
    [
        ("float[9, 4] x, int64[b, s] z", "Gather(x, z)", "b, s, 4", _TOKENS),
        ("float[2, 4] x, float[b, 4, s] z", "MatMul(x, z)", "b, 2, s", ("b", "", "s")),
        ("float[b, s, 3, 2, 4] x, float[3, 4, 2] z", "MatMul(x, z)", "b, s, 3, 2, 2", (*_TOKENS, "", "")),
    ],
    ids=["a table", "columns", "several matrices"],
)
def test_some_take_tokens_on_axes_of_their_own_only(inputs: str, node: str, out: str, marks: Marks) -> None:
    """As rows of all entries they would be read as something else."""
    found, _, tokens = _given(inputs, node, out)
    assert isinstance(read_step(found, found.outputs[0], marks, tokens, in_place=True), Step)
    assert isinstance(read_step(found, found.outputs[0], marks, tokens), Reason)


def test_tokens_are_no_matrix_that_is_the_same_for_all() -> None:
    """A square product of rows with themselves: each result is one of all rows."""
    found, _, tokens = _given("float[6, 6] x", "MatMul(x, x)", "6, 6")
    (first, _) = found.inputs
    assert first is not None
    step = read_step(found, first, ("bs", ""), Tokens(tokens.facts, 2, 3))
    assert isinstance(step, Reason)
    assert "the same for all" in step.message
