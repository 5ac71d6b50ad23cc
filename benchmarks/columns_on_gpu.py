"""Products whose columns are no multiple of eight, plain and padded: milliseconds, kernels and errors.

    python benchmarks/columns_on_gpu.py OUT.md [--sizes 4096x1024x50257,...] [--dtype float16] [--provider cuda] [--rounds 30]

Sizes are rows x shared length x columns. All forms of a size are sessions of one process and take turns; times are the median of
runs whose input and output are bound to memory of the device. Decides whether `padded-columns` pays, of
fusion/enabling/padded_columns.py, and to which multiple: `to 8, cut` against `plain`, where the weight is a constant, and
`tied, cut` against `tied`, where it is an embedding that is read by a Gather too. `turned` reads a weight that lies by columns,
and needs no copy of a tied one. Needs onnxruntime-gpu, onnx and numpy; with torch the kernels are named, and torch's own product
is timed. `--provider cpu` tries it out.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.bound import PROVIDERS, Bound, in_turns

SIZES = "4096x1024x50257,1024x1024x50257,8x2048x50257,1x1024x50257,1024x768x51865,4096x768x30522"
DTYPES = {"float16": (TensorProto.FLOAT16, np.float16), "float32": (TensorProto.FLOAT, np.float32)}
MULTIPLES = (8, 64, 128)
FORMS = (
    *("plain", *(f"to {number}{end}" for number in MULTIPLES for end in (", cut", ""))),
    *("tied", "tied, cut", "turned", "turned, to 8, cut"),
    *("Gemm", "Gemm, to 8, cut", "Gemm, to 8", "Gemm, turned", "Gemm, turned, to 8, cut", "Gemm, turned, to 8"),
)
"""`tied` is a Transpose of a table that is gathered from too; `turned` reads the table by `transB`."""
_DISTINCT = 65537
_WARM = 5


def numbers(rows: int, columns: int, scale: float, kind: Any) -> Any:
    """Random numbers; a few of them over and over, as there are millions."""
    drawn = (np.random.default_rng(0).standard_normal(_DISTINCT, np.float32) * np.float32(scale)).astype(kind)
    return np.resize(drawn, (rows, columns))


def model_of(form: str, rows: int, shared: int, columns: int, dtype: str) -> bytes:
    """One product."""
    code, kind = DTYPES[dtype]
    multiple = next((number for number in (*MULTIPLES[::-1],) if f"to {number}" in form), 8 if form == "tied, cut" else 1)
    wide = -(-columns // multiple) * multiple
    table = numbers(columns, shared, shared**-0.5, kind)
    constants: dict[str, Any] = {}
    nodes: list[onnx.NodeProto] = []
    inputs = [helper.make_tensor_value_info("x", code, [rows, shared])]
    outputs: list[onnx.ValueInfoProto] = []
    if form.startswith("tied"):
        constants["table"] = table
        inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, [1]))
        outputs.append(helper.make_tensor_value_info("rows", code, [1, shared]))
        nodes.append(helper.make_node("Gather", ["table", "ids"], ["rows"]))
        if wide != columns:
            constants["zeros"] = np.zeros((wide - columns, shared), kind)
            nodes.append(helper.make_node("Concat", ["table", "zeros"], ["wide"], axis=0))
        nodes.append(helper.make_node("Transpose", ["table" if wide == columns else "wide"], ["w"], perm=[1, 0]))
    else:
        padded = np.concatenate([table, np.zeros((wide - columns, shared), kind)])
        constants["w"] = padded if "turned" in form else np.ascontiguousarray(padded.T)
    cuts = form.endswith("cut")
    product = "product" if cuts else "y"
    if "Gemm" in form:
        nodes.append(helper.make_node("Gemm", ["x", "w"], [product], transB=int("turned" in form)))
    elif "turned" in form:
        nodes.append(helper.make_node("FusedMatMul", ["x", "w"], [product], transB=1, domain="com.microsoft"))
    else:
        nodes.append(helper.make_node("MatMul", ["x", "w"], [product]))
    if cuts:
        constants |= {"start": np.asarray([0]), "end": np.asarray([columns]), "axis": np.asarray([1])}
        nodes.append(helper.make_node("Slice", [product, "start", "end", "axis"], ["y"]))
    outputs.insert(0, helper.make_tensor_value_info("y", code, [rows, columns if cuts else wide]))
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "columns", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def by_torch(rows: int, shared: int, columns: int, dtype: str) -> Callable[[], None] | None:
    """Torch's product with a weight that lies by columns, where torch has the GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    x, w = (
        torch.from_numpy(numbers(count, shared, scale, DTYPES[dtype][1])).cuda()
        for count, scale in ((rows, 1.0), (columns, shared**-0.5))
    )

    def run() -> None:
        torch.nn.functional.linear(x, w)
        torch.cuda.synchronize()

    return run


