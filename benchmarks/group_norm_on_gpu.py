"""Group normalization with SiLU as exporters spell it and in other forms, alone and between convolutions: milliseconds, errors.

    python benchmarks/group_norm_on_gpu.py OUT.md [--sizes 2x320x64x64,...] [--dtype float16] [--provider cuda] [--rounds 30]

| form | nodes |
|---|---|
| spelled | Reshape to (n, g, -1), InstanceNormalization of g channels, Reshape, Mul, Add, Sigmoid, Mul |
| one image | the same with Reshape to (1, n·g, -1), for which ONNX Runtime takes one pass of cuDNN instead of two kernels |
| rows | Reshape to (n, g, -1), LayerNormalization of the last axis, Reshape, Mul, Add, Sigmoid, Mul |
| operator | GroupNormalization of ai.onnx, opset 21 |
| turned | Transpose, GroupNorm of com.microsoft with its activation, Transpose |
| last | GroupNorm alone, on an input that has its channels last already |

Sizes are n x c x h x w, of 32 groups. `conv` before a form: between two convolutions of 3 x 3; `nhwc`: with `prefer_nhwc` of the
CUDA provider, which lays images out by channel and moves Transposes together. Errors are the largest difference from float64.
Needs onnxruntime-gpu, onnx and numpy. `--provider cpu` tries it out; there GroupNorm of com.microsoft has no kernel.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bound import PROVIDERS, Bound, in_turns

SIZES = "2x320x64x64,2x960x64x64,2x640x32x32,2x1280x16x16,2x1280x8x8,8x320x64x64"
FORMS = ("spelled", "one image", "rows", "operator", "turned", "last")
BETWEEN = ("conv spelled", "conv one image", "conv rows", "conv turned")
DTYPES = {"float16": (TensorProto.FLOAT16, np.float16), "float32": (TensorProto.FLOAT, np.float32)}
GROUPS, EPSILON = 32, 1e-5
MEANS = (0.0, 30.0)
"""Means of the numbers that are normalized, of standard deviation 1; the first is timed, both are compared with float64."""
_WARM = 5


class Graph:
    """Nodes and constants of one model."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Any] = {}

    def node(self, op: str, inputs: list[str], **attributes: Any) -> str:
        """The output of a new node."""
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, array: Any, kind: Any = None) -> str:
        """The name of a new constant."""
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.asarray(array).astype(kind or self.kind)
        return name

    def affine(self, value: str, gamma: Any, beta: Any) -> str:
        """Scaled, shifted and through SiLU."""
        shape = (-1, 1, 1)
        value = self.node("Mul", [value, self.constant(gamma.reshape(shape))])
        return self.silu(self.node("Add", [value, self.constant(beta.reshape(shape))]))

    def silu(self, value: str) -> str:
        """Times its own sigmoid."""
        return self.node("Mul", [value, self.node("Sigmoid", [value])])


