"""Attention on the CPU, each form as one operator and spelled out: `python -m benchmarks.on_cpu attention|bias|norm|models`.

`attention` is exported, by onnxscript and by us; `bias` has a bias that is an input or a product of the queries; `norm` is the
normalization of a residual sum; `models` those of `python -m benchmarks.exports bias`, from the folder, beside ours.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from benchmarks import exports
from benchmarks.harness import Benchmark, Bound, Race, Setting, command, model, numbers

_ROWS = 2
_BIASES = {"none": "", "b n s t": "{b}, {n}, {s}, {s}", "1 n s t": "1, {n}, {s}, {s}", "of the queries": ""}
_SCORES = {
    "spelled out": """k4{i} = Reshape(k{i}, split) v4{i} = Reshape(v{i}, split) kt{i} = Transpose<perm = [0, 2, 3, 1]>(k4{i})
        vt{i} = Transpose<perm = [0, 2, 1, 3]>(v4{i}) raw{i} = MatMul(qt{i}, kt{i}) small{i} = Mul(raw{i}, scale)
        sum{i} = {added} p{i} = Softmax<axis = -1>(sum{i}) z{i} = MatMul(p{i}, vt{i}) zt{i} = Transpose<perm = [0, 2, 1, 3]>(z{i})
        y{i} = Reshape(zt{i}, flat)""",
    "MultiHeadAttention": "y{i} = com.microsoft.MultiHeadAttention<num_heads = {n}, scale = {scale}>(q{i}, k{i}, v{i}{handed})",
}
_TURNED = "q4{i} = Reshape(q{i}, split) qt{i} = Transpose<perm = [0, 2, 1, 3]>(q4{i}) "
_NORMS = {
    "Add, normalization": "s{i} = Add(x{i}, r{i}) y{i} = {op}<axis = -1, epsilon = 0.00001>(s{i}, g{shift})",
    "one operator": "y{i}{total} = com.microsoft.Skip{op}<epsilon = 0.00001>(x{i}, r{i}, g{shift})",
    "Sum, normalization": "s{i} = Sum(x{i}, r{i}) y{i} = {op}<axis = -1, epsilon = 0.00001>(s{i}, g{shift})",
}


def exported(setting: Setting) -> Iterator[Race]:
    """A row for each mask and length, padding on the right."""
    exports.quiet()
    for kind in exports.KINDS:
        path = exports.attention(setting.folder, kind, 12, 64, "float32")
        ours = ir.to_proto(onnx_attnfuse.optimize(path, ep="cpu", verify="none").model).SerializeToString()
        forms = {"unfused": path, "onnxscript": path.with_suffix(".onnxscript.onnx"), "ours": ours}
        for length in (32,) if setting.quick else (32, 64, 128, 256, 512, 1024, 2048):
            mask = (np.arange(length)[None] < length - length // 4).astype(np.int64)
            feeds = {
                f"{part}{at}": numbers((1, length, 768), np.float32, 1, at) for at in range(exports.LAYERS) for part in "qkv"
            }
            variants = {name: functools.partial(Bound, form, setting, {"mask": mask, **feeds}) for name, form in forms.items()}
            yield Race(f"{kind.replace('_', ' + ')}, {length}", variants, each=exports.LAYERS)


def scored(form: str, bias: str, heads: int, head: int, length: int, setting: Setting) -> Bound:
    """Attentions whose bias is an input, or a product of the queries."""
    width, feeds, lines, inputs = heads * head, dict[str, Any](), list[str](), list[str]()
    shape = _BIASES[bias].format(b=1, n=heads, s=length)
    for i in range(_ROWS):
        feeds |= {f"{part}{i}": numbers((1, length, width), np.float32, 1, at) for at, part in enumerate("qkv")}
        inputs += [f"float[1, {length}, {width}] {part}{i}" for part in "qkv"]
        if shape:
            feeds[f"m{i}"] = numbers(tuple(map(int, shape.split(","))), np.float32, 1, 5)
            inputs.append(f"float[{shape}] m{i}")
        if bias == "of the queries":
            feeds[f"w{i}"] = numbers((head, length), np.float32, 0.1, 6)
            inputs.append(f"float[{head}, {length}] w{i}")
            lines.append(f"m{i} = MatMul(qt{i}, w{i})")
        if form == "spelled out" or bias == "of the queries":
            lines.insert(0, _TURNED.format(i=i))
        added = f"Identity(small{i})" if bias == "none" else f"Add(small{i}, m{i})"
        handed = "" if bias == "none" else f', "", "", m{i}'
        lines.append(_SCORES[form].format(i=i, added=added, handed=handed, n=heads, scale=head**-0.5))
    outputs = ", ".join(f"float[1, {length}, {width}] y{i}" for i in range(_ROWS))
    arrays = {"split": np.asarray([0, 0, heads, head]), "flat": np.asarray([0, 0, width]), "scale": np.float32(head**-0.5)}
    return Bound(model(" ".join(lines), f"({', '.join(inputs)}) => ({outputs})", arrays, 18), setting, feeds)


def biases(setting: Setting) -> Iterator[Race]:
    """A row for each size and bias."""
    for heads, head in setting.some(((16, 64), (12, 64), (8, 32), (32, 128), (2, 16))):
        for bias in _BIASES:
            for length in (16,) if setting.quick else (16, 32, 64, 96, 128, 256, 512):
                variants = {form: functools.partial(scored, form, bias, heads, head, length, setting) for form in _SCORES}
                yield Race(f"{heads}x{head}, bias {bias}, {length}", variants, each=_ROWS)


def normalized(form: str, kind: str, width: int, length: int, setting: Setting) -> Bound:
    """Residual sums and their normalization, where both are looked at elsewhere or the normalization alone."""
    simple, both, lines, inputs = kind.startswith("RMS"), kind.endswith("sum too"), list[str](), list[str]()
    words = {"op": f"{'Simplified' * simple}LayerNormalization", "shift": "" if simple else ", c"}
    for i in range(_ROWS):
        lines.append(_NORMS[form].format(i=i, total=f', "", "", s{i}' * both, **words))
        inputs += [f"float[1, {length}, {width}] {part}{i}" for part in "xr"]
    outputs = ", ".join(f"float[1, {length}, {width}] {part}{i}" for i in range(_ROWS) for part in ("ys" if both else "y"))
    feeds = {f"{part}{i}": numbers((1, length, width), np.float32, 1, i) for i in range(_ROWS) for part in "xr"}
    ones = np.ones(width, np.float32)
    text = model(" ".join(lines), f"({', '.join(inputs)}) => ({outputs})", {"g": ones} | ({} if simple else {"c": ones}), 18)
    return Bound(text, setting, feeds, off=["SkipLayerNormFusion"])


def norms(setting: Setting) -> Iterator[Race]:
    """A row for each width, kind and length."""
    for width in setting.some((256, 1024, 4096, 64)):
        for kind in ("layer", "layer, sum too", "RMS", "RMS, sum too"):
            for length in setting.some((1, 16, 96, 512, 8)):
                variants = {form: functools.partial(normalized, form, kind, width, length, setting) for form in _NORMS}
                yield Race(f"{width}, {kind}, {length}", variants, each=_ROWS)


def feeds_of(path: pathlib.Path) -> dict[str, Any]:
    """Random inputs; ids below 900, masks of ones; the first axis is 1, other names are 96."""
    found: dict[str, Any] = {}
    for item in onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs():
        shape = [axis if isinstance(axis, int) else 96 if at else 1 for at, axis in enumerate(item.shape)]
        whole = "int64" in item.type
        random = np.random.default_rng(0)
        drawn = random.integers(2, 900, shape) if whole else random.standard_normal(shape).astype(np.float32)
        found[item.name] = np.ones_like(drawn) if "mask" in item.name else drawn
    return found


def whole(setting: Setting) -> Iterator[Race]:
    """A row for each model of the folder."""
    exports.quiet()
    if setting.quick:
        exports.biased(setting.folder, "wavlm")
    for path in sorted(path for name in exports.BIASED for path in setting.folder.glob(f"{name}-*.onnx")):
        feeds = feeds_of(path)

        def ours(path: pathlib.Path = path, feeds: dict[str, Any] = feeds) -> Bound:
            made = ir.to_proto(onnx_attnfuse.optimize(path, ep="cpu", verify="none").model)
            return Bound(made.SerializeToString(), setting, feeds)

        yield Race(path.stem, {"export": functools.partial(Bound, path, setting, feeds), "ours": ours})


BENCHMARKS: dict[str, Callable[[], Benchmark]] = {
    "attention": lambda: Benchmark("Attention on the CPU", exported),
    "bias": lambda: Benchmark("An attention with a bias, on the CPU", biases),
    "norm": lambda: Benchmark("The normalization of a residual sum, on the CPU", norms),
    "models": lambda: Benchmark("Models whose bias depends on the input, on the CPU", whole),
}
main = command("benchmarks.on_cpu", BENCHMARKS, provider="cpu")

if __name__ == "__main__":
    main()
