"""Operators once more with an axis in front: each index of it gives what the operator gives for that alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_attnfuse.graph.along import again, along
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.facts import Facts
from tests.support.bundled import run
from tests.support.small_models import parsed

_MODEL = """<ir_version: 9, opset_import: ["" : 18]>
one (float[4, 3, 6] x, float[4, 3, 6] z, float[3, 6] w, float[4, 6, 2] m) => ({results})
<float[6] g = {{1, 2, 3, 4, 5, 6}}, float[6, 2] c = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}, int64[1] first = {{1}},
 int64[1] last = {{3}}, int64[2] pick = {{2, 0}}, int64[3] to = {{3, 8, 3}},
 int64[4] more = {{2, 4, 3, 6}}, int64[3] times = {{1, 2, 3}}, int64 one_of = {{1}}> {{ {results} = {node} }}"""
_SHAPES = {"x": (4, 3, 6), "z": (4, 3, 6), "w": (3, 6), "m": (4, 6, 2)}
_TURNS = 5


def _again(node: str, results: str, moving: set[str]) -> tuple[ir.Model, ir.Model]:
    """The model of a node, and one in which some inputs have an axis in front."""
    alone = ir.from_proto(parsed(_MODEL.format(node=node, results=results)))
    wide = ir.from_proto(parsed(_MODEL.format(node=node, results=results)))
    facts = Facts(wide.graph)
    builder = Builder(wide.graph, facts, 18, {value.name or "" for value in wide.graph.inputs})
    (found,) = wide.graph
    builder.at(found)
    fed = dict[int, ir.Value]()
    axes = along(found, facts)
    assert not isinstance(axes, str)
    for place, item in enumerate(found.inputs):
        if item is not None and item.name in moving:
            dims = (_TURNS, *_SHAPES[item.name or ""])
            value = ir.Value(name=f"{item.name}_each", shape=ir.Shape(dims), type=item.type)
            facts.record(value, dims, item.dtype)
            wide.graph.inputs.append(value)
            fed[place] = builder.reshape(value, [_TURNS, *[1] * (len(axes[place]) - len(dims) + 1), *dims[1:]])
    marks = ("",) * (facts.rank(found.inputs[0]) or 0) if found.inputs[0] is not None else ()
    outputs = again(found, fed, builder, marks, [("",) * len(dims_of(builder, value)) for value in found.outputs])
    wide.graph.outputs[:] = outputs[: len(found.outputs)]
    return alone, wide


@pytest.mark.parametrize(
    ("node", "results", "moving"),
    [
        ("Exp(x)", "y", "x"),
        ("Add(x, z)", "y", "xz"),
        ("Sub(x, z)", "y", "z"),
        ("Mul(x, w)", "y", "xw"),
        ("Sub(x, w)", "y", "w"),
        ("Concat<axis=1>(x, z)", "y", "xz"),
        ("Split<axis=-1, num_outputs=2>(x)", "y, u", "x"),
        ("Slice(x, first, last, first)", "y", "x"),
        ("Gather<axis=1>(x, pick)", "y", "x"),
        ("Gather<axis=0>(x, one_of)", "y", "x"),
        ("Softmax<axis=1>(x)", "y", "x"),
        ("Softmax(x)", "y", "x"),
        ("LayerNormalization<axis=2>(x, g)", "y", "x"),
        ("ReduceSum<keepdims=0>(x, first)", "y", "x"),
        ("ReduceMax(x, first)", "y", "x"),
        ("MatMul(x, c)", "y", "x"),
        ("MatMul(x, m)", "y", "x"),
        ("MatMul(x, m)", "y", "m"),
        ("MatMul(x, m)", "y", "xm"),
        ("MatMul(w, m)", "y", "w"),
        ("MatMul(w, m)", "y", "wm"),
        ("Transpose<perm=[2, 0, 1]>(x)", "y", "x"),
        ("Reshape(x, to)", "y", "x"),
        ("Unsqueeze(x, first)", "y", "x"),
        ("Expand(x, more)", "y", "x"),
        ("Tile(x, times)", "y", "x"),
    ],
)
def test_each_index_in_front_gives_what_it_gives_alone(node: str, results: str, moving: str) -> None:
    alone, wide = _again(node, results, set(moving))
    rng = np.random.default_rng(0)
    single = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}
    each = {name: rng.standard_normal((_TURNS, *single[name].shape)).astype(np.float32) for name in moving}
    found = list(run(ir.to_proto(wide), single | {f"{name}_each": array for name, array in each.items()}).values())
    for turn in range(_TURNS):
        wanted = run(ir.to_proto(alone), single | {name: array[turn] for name, array in each.items()}).values()
        for result, own in zip(found, wanted, strict=True):
            np.testing.assert_allclose(result[turn], own, rtol=1e-5)


@pytest.mark.parametrize(
    ("node", "axes"),
    [
        ("Softmax<axis=1>(x)", {0: (0, None, 2)}),
        ("LayerNormalization<axis=1>(x, w)", {0: (0, None, None), 1: (0, 1, 2), 2: (0, 1, 2)}),
        ("ReduceSum<keepdims=0>(x, first)", {0: (0, None, 1)}),
        ("Gather<axis=1>(x, one_of)", {0: (0, None, 1), 1: ()}),
        ("MatMul(w, m)", {0: (0, 1, None), 1: (0, None, 2), 2: (0, 1, 2)}),
        ("Expand(x, more)", {0: (1, 2, 3)}),
        ("Tile(x, times)", {0: (0, None, None)}),
    ],
)
def test_axes_that_are_mixed_go_along_with_none(node: str, axes: dict[int, tuple[int | None, ...]]) -> None:
    model = ir.from_proto(parsed(_MODEL.format(node=node, results="y")))
    assert along(next(iter(model.graph)), Facts(model.graph)) == axes


@pytest.mark.parametrize(
    ("node", "results"), [("CumSum(x, one_of)", "y"), ("Slice(x, first, t, first)", "y"), ("TopK(x, first)", "y, u")]
)
def test_others_are_known_to_go_along_no_axis(node: str, results: str) -> None:
    model = ir.from_proto(parsed(_MODEL.replace("float[3, 6] w", "int64[1] t").format(node=node, results=results)))
    assert isinstance(along(next(iter(model.graph)), Facts(model.graph)), str)