def kernels(run: Callable[[], None]) -> str:
    """The kernels of a run, the longest first, as torch's profiler sees them; empty without torch or a GPU."""
    if importlib.util.find_spec("torch") is None:
        return ""
    import torch

    if not torch.cuda.is_available():
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found = sorted(profile.key_averages(), key=lambda item: -item.device_time_total)
    return "; ".join(f"{item.key[:70]} {item.device_time_total / 1e3:.3f}" for item in found[:2])


def measured(size: str, dtype: str, provider: str, rounds: int, wanted: list[str]) -> dict[str, dict[str, Any]]:
    """Milliseconds, kernels and errors of every form."""
    rows, shared, columns = map(int, size.split("x"))
    feeds = {"x": numbers(rows, shared, 1.0, DTYPES[dtype][1]), "ids": np.asarray([1])}
    found: dict[str, dict[str, Any]] = {}
    runs: dict[str, Callable[[], None]] = {}
    reference: Any = None
    for form in wanted:
        try:
            bound = Bound(model_of(form, rows, shared, columns, dtype), provider, feeds)
            for _ in range(_WARM):
                bound.run()
            given = bound.output().numpy()[:8, :columns].astype(np.float32)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            found[form] = {"error": " ".join(str(error).split())[:200]}
            continue
        reference = given if reference is None else reference
        found[form] = {"apart": float(np.abs(given - reference).max()), "kernels": kernels(bound.run)}
        runs[form] = bound.run
    if provider == "cuda" and (own := by_torch(rows, shared, columns, dtype)) is not None:
        runs["torch linear"] = own
        found["torch linear"] = {"apart": 0.0, "kernels": kernels(own)}
    for form, taken in in_turns(runs, rounds).items():
        found[form]["ms"] = taken
    return found


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A row for each form, a column for each size."""
    forms = list(dict.fromkeys(form for found in results.values() for form in found))
    lines = ["| form | " + " | ".join(results) + " |", "|---" * (1 + len(results)) + "|"]
    for form in forms:
        cells: list[str] = []
        for found in results.values():
            cell, plain = found.get(form, {}), found.get("plain", {}).get("ms")
            ratio = f" ({plain / cell['ms']:.2f})" if plain and "ms" in cell else ""
            cells.append(f"{cell['ms']:.3f}{ratio}" if "ms" in cell else "failed" if "error" in cell else "")
        lines.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--forms", default=";".join(FORMS), help="separated by semicolons")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float16")
    parser.add_argument("--provider", choices=tuple(PROVIDERS), default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    if chosen.provider == "cuda" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for size in chosen.sizes.split(","):
        results[size] = measured(size, chosen.dtype, chosen.provider, chosen.rounds, chosen.forms.split(";"))
        for form, found in results[size].items():
            print(size, form, found, flush=True)
        what = f"{chosen.dtype}, {chosen.provider}, ONNX Runtime {onnxruntime.__version__}, Python {platform.python_version()}"
        notes = [
            f"- {size}, {form}: {found.get('error') or found['kernels'] or 'no kernel told'}; {found.get('apart', 0):.1e} apart"
            for size, forms in results.items()
            for form, found in forms.items()
        ]
        text = "\n".join(
            [
                "# Products whose columns are no multiple of eight\n",
                "    python benchmarks/columns_on_gpu.py OUT.md\n",
                f"{what}. Milliseconds, the median of {chosen.rounds} runs (how many times as fast as plain).\n",
                table(results),
                "\nKernels with their milliseconds, and the largest difference:\n",
                *notes,
            ]
        )
        chosen.out.write_text(f"{text}\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
