"""Every fused operator on a GPU, held against its NumPy reference; the errors, and what the kernels refuse.

    python -m tests.support.held_to_references OUT.json [--provider cuda|cpu] [--operators MultiHeadAttention,Attention]

Each case is a model of one node, in three element types. The node reads and gives out float32 where it computes bfloat16, which
NumPy does not have. OUT.json is written after each operator, so a kernel that ends the process takes no other operator with it;
with `--operators` what it holds already stays. Nothing falls back to the CPU, and no product of float32 is rounded to TF32. With
ORT_ENABLE_CUDNN_FLASH_ATTENTION=0 in the environment kernels are chosen as on cards before Hopper.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from onnx_attnfuse.bench.conformance.cases import Array, feeds_of, model_of
from onnx_attnfuse.verify.runtime import Reference
from onnx_attnfuse.verify.verdict import LOOSE, TIGHT, Comparison, compare
from tests.support.drawing import Case
from tests.support.reference_cases import cases

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCES = {"float32": TIGHT, "float16": LOOSE, "bfloat16": 8 * LOOSE}
"""Relative to the magnitude of the result; bfloat16 has eight times the rounding of float16."""
PROVIDERS: dict[str, list[Any]] = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"})],
}
_READABLE = 160


def run(model: onnx.ModelProto, feeds: dict[str, Array], provider: str) -> list[Array]:
    """The results of the kernel."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if provider != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS[provider])
    return session.run(None, feeds)


def held(case: Case, dtype: str, provider: str) -> list[Comparison]:
    """How far each result of the kernel is from the reference, where it is defined."""
    inputs = case.inputs(DTYPES[dtype])
    model, feeds = model_of(case, inputs), feeds_of(inputs)
    results = run(model, feeds, provider)
    expected = Reference(model).run(None, feeds)
    pairs = itertools.zip_longest(expected, results, case.where(inputs)[: len(results)])
    return [compare(_defined(old, where), _defined(new, where), TOLERANCES[dtype]) for old, new, where in pairs]


def _defined(array: Array, where: Array | None) -> Array:
    if where is None:
        return array
    wide = where.reshape(*where.shape, *[1] * (array.ndim - where.ndim))
    return np.where(wide, array, 0).astype(array.dtype)


def of_operator(found: Iterable[Case], provider: str) -> dict[str, Any]:
    """What is reported of one operator, by element type."""
    report: dict[str, Any] = {}
    for dtype, case in itertools.product(DTYPES, list(found)):
        entry = report.setdefault(dtype, {"cases": 0, "error": 0.0, "relative": 0.0, "worst": "", "failed": {}, "refused": {}})
        try:
            comparisons = held(case, dtype, provider)
        except Exception as error:  # noqa: BLE001 - what a kernel refuses, and how it ends, is a result
            text = " ".join(str(error).split())[:_READABLE]
            entry["refused"].setdefault(text, {"cases": 0, "first": case.name})["cases"] += 1
            continue
        entry["cases"] += 1
        entry["error"] = max([entry["error"], *(item.max_abs_error for item in comparisons)])
        relative = max(item.relative for item in comparisons)
        if relative > entry["relative"]:
            entry["relative"], entry["worst"] = relative, case.name
        wrong = [f"output {place}: {item.detail}" for place, item in enumerate(comparisons) if not item.equal]
        if wrong:
            entry["failed"][case.name] = "; ".join(wrong)
    return report


def main() -> None:
    """Runs everything, or the operators asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cuda")
    parser.add_argument("--operators", type=lambda text: set(text.split(",")))
    chosen = parser.parse_args()
    by_operator: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases():
        if chosen.provider in case.providers and (chosen.operators is None or case.op in chosen.operators):
            by_operator[case.operator].append(case)
    reports: dict[str, Any] = {"provider": chosen.provider, "onnxruntime": onnxruntime.__version__, "operators": {}}
    if chosen.operators is not None and chosen.out.exists():
        reports = json.loads(chosen.out.read_text())
    for operator, found in by_operator.items():
        reports["operators"][operator] = of_operator(found, chosen.provider)
        chosen.out.write_text(json.dumps(reports, indent=1))
        for dtype, entry in reports["operators"][operator].items():
            refused = sum(item["cases"] for item in entry["refused"].values())
            print(f"{operator} {dtype}: {entry['cases']} cases, relative error {entry['relative']:.1e}, ", end="")
            print(f"{len(entry['failed'])} failed, {refused} refused", flush=True)


if __name__ == "__main__":
    main()
