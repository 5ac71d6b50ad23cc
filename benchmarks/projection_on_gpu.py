"""Self-attention with its projections, in the four forms that ONNX Runtime has operators for: milliseconds, kernels, errors.

    python benchmarks/projection_on_gpu.py OUT.json [--sizes 1x128x12x64,...] [--dtypes float16,bfloat16,float32]
        [--masks none,causal,lengths,bias] [--provider cuda] [--seconds 1200]

| form | nodes |
|---|---|
| three | three MatMul and Add, MultiHeadAttention |
| biased | three MatMul, MultiHeadAttention with their biases |
| packed | one MatMul and Add, Split, MultiHeadAttention |
| attention | Attention |

Sizes are batch x length x heads x head size. Every type and size runs in processes of its own, one that times and one in which
ONNX Runtime prints the kernels it runs. Times are milliseconds per attention, the median of runs that take turns; errors are
relative to the largest number of the first form in float32. Needs onnxruntime-gpu, onnx and numpy; `--provider cpu` tries it out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from benchmarks.bound import PROVIDERS, Bound

FORMS = ("three", "biased", "packed", "attention")
MASKS = ("none", "causal", "lengths", "bias")
SIZES = "1x128x12x64,8x128x12x64,8x512x12x64,32x197x16x64,2x3137x16x64,1x1024x16x64,4x2048x32x128"
DTYPES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float32": TensorProto.FLOAT}
LAYERS = 4
_ROUNDS, _MOST_SECONDS = 15, 1.5
_DISTINCT = 65537


def numbers(shape: tuple[int, ...], scale: float, seed: int) -> Any:
    """Random numbers; a few of them over and over, as there may be millions."""
    return np.resize(np.random.default_rng(seed).standard_normal(_DISTINCT, np.float32) * np.float32(scale), shape)


def model_of(form: str, mask: str, dtype: str, size: Sequence[int]) -> bytes:
    """Some attentions one after the other, all with the same weights."""
    batch, length, heads, head = size
    width, code = heads * head, DTYPES[dtype]
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    weight, bias = numbers((width, 3 * width), width**-0.5, 0), numbers((3 * width,), 0.1, 1)
    constants: dict[str, Any] = {}
    nodes: list[onnx.NodeProto] = []
    inputs = [helper.make_tensor_value_info("x0", code, [batch, length, width])]
    if mask == "lengths":
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.INT32, [batch]))
    if mask == "bias":
        inputs.append(helper.make_tensor_value_info("mask", code, [batch, 1, length, length]))
    attributes = {"num_heads": heads, "scale": head**-0.5, "domain": "com.microsoft", "unidirectional": int(mask == "causal")}
    lengths, scores = ("mask" if mask == "lengths" else ""), ("mask" if mask == "bias" else "")
    if form in {"packed", "attention"}:
        constants |= {"weight": weight, "bias": bias}
    else:
        constants |= {f"weight{place}": weight[:, place * width : (place + 1) * width] for place in range(3)}
        parts = {f"bias{place}": bias[place * width : (place + 1) * width] for place in range(3)}
        constants |= {"bias": bias} if form == "biased" else parts
    for layer in range(LAYERS):
        x, out, names = f"x{layer}", f"x{layer + 1}", [f"{letter}{layer}" for letter in "qkv"]
        if form == "attention":
            nodes.append(helper.make_node("Attention", [x, "weight", "bias", lengths, "", scores], [out], **attributes))
            continue
        if form == "packed":
            nodes += [
                helper.make_node("MatMul", [x, "weight"], [f"product{layer}"]),
                helper.make_node("Add", [f"product{layer}", "bias"], [f"sum{layer}"]),
                helper.make_node("Split", [f"sum{layer}"], names, axis=-1, num_outputs=3),
            ]
        else:
            for place, name in enumerate(names):
                product = name if form == "biased" else f"{name}_product"
                nodes.append(helper.make_node("MatMul", [x, f"weight{place}"], [product]))
                if form == "three":
                    nodes.append(helper.make_node("Add", [product, f"bias{place}"], [name]))
        inner = "bias" if form == "biased" else ""
        nodes.append(helper.make_node("MultiHeadAttention", [*names, inner, lengths, scores], [out], **attributes))
    result = helper.make_tensor_value_info(f"x{LAYERS}", code, [batch, length, width])
    tensors = [onnx.numpy_helper.from_array(np.ascontiguousarray(array).astype(kind), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "projected", inputs, [result], tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def bound_of(model: bytes, provider: str, feeds: dict[str, Any]) -> Bound:
    """A model that is bound, with no more memory from the arena than is asked for."""
    return Bound(model, provider, feeds, {"arena_extend_strategy": "kSameAsRequested"} if provider == "cuda" else {})


def result_of(bound: Bound) -> Any:
    """The output of a model as float32."""
    value = bound.output()
    return on_device(value, value.element_type(), TensorProto.FLOAT, "cpu").numpy()


def on_device(array: Any, given: int, wanted: int, provider: str) -> Any:
    """Numbers in the element type that is wanted, where that is; NumPy has no bfloat16."""
    shape = list(array.shape() if isinstance(array, onnxruntime.OrtValue) else array.shape)
    ends = [helper.make_tensor_value_info("given", given, shape), helper.make_tensor_value_info("wanted", wanted, shape)]
    graph = helper.make_graph([helper.make_node("Cast", ["given"], ["wanted"], to=wanted)], "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    available = [PROVIDERS[name] for name in ("cuda", "cpu") if PROVIDERS[name] in onnxruntime.get_available_providers()]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=available)
    binding = session.io_binding()
    value = array if isinstance(array, onnxruntime.OrtValue) else onnxruntime.OrtValue.ortvalue_from_numpy(array)
    binding.bind_ortvalue_input("given", value)
    binding.bind_output("wanted", provider)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]


def feeds_of(mask: str, dtype: str, size: Sequence[int], provider: str) -> dict[str, Any]:
    """Inputs on the device; in all entries but the first half of the keys is padding."""
    batch, length, heads, head = size
    code = DTYPES[dtype]
    feeds = {"x0": on_device(numbers((batch, length, heads * head), 1.0, 2), TensorProto.FLOAT, code, provider)}
    kept = np.asarray([length] + [max(1, length // 2)] * (batch - 1), np.int32)
    if mask == "lengths":
        feeds["mask"] = onnxruntime.OrtValue.ortvalue_from_numpy(kept, provider, 0)
    if mask == "bias":
        padded = np.arange(length)[None, None, None, :] >= kept[:, None, None, None]
        bias = np.broadcast_to(np.where(padded, np.float32(-6e4), np.float32(0)), (batch, 1, length, length))
        feeds["mask"] = on_device(np.ascontiguousarray(bias), TensorProto.FLOAT, code, provider)
    return feeds


def timed(runs: dict[str, Bound]) -> dict[str, float]:
    """Milliseconds per attention of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    start = time.perf_counter()
    for turn in range(_ROUNDS + 2):
        for name, bound in runs.items():
            before = time.perf_counter()
            bound.run()
            if turn > 1:
                times[name].append(time.perf_counter() - before)
        if turn > 4 and time.perf_counter() - start > _MOST_SECONDS:
            break
    return {name: round(1e3 * float(np.median(found)) / LAYERS, 4) for name, found in times.items()}


