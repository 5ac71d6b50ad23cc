"""Memory of the GPU that `If` nodes take in ONNX Runtime, by their number and by provider options.

    python benchmarks/branch_memory.py OUT.md

Each model is a chain of products of 256 x 256 in float16, some of them in both branches of an `If`; each runs in a process of its
own. The memory is what the device has less after the first run than before the session was made.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime

PRODUCTS, SIZE = 24, 256
COUNTS = (0, 1, 6, 12, 24)
OPTIONS: dict[str, dict[str, str]] = {"default": {}, "use_ep_level_unified_stream=1": {"use_ep_level_unified_stream": "1"}}


def chain(ifs: int) -> onnx.ModelProto:
    """A chain of products, of which so many stand in branches."""
    lines: list[str] = []
    value = "x"
    for place in range(PRODUCTS):
        following = f"y{place}"
        if place < ifs:
            branches = ", ".join(
                f"{name}: graph = b{place}{name} () => (float16[{SIZE},{SIZE}] z{name}) {{ z{name} = MatMul({value}, w) }}"
                for name in ("then_branch", "else_branch")
            )
            lines.append(f"{following} = If <{branches}> (test)")
        else:
            lines.append(f"{following} = MatMul({value}, w)")
        value = following
    body = "\n".join(lines)
    shape = f"float16[{SIZE},{SIZE}]"
    text = f'<ir_version: 10, opset_import: ["" : 20]> g ({shape} x, {shape} w, bool test) => ({shape} {value}) {{ {body} }}'
    return onnx.parser.parse_model(text)


def measured(ifs: int, options: dict[str, str]) -> dict[str, float]:
    """Megabytes taken by the session and by its first run."""
    import torch

    def free() -> float:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] / 1e6

    torch.zeros(1, device="cuda")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    start = free()
    choices = {"arena_extend_strategy": "kSameAsRequested", **options}
    session = onnxruntime.InferenceSession(
        chain(ifs).SerializeToString(), settings, providers=[("CUDAExecutionProvider", choices), "CPUExecutionProvider"]
    )
    loaded = free()
    ones = np.full((SIZE, SIZE), 1 / SIZE, np.float16)
    session.run(None, {"x": ones, "w": ones, "test": np.asarray(True)})
    return {"loading": start - loaded, "first run": loaded - free()}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--one", nargs=2, metavar=("IFS", "OPTIONS"), help="measure this one, and print JSON")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measured(int(chosen.one[0]), json.loads(chosen.one[1]))))
        return
    lines = ["| `If` nodes | options | MB, loading | MB, first run |", "|---|---|---|---|"]
    for ifs in COUNTS:
        for name, options in OPTIONS.items():
            command = [sys.executable, __file__, str(chosen.out), "--one", str(ifs), json.dumps(options)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            found = json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else {}
            cells = [f"{found[key]:.0f}" if found else ran.stderr[-200:] for key in ("loading", "first run")]
            lines.append(f"| {ifs} | {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    chosen.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
