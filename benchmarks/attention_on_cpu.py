"""Attention on the CPU: spelled out, by onnxscript and by us, from 32 to 2048 queries.

    python benchmarks/attention_on_cpu.py FOLDER [--lengths 32,64,128,256,512,1024,2048] [--batch 1]

FOLDER holds what `attention_models.py --heads 12x64 --dtypes float32` wrote. Milliseconds per attention, and the median over
rounds of the ratio to what is spelled out: the three take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from benchmarks.attention_models import KINDS, LAYERS

_SECONDS = 2.0
_LEAST_ROUNDS = 7


def session_of(model: pathlib.Path | bytes) -> Any:
    """A session on the CPU with ONNX Runtime's own optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = str(model) if isinstance(model, pathlib.Path) else model
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def inputs_of(session: Any, batch: int, length: int) -> dict[str, Any]:
    """Random operands, and a mask with padding on the right."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for item in session.get_inputs():
        if item.name == "mask":
            feeds["mask"] = np.ones((batch, length), np.int64)
            feeds["mask"][-1, -(length // 4) :] = 0
        else:
            feeds[item.name] = rng.standard_normal((batch, length, item.shape[2]), np.float32)
    return feeds


def compared(sessions: dict[str, Any], batch: int, length: int) -> dict[str, tuple[float, float]]:
    """Milliseconds and ratio to the first of each."""
    runs = {name: (session, inputs_of(session, batch, length)) for name, session in sessions.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for session, feeds in runs.values():
        session.run(None, feeds)
    start = time.perf_counter()
    while time.perf_counter() - start < _SECONDS or len(times["ours"]) < _LEAST_ROUNDS:
        for name, (session, feeds) in runs.items():
            before = time.perf_counter()
            session.run(None, feeds)
            times[name].append(time.perf_counter() - before)
    base = np.asarray(times["unfused"])
    return {name: (1e3 * float(np.median(found)) / LAYERS, float(np.median(found / base))) for name, found in times.items()}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--lengths", default="32,64,128,256,512,1024,2048")
    parser.add_argument("--batch", type=int, default=1)
    chosen = parser.parse_args()
    lengths = [int(text) for text in chosen.lengths.split(",")]
    print("| mask | tool |", " | ".join(f"s = {length}" for length in lengths), "|")
    print("|" + "---|" * (len(lengths) + 2))
    for kind in KINDS:
        path = chosen.folder / f"{kind}-12x64-float32.onnx"
        ours = onnx_attnfuse.optimize(path, ep="cpu", verify="none").model
        sessions = {
            "unfused": session_of(path),
            "onnxscript": session_of(path.with_suffix(".onnxscript.onnx")),
            "ours": session_of(ir.to_proto(ours).SerializeToString()),
        }
        found = {length: compared(sessions, chosen.batch, length) for length in lengths}
        for name in sessions:
            cells = [f"{found[length][name][0]:.3f} ({found[length][name][1]:.2f})" for length in lengths]
            print(f"| {kind.replace('_', ' + ')} | {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
