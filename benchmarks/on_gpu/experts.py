"""A layer of experts as torch exports it, with matrices gathered for each token, and as we write it.

Sizes are experts, channels, channels inside and experts of a token. An attention of one head comes first, as only models with
attention are rewritten.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

import onnx_attnfuse
from benchmarks.harness import Benchmark, Bound, Race, Setting, numbers

SIZES = ((4, 256, 512, 2), (16, 1024, 768, 4), (64, 1024, 512, 8), (4, 32, 64, 2))
TOKENS = (1, 8, 128)
_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
layer ({type}[1, s, {c}] x) => ({type}[1, s, {c}] y)
<int64[2] flat = {{-1, {c}}}, int64[1] all = {{-1}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] count = {{{k}}},
 int64[3] copied = {{1, {k}, 1}}, int64[3] paired = {{-1, {k}, {c}}}>
{{ kt = Transpose<perm = [0, 2, 1]>(x) qk = MatMul(x, kt) small = Mul(qk, scale) level = Softmax<axis = -1>(small)
   seen = MatMul(level, x) tokens = Reshape(seen, flat) logits = MatMul(tokens, gate)
   p = Softmax<axis = -1>(logits) weights, chosen = TopK(p, count) which = Reshape(chosen, all)
   apart = Unsqueeze(tokens, one) copies = Expand(apart, copied) rows = Reshape(copies, flat)
   each = Gather(w1, which) column = Unsqueeze(rows, two) doubled = MatMul(each, column) wide = Squeeze(doubled, two)
   g, l = Split<axis = -1, num_outputs = 2>(wide) sigmoid = Sigmoid(g) silu = Mul(g, sigmoid) gated = Mul(silu, l)
   back = Gather(w2, which) inner = Unsqueeze(gated, two) out = MatMul(back, inner) narrow = Squeeze(out, two)
   factors = Reshape(weights, all) factor = Unsqueeze(factors, one) weighted = Mul(narrow, factor)
   pairs = Reshape(weighted, paired) summed = ReduceSum<keepdims = 0>(pairs, one)
   sizes = Shape(x) y = Reshape(summed, sizes) }}"""


def layer(sizes: tuple[int, ...], setting: Setting) -> onnx.ModelProto:
    """The layer as torch exports it, with weights of noise."""
    experts, channels, inner, count = sizes
    model = onnx.parser.parse_model(_TEXT.format(type=setting.type, c=channels, k=count))
    shapes = {"w1": (experts, 2 * inner, channels), "w2": (experts, channels, inner), "gate": (channels, experts)}
    arrays = {name: numbers(shape, setting.dtype, channels**-0.5, at) for at, (name, shape) in enumerate(shapes.items())}
    arrays["scale"] = np.asarray(channels**-0.5, setting.dtype)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def mixed(sizes: tuple[int, ...], setting: Setting) -> onnx.ModelProto:
    """The layer as we write it."""
    model = onnx_attnfuse.optimize(layer(sizes, setting), ep=setting.provider, verify="none", target="auto").model
    assert "MoE" in {node.op_type for node in model.graph.node}
    return model


def races(setting: Setting) -> Iterator[Race]:
    """A row for each size and number of tokens."""
    for sizes in setting.sizes(SIZES):
        for tokens in TOKENS:
            x = numbers((1, tokens, sizes[1]), setting.dtype, 1, 7)

            def bound(make: functools.partial[onnx.ModelProto], x: np.ndarray = x) -> Bound:
                return Bound(make().SerializeToString(), setting, {"x": x})

            forms = {"gathered": layer, "MoE": mixed}
            variants = {name: functools.partial(bound, functools.partial(make, sizes, setting)) for name, make in forms.items()}
            yield Race(f"{'x'.join(map(str, sizes))}, {tokens} tokens", variants)


BENCHMARK = Benchmark("Layers of experts", races)
