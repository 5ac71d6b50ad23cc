"""Encoders of two layers, and how packed ones are compared with them."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from numpy.typing import NDArray

LAYER = """
   q{i} = MatMul({x}, wq) k{i} = MatMul({x}, wk) v{i} = MatMul({x}, wv) qb{i} = Add(q{i}, bq)
   q4{i} = Reshape(qb{i}, heads) k4{i} = Reshape({k}, heads) v4{i} = Reshape(v{i}, heads)
   qt{i} = Transpose<perm=[0, 2, 1, 3]>(q4{i}) kt{i} = Transpose<perm=[0, 2, 3, 1]>(k4{i})
   vt{i} = Transpose<perm=[0, 2, 1, 3]>(v4{i}) qk{i} = MatMul(qt{i}, kt{i})
   scaled{i} = Mul(qk{i}, scale) masked{i} = Add(scaled{i}, bias)
   weights{i} = Softmax<axis=-1>(masked{i}) mixed{i} = MatMul(weights{i}, vt{i})
   back{i} = Transpose<perm=[0, 2, 1, 3]>(mixed{i}) flat{i} = Reshape(back{i}, joined)
   wide{i} = MatMul(flat{i}, wo) sum{i} = Add(wide{i}, {x}) {between}
   mean{i} = ReduceMean<keepdims=1>({s}, channels) centred{i} = Sub({s}, mean{i}) square{i} = Mul(centred{i}, centred{i})
   var{i} = ReduceMean<keepdims=1>(square{i}, channels) safe{i} = Add(var{i}, epsilon) root{i} = Sqrt(safe{i})
   unit{i} = Div(centred{i}, root{i}) y{i} = Mul(unit{i}, gamma)
"""
TEXT = """<ir_version: 9, opset_import: ["" : 18]>
encoder (int64[b, s] ids, int64[b, s] mask{more}) => (float[b, s, 16] out{outputs})
<int64[4] heads = {{0, 0, 4, 4}}, int64[3] joined = {{0, 0, 16}},
 int64[1] channels = {{-1}}, int64[1] positions = {{1}}, int64[2] middle = {{1, 2}}, int64[1] zero = {{0}}, int64 first = {{0}},
 int64[1] last = {{9223372036854775807}}, float scale = {{0.5}}, float open = {{0}}, float closed = {{-3.4028234663852886e38}},
 float epsilon = {{0.00001}}>
{{ embedded = Gather(table, ids) length = Shape<start=1, end=2>(ids) near = Slice(places, zero, length, zero)
   x = Add(embedded, near) seen = Cast<to=9>(mask) row = Unsqueeze(seen, middle) {bias} {layers} {end} }}"""
SQUARE = (16, 16)
WEIGHTS = {"table": (20, 16), "places": (9, 16), "wq": SQUARE, "wk": SQUARE, "wv": SQUARE, "wo": SQUARE}
WEIGHTS |= {"bq": (16,), "gamma": (16,), "kernel": (16, 16, 3)}
PADDING = "bias = Where(row, open, closed)"
CAUSAL = """
   count = Squeeze(length) rows = Range(first, count, one) i = Unsqueeze(rows, positions) j = Unsqueeze(rows, zero)
   past = LessOrEqual(j, i) both = And(row, past) bias = Where(both, open, closed)"""
SLOPED = """
   count = Squeeze(length) rows = Range(first, count, one) i = Unsqueeze(rows, positions) j = Unsqueeze(rows, zero)
   behind = Sub(i, j) slope = Cast<to=1>(behind) padded = Where(row, open, closed) bias = Add(padded, slope)"""
GIVEN = "padded = Where(row, open, closed) bias = Add(padded, given)"
OUT = "out = Identity(y1)"
CONVOLVED = """
   turned{i} = Transpose<perm=[0, 2, 1]>(sum{i}) local{i} = Conv<pads=[1, 1]>(turned{i}, kernel)
   other{i} = Transpose<perm=[0, 2, 1]>(local{i})"""
ACROSS = "other{i} = Softmax<axis=1>(sum{i})"
MEAN = "all{i} = ReduceMean<keepdims=1>(sum{i}, positions) other{i} = Add(sum{i}, all{i})"


def encoder(
    *,
    bias: str = PADDING,
    between: str = "",
    after: str = "sum{i}",
    end: str = OUT,
    more: str = "",
    outputs: str = "",
    keys: str = "",
) -> onnx.ModelProto:
    """Two layers."""
    layers = ""
    for index, x in enumerate(("x", "y0")):
        own = {"i": index, "x": x, "k": f"k{index}" if index or not keys else keys, "s": after.format(i=index)}
        layers += LAYER.format(**own, between=between.format(i=index))
    text = TEXT.format(bias=bias, layers=layers, end=end, more=more, outputs=outputs).replace(
        "int64 first", "int64 one = {1}, int64 first"
    )
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        array = rng.standard_normal(shape).astype(np.float32) * 0.5
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def operators(model: onnx.ModelProto) -> collections.Counter[str]:
    """Operators, those in branches too."""
    found: collections.Counter[str] = collections.Counter()
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        for node in graph.node:
            found[node.op_type] += 1
            pending += [item.g for item in node.attribute if item.HasField("g")]
    return found


def feeds_for(mask: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {"ids": np.random.default_rng(1).integers(0, 20, mask.shape), "mask": mask}


def padded_right() -> NDArray[Any]:
    return np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


def run_source(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds))
