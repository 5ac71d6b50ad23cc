"""What an attention with a bias, and the normalization of a residual sum, take on the CPU, each as one operator and spelled out.

    python benchmarks/bias_on_cpu.py attention [--heads 16x64] [--sizes 32,96,256] [--batch 1] [--threads 1]
    python benchmarks/bias_on_cpu.py norm [--widths 768,1024] [--sizes 1,16,96,512] [--threads 1]
    python benchmarks/bias_on_cpu.py models MODEL.onnx ... [--sizes 96] [--threads 1]

The forms take turns. With one thread it is the time of the processor that counts, so that a busy machine changes little.
`models` holds a model against what the library makes of it.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime

_LAYERS = 2
_LEAST_ROUNDS = 9
_ATTENTION = ("spelled out", "MultiHeadAttention")
_NORM = ("Add, normalization", "one operator", "Sum, normalization")
_BIASES = {"none": None, "b n s t": ("b", 0, "s", "t"), "1 n s t": (1, 0, "s", "t"), "of the queries": None}


def attention(form: str, bias: str, heads: int, size: int) -> onnx.ModelProto:
    """Attentions whose bias is an input, or a product of the queries."""
    width, inputs, lines, outputs = heads * size, list[str](), list[str](), list[str]()
    for n in range(_LAYERS):
        inputs += [f"float[b,s,{width}] q{n}", *(f"float[b,t,{width}] {name}{n}" for name in "kv")]
        outputs.append(f"float[b,s,{width}] y{n}")
        shape = _BIASES[bias]
        if shape is not None:
            inputs.append(f"float[{','.join(str(axis or heads) for axis in shape)}] m{n}")
        if form == _ATTENTION[0] or bias == "of the queries":
            lines += [f"qr{n} = Reshape(q{n}, split)", f"qt{n} = Transpose<perm=[0,2,1,3]>(qr{n})"]
        if bias == "of the queries":
            inputs.append(f"float[{size},t] w{n}")
            lines.append(f"m{n} = MatMul(qt{n}, w{n})")
        if form != _ATTENTION[0]:
            added = "" if bias == "none" else f', "", "", m{n}'
            lines.append(
                f"y{n} = com.microsoft.MultiHeadAttention<num_heads={heads}, scale={size**-0.5}>(q{n}, k{n}, v{n}{added})"
            )
            continue
        lines += [f"{name}r{n} = Reshape({name}{n}, split)" for name in "kv"]
        lines += [f"kt{n} = Transpose<perm=[0,2,3,1]>(kr{n})", f"vt{n} = Transpose<perm=[0,2,1,3]>(vr{n})"]
        lines += [f"raw{n} = MatMul(qt{n}, kt{n})", f"small{n} = Mul(raw{n}, scale)"]
        lines.append(f"sum{n} = Identity(small{n})" if bias == "none" else f"sum{n} = Add(small{n}, m{n})")
        lines += [f"p{n} = Softmax<axis=-1>(sum{n})", f"z{n} = MatMul(p{n}, vt{n})"]
        lines += [f"zt{n} = Transpose<perm=[0,2,1,3]>(z{n})", f"y{n} = Reshape(zt{n}, flat)"]
    constants = f"int64[4] split = {{0,0,{heads},{size}}}, int64[3] flat = {{0,0,{width}}}, float scale = {{{size**-0.5}}}"
    return _parsed(inputs, outputs, constants, lines)


def norm(form: str, kind: str, width: int) -> onnx.ModelProto:
    """Residual sums and their normalization, where both are looked at elsewhere or the normalization alone."""
    inputs, lines, outputs = list[str](), list[str](), list[str]()
    simplified = "Simplified" if kind.startswith("RMS") else ""
    shift = "" if simplified else ", c"
    both = kind.endswith("sum too")
    for n in range(_LAYERS):
        inputs += [f"float[b,s,{width}] {name}{n}" for name in "xr"]
        outputs += [f"float[b,s,{width}] {name}{n}" for name in ("ys" if both else "y")]
        if form == _NORM[1]:
            total = f', "", "", s{n}' if both else ""
            op = f"com.microsoft.Skip{simplified}LayerNormalization<epsilon=0.00001>"
            lines.append(f"y{n}{total} = {op}(x{n}, r{n}, g{shift})")
        else:
            lines.append(f"s{n} = {form.partition(',')[0]}(x{n}, r{n})")
            lines.append(f"y{n} = {simplified}LayerNormalization<axis=-1, epsilon=0.00001>(s{n}, g{shift})")
    ones = f"{{{','.join(['1'] * width)}}}"
    return _parsed(inputs, outputs, f"float[{width}] g = {ones}, float[{width}] c = {ones}", lines)


def _parsed(inputs: list[str], outputs: list[str], constants: str, lines: list[str]) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>'
    return onnx.parser.parse_model(
        f"{head} model ({', '.join(inputs)}) => ({', '.join(outputs)}) <{constants}> {{ {' '.join(lines)} }}"
    )


def session_of(model: onnx.ModelProto | pathlib.Path, threads: int, off: str = "") -> Any:
    """A session on the CPU, without a fusion of ONNX Runtime's that is named."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    source = str(model) if isinstance(model, pathlib.Path) else model.SerializeToString()
    disabled = {"disabled_optimizers": [off]} if off else {}
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"], **disabled)