def cell(mask: str, dtype: str, size: Sequence[int], provider: str) -> dict[str, Any]:
    """All forms of one problem."""
    found: dict[str, Any] = {"dtype": dtype, "size": list(size), "mask": mask, "error": {}}
    exact = bound_of(model_of("three", mask, "float32", size), provider, feeds_of(mask, "float32", size, provider))
    exact.run()
    wanted = result_of(exact)
    del exact
    tried = {form: started(model_of(form, mask, dtype, size), provider, feeds_of(mask, dtype, size, provider)) for form in FORMS}
    found["failed"] = {form: bound for form, bound in tried.items() if isinstance(bound, str)}
    runs = {form: bound for form, bound in tried.items() if isinstance(bound, Bound)}
    for form, bound in runs.items():
        found["error"][form] = float(f"{np.abs(result_of(bound) - wanted).max() / np.abs(wanted).max():.1e}")
    found["ms"] = timed(runs)
    return found


def started(model: bytes, provider: str, feeds: dict[str, Any]) -> Bound | str:
    """A form that has run once, or why it does not."""
    try:
        bound = bound_of(model, provider, feeds)
        bound.run()
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return " ".join(str(error).split())[:160]
    return bound


def child(dtype: str, size: Sequence[int], provider: str, masks: Sequence[str], *, telling: bool) -> None:
    """Prints a line of JSON for every mask, or runs every form once for the kernels that are printed."""
    for mask in masks:
        if not telling:
            print("CELL", json.dumps(cell(mask, dtype, size, provider)), flush=True)
            continue
        for form in FORMS:
            print(f"\nFORM {mask} {form}", flush=True)
            started(model_of(form, mask, dtype, size), provider, feeds_of(mask, dtype, size, provider))


