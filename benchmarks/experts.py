"""A layer of experts as torch exports it, with matrices gathered for each token, and as we write it.

    python benchmarks/experts.py OUT.md [--provider cuda] [--sizes 16x1024x768x4,...] [--tokens 1,8,128] [--rounds 40]

Sizes are experts, channels, channels inside and experts of a token. Both forms are sessions of one process and take turns. Times
are medians of runs whose inputs and outputs are bound to memory of the device, in float16 on CUDA and float32 on the CPU, with
all optimizations of ONNX Runtime. An attention of one head stands in front, as only models with attention are rewritten.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper

import onnx_attnfuse
from benchmarks.bound import Bound, in_turns

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
_WARM = 3


def layer(experts: int, channels: int, inner: int, count: int, dtype: Any) -> onnx.ModelProto:
    """The layer as torch exports it, with weights of noise."""
    kind = {np.float16: "float16", np.float32: "float"}[dtype]
    model = onnx.parser.parse_model(_TEXT.format(type=kind, c=channels, k=count))
    rng = np.random.default_rng(0)
    shapes = {"w1": (experts, 2 * inner, channels), "w2": (experts, channels, inner), "gate": (channels, experts)}
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape, np.float32) / channels**0.5).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(channels**-0.5, dtype), "scale"))
    return model


def row(sizes: tuple[int, ...], tokens: int, provider: str, rounds: int) -> str:
    """A line of the table."""
    dtype = np.float16 if provider == "cuda" else np.float32
    before = layer(*sizes, dtype)
    after = onnx_attnfuse.optimize(before, ep=provider, verify="none", target="auto").model
    assert "MoE" in {node.op_type for node in after.graph.node}
    x = np.random.default_rng(1).standard_normal((1, tokens, sizes[1])).astype(dtype)
    forms = {name: Bound(model.SerializeToString(), provider, {"x": x}) for name, model in (("gathered", before), ("MoE", after))}
    runs = {name: form.run for name, form in forms.items()}
    in_turns(runs, _WARM)
    gathered, mixed = in_turns(runs, rounds).values()
    wanted, found = (form.output().numpy().astype(np.float32) for form in forms.values())
    apart = np.abs(wanted - found).max() / np.abs(wanted).max()
    words = "x".join(map(str, sizes))
    return f"| {words} | {tokens} | {gathered:.3f} | {mixed:.3f} | {gathered / mixed:.1f} | {apart:.0e} |"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--sizes", default="4x256x512x2,16x1024x768x4,64x1024x512x8")
    parser.add_argument("--tokens", default="1,8,128")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    lines = [f"onnxruntime {onnxruntime.__version__}, {chosen.provider}; milliseconds of the layer and one attention.", ""]
    lines += ["| experts x channels x inside x chosen | tokens | gathered | MoE | gain | apart |", "|---|---|---|---|---|---|"]
    for sizes in chosen.sizes.split(","):
        for tokens in chosen.tokens.split(","):
            lines.append(row(tuple(map(int, sizes.split("x"))), int(tokens), chosen.provider, chosen.rounds))
            print(lines[-1], flush=True)
            chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
