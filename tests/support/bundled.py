"""Models in the repository, the inputs recorded beside them, and plain runs of both."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

Array = npt.NDArray[Any]
BUNDLED = sorted((pathlib.Path(__file__).parents[2] / "models" / "bundled").glob("*.onnx"))


def name_of(path: pathlib.Path) -> str:
    """The name of a test on a model."""
    return path.stem


def cases(path: pathlib.Path) -> dict[str, dict[str, Array]]:
    """The inputs beside a bundled model by case; the example is called `example`."""
    found: dict[str, dict[str, Array]] = {}
    with np.load(path.with_suffix(".npz")) as arrays:
        for key in arrays.files:
            case, is_input, name = key.rpartition("in/")
            if is_input and "/" not in name:
                found.setdefault(case.rstrip("/") or "example", {})[name] = arrays[key]
    return found


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session that runs the nodes as they are written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs by name; inputs that the model has not are left out."""
    return run_in(session(model), feeds)


def run_in(started: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs of a started session by name; inputs that the model has not are left out."""
    wanted = {entry.name for entry in started.get_inputs()}
    names = [entry.name for entry in started.get_outputs()]
    results = started.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, results, strict=True))


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of the model that also gives out the values called `names`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {entry.name for entry in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    return copy
