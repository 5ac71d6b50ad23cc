"""Writes models for an execution provider, beside what their exports give on the CPU: `python -m benchmarks.on_providers.writer`.

Messages are those of `onnx_attnfuse.verify.child`. The outputs of the export are those of ONNX Runtime on the CPU
with its optimizations off, or those of torch that lie beside it where it runs none of its inputs there.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

import onnx_attnfuse
from benchmarks.on_providers import tensors
from benchmarks.on_providers.tensors import Array
from models import compare, references
from models.references import Case
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.operators import records
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.verify.child import serve

ATTENTION = frozenset([*(info.name for info in records().values() if info.kind == "attention"), "Softmax"])


def _answer(task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return written(pathlib.Path(task["model"]), task["ep"], pathlib.Path(task["out"]), task["choices"], task["most"])
    except Exception as error:  # noqa: BLE001 - one model is lost, and the table says so
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def written(path: pathlib.Path, ep: str, out: pathlib.Path, choices: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """Writes a model for a provider.

    Args:
        path: The export; the inputs lie beside it in an archive, by case.
        ep: The provider.
        out: The folder for all files.
        choices: Further options of `optimize`.
        most: The most cases to keep, the first; None: all.

    Returns:
        The file, how many sites have which status, the attention nodes before and after, the inputs and outputs by case, and the
        sizes of the symbols of the first case.
    """
    export = ir.load(path)
    given = references.read(path.with_suffix(".npz"))[:most]
    sizes = lengths(export, given[0].inputs)
    fixed = providers.provider(ep).fixed_sizes
    found = onnx_attnfuse.optimize(path, ep=ep, dim=sizes if fixed else {}, **choices)
    found.save(out / "ours.onnx")
    session, same = compare.session(path), {name: array.shape for name, array in given[0].inputs.items()}
    taken = [case for case in given if not fixed or all(case.inputs[name].shape == shape for name, shape in same.items())]
    results = [compare.run(session, case) for case in taken]
    names = [output.name or "" for output in export.graph.outputs]
    if all(isinstance(outputs, str) for outputs in results):
        results = [_recorded(case, len(names)) for case in taken]
    told: list[dict[str, Any]] = []
    for place, (case, outputs) in enumerate(zip(taken, results, strict=True)):
        if not isinstance(outputs, str):
            expected = tensors.save(dict(zip(names, outputs, strict=True)), out / f"expected {place}")
            told.append({"name": case.name, "feeds": tensors.save(case.inputs, out / f"feeds {place}"), "expected": expected})
    if not told:
        raise RuntimeError("the export runs none of its inputs on the CPU")
    return {
        "ours": str(out / "ours.onnx"),
        "sites": collections.Counter(site.status for site in found.report.sites if site.status != "not-attention"),
        "operators": collections.Counter(_became(site) for site in found.report.sites if site.is_rewritten),
        "left": collections.Counter(
            site.reasons[0].code for site in found.report.sites if site.status == "skipped" and site.reasons
        ),
        "attention": {"export": _attentions(export), "ours": _attentions(ir.load(out / "ours.onnx"))},
        "cases": told,
        "sizes": sizes if fixed else {},
    }


def _became(site: SiteReport) -> str:
    return "decomposed" if site.status == "decomposed" else f"{site.op}"


def lengths(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, int]:
    """What the symbols in the shapes of the inputs are."""
    known = [item for item in model.graph.inputs if item.name in feeds]
    dims = [pair for item in known for pair in zip(item.shape or (), feeds[item.name or ""].shape, strict=True)]
    return {dim.value: size for dim, size in dims if isinstance(dim, ir.SymbolicDim) and dim.value and size}


def _recorded(case: Case, count: int) -> compare.Outputs | str:
    """The outputs of torch that lie beside an export which ONNX Runtime does not run on the CPU, or why there are none."""
    fits = len(case.outputs) == count and all(array.dtype.kind in "fib" for array in case.outputs)
    return case.outputs if fits else "torch has others"


def _attentions(model: ir.Model) -> int:
    """How many nodes are a Softmax or a fused attention, in branches and functions too."""
    return sum(node.op_type in ATTENTION for part in (model.graph, *model.functions.values()) for node in part.all_nodes())


if __name__ == "__main__":
    sys.exit(serve(lambda: _answer))
