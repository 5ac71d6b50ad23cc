"""RMS normalization in half precision with factors in float32, in the forms that ONNX Runtime has for it, on a GPU.

    python benchmarks/rms_norm_on_gpu.py OUT.md [--shapes 1x1x1152,8x512x1152] [--dtype float16] [--rounds 60] [--provider cuda]

| form | nodes of one normalization |
|---|---|
| spelled | Cast, x / sqrt(mean(x²) + ε), Mul, Cast, of which ONNX Runtime makes SimplifiedLayerNormalization between two Casts |
| branchwise | BranchwiseRMSNorm of com.microsoft, which takes both types |
| rounded | SimplifiedLayerNormalization with the factors rounded to the type of x, which is another result |

A run is a chain of `--chain` normalizations, a CUDA graph where there is CUDA, and told are microseconds for each of them. Errors
are the largest of one normalization relative to float64. Shapes of length 0 are run too. `--provider cpu` tries it out.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bound import PROVIDERS, Bound, in_turns

SHAPES = "1x1x1152,8x1x1152,1x512x1152,8x512x1152,1x512x4x256,8x512x4x256,8x512x4096"
FORMS = ("spelled", "branchwise", "rounded")
EMPTY = ((0, 3, 64), (2, 0, 64))
DTYPES: dict[str, tuple[int, Any]] = {
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
EPSILON, _WARM = 1e-6, 5


def chain_of(form: str, shape: tuple[int, ...], dtype: str, factors: Any, length: int) -> bytes:
    """A model of `length` normalizations, one after the other, between float32."""
    code, kind = DTYPES[dtype]
    nodes = [helper.make_node("Cast", ["x"], ["x0"], to=code)]
    for place in range(length):
        nodes += _one(form, f"x{place}", f"x{place + 1}", code)
    nodes.append(helper.make_node("Cast", [f"x{length}"], ["y"], to=TensorProto.FLOAT))
    weights = {"w": factors, "two": np.float32(2), "eps": np.float32([EPSILON]), "last": np.int64([-1])}
    if form == "rounded":
        weights["w"] = factors.astype(kind)
    read = {name for node in nodes for name in node.input}
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items() if name in read]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph(nodes, form, ends[:1], ends[1:], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _one(form: str, x: str, y: str, code: int) -> list[onnx.NodeProto]:
    if form == "branchwise":
        settings: dict[str, Any] = {"num_branches": 1, "epsilon": EPSILON, "domain": "com.microsoft"}
        return [helper.make_node("BranchwiseRMSNorm", [x, "w"], [y], **settings)]
    if form == "rounded":
        return [helper.make_node("SimplifiedLayerNormalization", [x, "w"], [y], axis=-1, epsilon=EPSILON)]
    steps: list[tuple[str, list[str], dict[str, Any]]] = [
        ("Cast", [x], {"to": TensorProto.FLOAT}),
        ("Pow", [f"{x}_0", "two"], {}),
        ("ReduceMean", [f"{x}_1", "last"], {}),
        ("Add", [f"{x}_2", "eps"], {}),
        ("Sqrt", [f"{x}_3"], {}),
        ("Div", [f"{x}_0", f"{x}_4"], {}),
        ("Mul", [f"{x}_5", "w"], {}),
    ]
    nodes = [helper.make_node(op, read, [f"{x}_{place}"], **settings) for place, (op, read, settings) in enumerate(steps)]
    return [*nodes, helper.make_node("Cast", [f"{x}_6"], [y], to=code)]


def measured(shape: tuple[int, ...], dtype: str, provider: str, rounds: int, length: int) -> dict[str, tuple[float, float]]:
    """Microseconds of one normalization and the largest relative error of each form."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype][1]).astype(np.float32)
    factors = (1 + rng.standard_normal(shape[-1]) / 8).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + EPSILON) * factors
    errors: dict[str, float] = {}
    runs: dict[str, Callable[[], None]] = {}
    for form in FORMS:
        one = Bound(chain_of(form, shape, dtype, factors, 1), provider, {"x": x})
        one.run()
        found = one.output().numpy().astype(np.float64)
        errors[form] = float(np.max(np.abs(found - wanted) / np.maximum(np.abs(wanted), 1e-3), initial=0))
        runs[form] = _chain(form, shape, dtype, factors, length, provider, x)
    times = in_turns(runs, rounds)
    return {form: (1e3 * times[form] / length, error) for form, error in errors.items()}


def _chain(form: str, shape: tuple[int, ...], dtype: str, factors: Any, length: int, provider: str, x: Any) -> Callable[[], None]:
    settings = {"enable_cuda_graph": "1"} if provider == "cuda" and x.size else {}
    bound = Bound(chain_of(form, shape, dtype, factors, length), provider, {"x": x}, settings)
    kept = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, provider, 0)
    bound.binding.bind_ortvalue_output("y", kept)
    for _ in range(_WARM):
        bound.run()
    return bound.run


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16")
    parser.add_argument("--provider", choices=tuple(PROVIDERS), default="cuda")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--chain", type=int, default=40)
    chosen = parser.parse_args()
    if chosen.provider == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    lines = ["# RMS normalization with factors in float32", "", "    python benchmarks/rms_norm_on_gpu.py OUT.md", ""]
    lines += [
        f"{chosen.dtype}, {chosen.provider}, ONNX Runtime {onnxruntime.__version__}: µs of one normalization (relative error).",
        "",
    ]
    lines += ["| shape | " + " | ".join(FORMS) + " |", "|---" * (1 + len(FORMS)) + "|"]
    for shape in [*(tuple(map(int, item.split("x"))) for item in chosen.shapes.split(",")), *EMPTY]:
        try:
            found = measured(shape, chosen.dtype, chosen.provider, chosen.rounds, chosen.chain)
            cells = [f"{taken:.2f} ({error:.1e})" for taken, error in found.values()]
        except Exception as error:  # noqa: BLE001 - a failure is a result
            cells = [" ".join(str(error).split())[:160].replace("|", "/")] * len(FORMS)
        lines.append(f"| {'x'.join(map(str, shape))} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
        chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
