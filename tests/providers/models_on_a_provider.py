"""Bundled models, written for an execution provider and run on it: `make test-openvino`, `make test-qnn`, `make test-webgpu`.

ATTNFUSE_EP names the provider, ATTNFUSE_PYTHON the interpreter that writes the models, with the newest ONNX Runtime. The export
runs on the CPU and on the provider, what is written on the provider, all with sizes fixed as in the inputs. A line for each model
tells the largest differences, the nodes left to the CPU, and the times.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_attnfuse.bench.conformance.installed import Installed, find
from onnx_attnfuse.kernels import conformance, providers
from tests.support.bundled import BUNDLED, Array, cases, name_of, session

EP = os.environ.get("ATTNFUSE_EP", "cpu")
TOLERANCE = 2e-2 if providers.provider(EP).computes_in_float16 else 1e-3
"""Of the magnitude of an output: providers compute products of float32 in their own ways, some of them in float16."""
RUNS = 7


@dataclasses.dataclass(frozen=True)
class Ran:
    """A model on a provider."""

    outputs: list[Array]
    on_cpu: collections.Counter[str]
    """The operators that the CPU ran in its place."""
    ms: float


def run(model: onnx.ModelProto, feeds: dict[str, Array], provider: Installed, folder: pathlib.Path) -> Ran:
    """Runs a model, profiled once for the providers of its nodes, and then for time."""
    profiled = _session(model, feeds, provider, folder / "profile")
    outputs = profiled.run(None, feeds)
    events = json.loads(pathlib.Path(profiled.end_profiling()).read_text())
    ran = [event["args"] for event in events if event.get("cat") == "Node" and "provider" in event.get("args", {})]
    on_cpu = collections.Counter(item["op_name"] for item in ran if item["provider"] == "CPUExecutionProvider")
    plain = _session(model, feeds, provider)
    return Ran(outputs, on_cpu, statistics.median(_timed(plain, feeds) for _ in range(RUNS)))


def _session(
    model: onnx.ModelProto, feeds: dict[str, Array], provider: Installed, profile: pathlib.Path | None = None
) -> onnxruntime.InferenceSession:
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    for name, size in _lengths(model, feeds).items():
        options.add_free_dimension_override_by_name(name, size)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if provider.library is None:
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=[(provider.ort_name, dict(provider.options)), "CPUExecutionProvider"]
        )
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == provider.ort_name][:1]
    assert devices, f"{provider.ort_name} finds no device here"
    options.add_provider_for_devices(devices, dict(provider.options))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _lengths(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, int]:
    """What the symbols in the shapes of the inputs are."""
    dims = [
        pair
        for given in model.graph.input
        for pair in zip(given.type.tensor_type.shape.dim, feeds[given.name].shape, strict=True)
    ]
    return {dim.dim_param: size for dim, size in dims if dim.dim_param and size}


def _timed(model: onnxruntime.InferenceSession, feeds: dict[str, Array]) -> float:
    start = time.perf_counter()
    model.run(None, feeds)
    return 1e3 * (time.perf_counter() - start)


def apart(expected: list[Array], found: list[Array]) -> float:
    """The largest difference as a part of the magnitude of the output."""
    pairs = zip(expected, found, strict=True)
    return max(float(np.abs(old - new).max(initial=0) / (np.abs(old).max(initial=0) or 1)) for old, new in pairs)


@pytest.fixture(scope="session")
def provider() -> Installed:
    """The provider that was asked for, its library registered."""
    found = find(EP)
    if found.library is not None:
        onnxruntime.register_execution_provider_library(found.ort_name, found.library)
    return found


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_what_is_written_is_right_on_the_provider_and_leaves_no_more_to_the_cpu(
    path: pathlib.Path, provider: Installed, tmp_path: pathlib.Path
) -> None:
    feeds = cases(path)["example"]
    export = onnx.load(path)  # with the symbols of the source
    said = _write(path, tmp_path / "written.onnx", _lengths(export, feeds), tmp_path)
    expected = session(export).run(None, feeds)
    plain = _tried(export, feeds, provider, tmp_path)
    fused = _tried(onnx.load(tmp_path / "written.onnx"), feeds, provider, tmp_path)
    if isinstance(fused, str):
        print(f"\n{path.stem}: neither the export nor what is written runs on {EP}: {fused}")
        assert isinstance(plain, str), fused
        return
    found = apart(expected, fused.outputs)
    print(f"\n{path.stem} on {EP}: {said}; difference {found:.1e}, on the CPU {sum(fused.on_cpu.values())} nodes", end="")
    if isinstance(plain, str):
        print(f"; the export does not run: {plain}")
        assert found <= TOLERANCE
        return
    before = apart(expected, plain.outputs)
    print(f"; of the export {before:.1e}, {sum(plain.on_cpu.values())} nodes; time {fused.ms / plain.ms:.2f} of its own")
    assert found <= max(TOLERANCE, 2 * before)
    assert sum(fused.on_cpu.values()) <= sum(plain.on_cpu.values()), fused.on_cpu - plain.on_cpu


def _tried(model: onnx.ModelProto, feeds: dict[str, Array], provider: Installed, folder: pathlib.Path) -> Ran | str:
    """A model on a provider, or why it does not run there."""
    try:
        return run(model, feeds, provider, folder)
    except Exception as error:  # noqa: BLE001 - what a provider cannot load is told
        return " ".join(str(error).split())[-150:]


def _write(path: pathlib.Path, out: pathlib.Path, lengths: dict[str, int], folder: pathlib.Path) -> str:
    """Writes a model for the provider, by the CPU planned with its table where it has no record; what was said of its sites."""
    chosen = ["--ep", EP] if EP in providers.names() else ["--ep", "cpu"]
    if EP not in providers.names() and (table := _renamed(folder)) is not None:
        chosen += ["--conformance", str(table)]
    dims = [word for name, size in lengths.items() for word in ("--dim", f"{name}={size}")]
    python = os.environ.get("ATTNFUSE_PYTHON", sys.executable)
    command = [python, "-m", "onnx_attnfuse_cli", "optimize", str(path), "-o", str(out), *chosen, *dims]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^fused .*sites.*$", told, re.MULTILINE)
    return line


def _renamed(folder: pathlib.Path) -> pathlib.Path | None:
    """The table of the provider as one of the CPU's, for which is planned where the provider has no record."""
    table = conformance.known(EP)
    if table is None:
        return None
    path = folder / "table.json"
    path.write_text(conformance.to_json(dataclasses.replace(table, ep="cpu")))
    return path
