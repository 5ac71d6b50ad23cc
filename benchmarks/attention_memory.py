"""Peak GPU memory of one padded causal attention against its length.

    python benchmarks/attention_memory.py MODEL.onnx OTHER.onnx ... [--lengths 2048,4096,8192,16384,32768]

The models are those of `attention_models.py --heads 1x64 --kinds padding_causal`, or what was made of them. Each length runs in a
process of its own, half of the keys padding; what the session has taken from the GPU when the run is over is counted, inputs and
outputs apart.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys


def one(path: pathlib.Path, length: int) -> float:
    """Megabytes taken by one model at one length."""
    import torch

    from benchmarks.attention_on_gpu import Data, session_of

    data = Data(1, length, 64, torch.float16, "right")
    session = session_of(path)
    binding = data.bound(session)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    session.run_with_iobinding(binding)
    after, _ = torch.cuda.mem_get_info()
    return (before - after) / 1e6


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=pathlib.Path, nargs="+")
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768")
    chosen = parser.parse_args()
    lengths = [int(text) for text in chosen.lengths.split(",")]
    if len(chosen.models) == len(lengths) == 1:
        print(f"MB {one(chosen.models[0], lengths[0]):.0f}")
        return
    print("| MB at length |", " | ".join(map(str, lengths)), "|")
    for path in chosen.models:
        cells: list[str] = []
        for length in lengths:
            command = [sys.executable, "-m", "benchmarks.attention_memory", str(path), "--lengths", str(length)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            cells.append(done.stdout.strip().rpartition("MB ")[2] if done.returncode == 0 else "failed")
        print(f"| {path.stem} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
