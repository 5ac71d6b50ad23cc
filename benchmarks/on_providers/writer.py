"""Writes models for an execution provider, beside what their exports give on the CPU: `python -m benchmarks.on_providers.writer`.

Each line on stdin is a task as JSON, each on stdout its answer. The outputs of the export are those of ONNX Runtime on the CPU
with its optimizations off, or those of torch that lie beside it where it runs none of its inputs there.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnx_attnfuse
from benchmarks.on_providers import tensors
from benchmarks.on_providers.tensors import Array
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.operators import records
from onnx_attnfuse.report.model import SiteReport

ATTENTION = frozenset([*(info.name for info in records().values() if info.kind == "attention"), "Softmax"])


def main() -> None:
    """Answers until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


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
    export = onnx.load(path)
    given = list(cases(path.with_suffix(".npz")).items())[:most]
    sizes = lengths(export, given[0][1])
    fixed = providers.provider(ep).fixed_sizes
    found = onnx_attnfuse.optimize(path, ep=ep, dim=sizes if fixed else {}, **choices)
    found.save(out / "ours.onnx")
    told: list[dict[str, Any]] = []
    session = _session(path)
    taken = [
        (name, feeds)
        for name, feeds in given
        if not fixed or all(feeds[key].shape == array.shape for key, array in given[0][1].items())
    ]
    expected = [_outputs(session, feeds) for _, feeds in taken]
    if not any(expected):
        expected = [_recorded(path, name, export) for name, _ in taken]
    for place, ((name, feeds), outputs) in enumerate(zip(taken, expected, strict=True)):
        if outputs is not None:
            case = {"name": name, "feeds": tensors.save(feeds, out / f"feeds {place}")}
            told.append(case | {"expected": tensors.save(outputs, out / f"expected {place}")})
    if not told:
        raise RuntimeError("the export runs none of its inputs on the CPU")
    return {
        "ours": str(out / "ours.onnx"),
        "sites": collections.Counter(site.status for site in found.report.sites if site.status != "not-attention"),
        "operators": collections.Counter(_became(site) for site in found.report.sites if site.is_rewritten),
        "left": collections.Counter(
            site.reasons[0].code for site in found.report.sites if site.status == "skipped" and site.reasons
        ),
        "attention": {"export": _attentions(export), "ours": _attentions(onnx.load(out / "ours.onnx"))},
        "cases": told,
        "sizes": sizes if fixed else {},
    }


def _became(site: SiteReport) -> str:
    return "decomposed" if site.status == "decomposed" else f"{site.op}"


def cases(archive: pathlib.Path) -> dict[str, dict[str, Array]]:
    """The inputs beside an export by case; one without a name is called `example`."""
    found: dict[str, dict[str, Array]] = {}
    with np.load(archive) as arrays:
        for key in arrays.files:
            case, is_input, name = key.rpartition("in/")
            if is_input and "/" not in name:
                found.setdefault(case.rstrip("/") or "example", {})[name] = arrays[key]
    return found


def lengths(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, int]:
    """What the symbols in the shapes of the inputs are."""
    dims = [
        pair
        for given in model.graph.input
        if given.name in feeds
        for pair in zip(given.type.tensor_type.shape.dim, feeds[given.name].shape, strict=True)
    ]
    return {dim.dim_param: size for dim, size in dims if dim.dim_param and size}


def _session(path: pathlib.Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _outputs(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
    """The outputs by name; None: the export does not run these inputs."""
    wanted = {entry.name for entry in session.get_inputs()}
    names = [entry.name for entry in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, {name: array for name, array in feeds.items() if name in wanted}), strict=True))
    except Exception:  # noqa: BLE001 - such a case is none of the table's
        return None


def _recorded(path: pathlib.Path, case: str, export: onnx.ModelProto) -> dict[str, Array] | None:
    """The outputs of torch that lie beside an export which ONNX Runtime does not run on the CPU; None: there are none."""
    prefix = "out/" if case == "example" else f"{case}/out/"
    with np.load(path.with_suffix(".npz")) as arrays:
        found = [arrays[f"{prefix}{place}"] for place in range(len(export.graph.output)) if f"{prefix}{place}" in arrays.files]
    if len(found) < len(export.graph.output) or any(array.dtype.kind not in "fib" for array in found):
        return None
    return {output.name: array for output, array in zip(export.graph.output, found, strict=True)}


def _attentions(model: onnx.ModelProto) -> int:
    """How many nodes are a Softmax or a fused attention, in branches and functions too."""
    return sum(node.op_type in ATTENTION for nodes in _nodes(model) for node in nodes)


def _nodes(model: onnx.ModelProto) -> Iterator[Any]:
    left: list[Any] = [model.graph.node, *(function.node for function in model.functions)]
    while left:
        nodes = left.pop()
        yield nodes
        left += [attribute.g.node for node in nodes for attribute in node.attribute if attribute.HasField("g")]


if __name__ == "__main__":
    main()