def normalized(graph: Graph, form: str, x: str, shape: tuple[int, ...], gamma: Any, beta: Any) -> str:
    """The result of one form."""
    batch, channels, height, width = shape
    whole = graph.constant([batch, channels, height, width], np.int64)
    if form in {"spelled", "one image"}:
        count = batch * GROUPS if form == "one image" else GROUPS
        flat = graph.constant([1 if form == "one image" else batch, count, -1], np.int64)
        ones, zeros = graph.constant(np.ones(count)), graph.constant(np.zeros(count))
        value = graph.node("InstanceNormalization", [graph.node("Reshape", [x, flat]), ones, zeros], epsilon=EPSILON)
        return graph.affine(graph.node("Reshape", [value, whole]), gamma, beta)
    if form == "rows":
        flat = graph.constant([batch, GROUPS, -1], np.int64)
        ones = graph.constant(np.ones(channels // GROUPS * height * width))
        value = graph.node("LayerNormalization", [graph.node("Reshape", [x, flat]), ones], axis=-1, epsilon=EPSILON)
        return graph.affine(graph.node("Reshape", [value, whole]), gamma, beta)
    if form == "operator":
        weights = [graph.constant(gamma), graph.constant(beta)]
        return graph.silu(graph.node("GroupNormalization", [x, *weights], num_groups=GROUPS, epsilon=EPSILON))
    weights = [graph.constant(gamma, np.float32), graph.constant(beta, np.float32)]
    choices = {"groups": GROUPS, "activation": 1, "channels_last": 1, "epsilon": EPSILON, "domain": "com.microsoft"}
    if form == "last":
        return graph.node("GroupNorm", [x, *weights], **choices)
    turned = graph.node("Transpose", [x], perm=[0, 2, 3, 1])
    return graph.node("Transpose", [graph.node("GroupNorm", [turned, *weights], **choices)], perm=[0, 3, 1, 2])


def model_of(form: str, shape: tuple[int, ...], dtype: str, gamma: Any, beta: Any) -> bytes:
    """One model."""
    code, kind = DTYPES[dtype]
    graph = Graph(kind)
    batch, channels, height, width = shape
    given = (batch, height, width, channels) if form == "last" else shape
    value, middle = "x", form.removeprefix("conv ")
    if middle != form:
        kernel = np.random.default_rng(3).standard_normal((channels, channels, 3, 3), np.float32) / (3 * channels**0.5)
        weight = graph.constant(kernel)
        value = graph.node("Conv", [value, weight], pads=[1, 1, 1, 1])
        value = normalized(graph, middle, value, shape, gamma, beta)
        value = graph.node("Conv", [value, weight], pads=[1, 1, 1, 1])
    else:
        value = normalized(graph, form, value, shape, gamma, beta)
    ends = [helper.make_tensor_value_info("x", code, given), helper.make_tensor_value_info(value, code, given)]
    tensors = [numpy_helper.from_array(array, name) for name, array in graph.constants.items()]
    made = helper.make_graph(graph.nodes, "normalized", ends[:1], ends[1:], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString()


def truth(x: Any, gamma: Any, beta: Any) -> Any:
    """Group normalization and SiLU in float64."""
    grouped = x.astype(np.float64).reshape(x.shape[0], GROUPS, -1)
    found = (grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + EPSILON)
    found = found.reshape(x.shape) * gamma.reshape(-1, 1, 1) + beta.reshape(-1, 1, 1)
    return found / (1 + np.exp(-found))


def measured(size: str, dtype: str, provider: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and errors of every form at one size."""
    shape = tuple(map(int, size.split("x")))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(shape, np.float32)
    gamma, beta = (rng.standard_normal(shape[1]).astype(DTYPES[dtype][1]).astype(np.float64) for _ in range(2))
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    layouts = ("", "nhwc ") if provider == "cuda" else ("",)
    for name in (*FORMS, *(layout + form for layout in layouts for form in BETWEEN)):
        form = name.removeprefix("nhwc ")
        try:
            model = model_of(form, shape, dtype, gamma, beta)
            cell: dict[str, Any] = {}
            bound: Bound | None = None
            for mean in MEANS[::-1]:
                x = (noise + np.float32(mean)).astype(DTYPES[dtype][1])
                given = x.transpose(0, 2, 3, 1) if form == "last" else x
                bound = bound or Bound(model, provider, {"x": given}, {"prefer_nhwc": "1"} if name != form else {})
                bound.give("x", given)
                for _ in range(_WARM):
                    bound.run()
                if form in FORMS:
                    result = bound.output().numpy().astype(np.float64)
                    result = result.transpose(0, 3, 1, 2) if form == "last" else result
                    cell[f"error, mean {mean:g}"] = float(np.abs(result - truth(x, gamma, beta)).max())
            assert bound is not None
            found[name], runs[name] = cell, bound.run
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found[name] = {"error": " ".join(str(error).split())[:200]}
    for name, taken in in_turns(runs, rounds).items():
        found[name]["ms"] = taken
    return found


def report(results: dict[str, dict[str, dict[str, Any]]], what: str) -> str:
    """Markdown: milliseconds with how many times as fast as spelled, then errors and failures."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    lines = ["# Group normalization\n", "    python benchmarks/group_norm_on_gpu.py OUT.md\n", f"{what}\n"]
    lines += ["| form | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for name in names:
        cells: list[str] = []
        for found in results.values():
            base = found.get("conv spelled" if "conv" in name else "spelled", {}).get("ms")
            ms = found.get(name, {}).get("ms")
            cells.append("failed" if ms is None else f"{ms:.4f}" + (f" ({base / ms:.2f})" if base else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("\nErrors and failures:\n")
    for size, found in results.items():
        for name, cell in found.items():
            rest = {key: value if isinstance(value, str) else f"{value:.1e}" for key, value in cell.items() if key != "ms"}
            if rest:
                lines.append(f"- {size}, {name}: {', '.join(f'{key} {value}' for key, value in rest.items())}")
    return "\n".join(lines)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16")
    parser.add_argument("--provider", choices=tuple(PROVIDERS), default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    if chosen.provider == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    what = f"{chosen.dtype}, {chosen.provider}, ONNX Runtime {onnxruntime.__version__}, the median of {chosen.rounds} runs."
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for size in chosen.sizes.split(","):
        results[size] = measured(size, chosen.dtype, chosen.provider, chosen.rounds)
        chosen.out.write_text(report(results, what) + "\n", encoding="utf-8")
    print(report(results, what))


if __name__ == "__main__":
    main()
