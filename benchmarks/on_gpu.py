"""Fused models on a GPU: outputs against the export's there, kernels against the forecast.

    python benchmarks/on_gpu.py FOLDER [--arch sm90]

FOLDER holds exports of `models.export`. Each is fused for CUDA; export and fused model run on the CUDA provider on every case
beside the export (full, padded left and right, holes, a fully masked row). ONNX Runtime prints the kernel it chose for each run.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_attnfuse.kernels.kernel_log import SWITCH, read_kernel_log

Feeds = Mapping[str, Any]
_CODES = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


def cases(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The inputs of every case beside an export."""
    stored, found = np.load(path.with_suffix(".npz")), collections.defaultdict[str, dict[str, Any]](dict)
    for key in stored.files:
        parts = key.split("/")
        if "in" in parts[:2]:
            found["example" if parts[0] == "in" else parts[0]][parts[-1]] = stored[key]
    return found


class Model:
    """A model on the CUDA provider."""

    def __init__(self, path: pathlib.Path, *, optimised: bool) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)

    def run(self, feeds: Feeds) -> list[Any]:
        """The outputs, in float64."""
        given = {
            item.name: feeds[item.name].astype(_CODES.get(item.type, feeds[item.name].dtype))
            for item in self._session.get_inputs()
        }
        return [np.asarray(output, np.float64) for output in self._session.run(None, given)]


def difference(old: Any, new: Any) -> float:
    """The largest relative difference; infinite where NaN is not at the same places."""
    if old.shape != new.shape or not np.array_equal(np.isnan(old), np.isnan(new)):
        return float("inf")
    return float(np.nanmax(np.abs(old - new) / (1 + np.abs(old)), initial=0.0))


def one(path: pathlib.Path, arch: str) -> None:
    """Fuses one export and prints a line per site kind and per case."""
    import onnx_attnfuse

    with tempfile.TemporaryDirectory() as folder:
        fused = pathlib.Path(folder) / "fused.onnx"
        result = onnx_attnfuse.optimize(path, ep="cuda", arch=arch, verify="none")
        result.save(fused)
        for site in result.report.sites:
            print("FORECAST", site.kernel.forecast if site.kernel else site.status)
        before, after = Model(path, optimised=False), Model(fused, optimised=True)
        for name, feeds in cases(path).items():
            try:
                old = before.run(feeds)
            except Exception as error:  # noqa: BLE001 - what the export itself refuses is no case
                print("REFUSED", name, str(error).splitlines()[0][:100])
                continue
            worst = max(difference(*pair) for pair in zip(old, after.run(feeds), strict=True))
            print("CASE", name, f"{worst:.1e}")


def main() -> None:
    """Runs every export of a folder in a process of its own and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--arch", default="sm90")
    chosen = parser.parse_args()
    if chosen.path.is_file():
        one(chosen.path, chosen.arch)
        return
    print("| export | cases | largest difference | forecast | ran |\n|---|---|---|---|---|")
    for path in sorted(chosen.path.glob("*.onnx")):
        command = [sys.executable, __file__, str(path), "--arch", chosen.arch]
        environment = {**os.environ, **SWITCH}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        errors = [float(item) for item in re.findall(r"CASE \S+ (\S+)", done.stdout)]
        forecast = " ".join(sorted(set(re.findall(r"FORECAST (\S+)", done.stdout))))
        ran = " ".join(sorted({run.kernel for run in read_kernel_log(done.stdout)}))
        failed = "" if done.returncode == 0 else f" {done.stderr.strip().splitlines()[-1][:90]}"
        worst = f"{max(errors):.1e}" if errors else "-"
        print(f"| {path.stem} | {len(errors)} | {worst}{failed} | {forecast} | {ran} |", flush=True)


if __name__ == "__main__":
    main()