def measured(dtype: str, text: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of one type and size, each with the kernels that ran."""
    command = [sys.executable, __file__, "-", "--child", "--provider", chosen.provider, "--dtypes", dtype, "--sizes", text]
    command += ["--masks", chosen.masks]
    outputs: list[str] = []
    for telling in ("0", "1"):
        environment = {**os.environ, "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": telling}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        outputs.append(done.stdout)
        if done.returncode:
            print(f"{dtype} {text} ended with {done.returncode}: {done.stderr.strip()[-200:]}", file=sys.stderr, flush=True)
    cells: list[dict[str, Any]] = [json.loads(line[5:]) for line in outputs[0].splitlines() if line.startswith("CELL ")]
    kernels = {
        tuple(part.split()[:2]): sorted(set(re.findall(r"SdpaKernel=(\w+)", part))) for part in outputs[1].split("\nFORM ")[1:]
    }
    for found in cells:
        found["kernels"] = {form: kernels.get((found["mask"], form), []) for form in FORMS}
    return cells


def row(found: dict[str, Any]) -> str:
    """One line of the table: milliseconds, the ratio to the first form, and the kernels."""
    base = found["ms"].get("three")
    words: list[str] = []
    for form in FORMS:
        time_taken = found["ms"].get(form)
        ratio = f" ({time_taken / base:.2f})" if base and time_taken else ""
        words.append("failed" if time_taken is None else f"{time_taken}{ratio} {'/'.join(found['kernels'][form])}")
    worst = max(found["error"].values(), default=float("nan"))
    return f"| {found['dtype']} | {'x'.join(map(str, found['size']))} | {found['mask']} | {' | '.join(words)} | {worst} |"


def main() -> None:
    """Measures until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--provider", choices=PROVIDERS, default="cuda")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        telling = os.environ.get("ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO") == "1"
        child(
            chosen.dtypes,
            [int(part) for part in chosen.sizes.split("x")],
            chosen.provider,
            chosen.masks.split(","),
            telling=telling,
        )
        return
    start = time.perf_counter()
    cells: list[dict[str, Any]] = []
    print("| type | size | mask |", " | ".join(FORMS), "| largest error |\n|---|---|---|", "---|" * (len(FORMS) + 1), sep="")
    for text in chosen.sizes.split(","):
        for dtype in chosen.dtypes.split(","):
            if time.perf_counter() - start > chosen.seconds:
                continue
            for found in measured(dtype, text, chosen):
                cells.append(found)
                print(row(found), flush=True)
            chosen.out.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()