def feeds_of(session: Any, sizes: Mapping[str, int], other: int = 1) -> dict[str, Any]:
    """Random inputs; ids below 900, masks of ones; symbols that are not among `sizes` are `other`, the first axis 1."""
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        named = [axis if isinstance(axis, int) else sizes.get(axis, other if at else 1) for at, axis in enumerate(item.shape)]
        if "int64" in item.type:
            mask = "mask" in item.name
            feeds[item.name] = np.ones(named, np.int64) if mask else random.integers(2, 900, named, dtype=np.int64)
        else:
            noise = random.standard_normal(named).astype(np.float32)
            feeds[item.name] = np.ones_like(noise) if "mask" in item.name else noise
    return feeds


def in_turns(sessions: Mapping[str, Any], feeds: dict[str, Any], seconds: float, threads: int) -> dict[str, float]:
    """Milliseconds of a run of each, the median; results are compared first."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    first, *others = [session.run(None, feeds)[0] for session in sessions.values()]
    for other in others:
        np.testing.assert_allclose(other, first, atol=2e-2)
    times: dict[str, list[float]] = {name: [] for name in sessions}
    names, begin = list(sessions), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times[names[0]]) < _LEAST_ROUNDS:
        for name in names:
            start = clock()
            sessions[name].run(None, feeds)
            times[name].append(1e3 * (clock() - start))
        names = names[1:] + names[:1]
    return {name: float(np.median(taken)) for name, taken in times.items()}


def table(title: str, found: Mapping[int, dict[str, float]], layers: int = _LAYERS) -> None:
    """Prints a row: milliseconds of each form, and the ratio of each to the first."""
    cells: list[str] = []
    for times in found.values():
        base = next(iter(times.values()))
        cells.append(", ".join(f"{taken / layers:.3f} ({taken / base:.2f})" for taken in times.values()))
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("attention", "norm", "models"))
    parser.add_argument("models", nargs="*", type=pathlib.Path)
    parser.add_argument("--heads", default="16x64")
    parser.add_argument("--widths", default="768,1024")
    parser.add_argument("--sizes", default="96")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    chosen = parser.parse_args()
    sizes = [int(text) for text in chosen.sizes.split(",")]
    forms = {"attention": _ATTENTION, "norm": _NORM, "models": ("export", "ours")}[chosen.what]
    print(f"| {', '.join(forms)}, ms (ratio) | {' | '.join(f's = {size}' for size in sizes)} |\n|---{'|---' * len(sizes)}|")

    def row(title: str, sessions: Mapping[str, Any], layers: int) -> None:
        found: dict[int, dict[str, float]] = {}
        for size in sizes:
            feeds = feeds_of(next(iter(sessions.values())), {"b": chosen.batch, "s": size, "t": size}, size)
            found[size] = in_turns(sessions, feeds, chosen.seconds, chosen.threads)
        table(title, found, layers)

    if chosen.what == "attention":
        for heads, bias in itertools.product(chosen.heads.split(","), _BIASES):
            count, size = map(int, heads.split("x"))
            made = {form: session_of(attention(form, bias, count, size), chosen.threads) for form in forms}
            row(f"{heads}, bias {bias}", made, _LAYERS)
    elif chosen.what == "norm":
        for width, kind in itertools.product(chosen.widths.split(","), ("layer", "layer, sum too", "RMS", "RMS, sum too")):
            made = {form: session_of(norm(form, kind, int(width)), chosen.threads, "SkipLayerNormFusion") for form in forms}
            row(f"{width}, {kind}", made, _LAYERS)
    for path in chosen.models:
        import onnx_attnfuse

        ours = ir.to_proto(onnx_attnfuse.optimize(path, ep="cpu", verify="none").model)
        row(path.stem, {"export": session_of(path, chosen.threads), "ours": session_of(ours, chosen.threads)}, 1)


if __name__ == "__main__":
    main()
