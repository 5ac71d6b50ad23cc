"""Forecast against what ran, for every attention of a folder: ``python -m benchmarks.kernels_on_gpu FOLDER OUT.md [--seq N]``.

Each model is fused for the GPU here under each policy, as `attnfuse kernels --confirm` does, run once at a length, and what ONNX
Runtime says of the kernel of every operator is held against the forecast.
"""

from __future__ import annotations

import argparse
import collections
import pathlib

import onnx_attnfuse
from onnx_attnfuse import Policy
from onnx_attnfuse.bench.confirm_kernels import check_gpu, confirm_kernels
from onnx_attnfuse.errors import AttnFuseError
from onnx_attnfuse.fusion.forecast_model import sequence_symbols
from onnx_attnfuse.graph import io

POLICIES = {"none": Policy(), "flash": Policy(flash=True), "efficient": Policy(efficient=True)}


def confirmed(path: pathlib.Path, policy: Policy, arch: int, seq: int) -> tuple[collections.Counter[str], str]:
    """Outcomes of the operators of one model, and what is worth a word."""
    dim = dict.fromkeys(sequence_symbols(io.load(path)), seq)
    options = onnx_attnfuse.Options(ep="cuda", arch=f"sm{arch}", verify="none", dim=dim, policy=policy)
    try:
        found = confirm_kernels(onnx_attnfuse.optimize(path, options), arch, dim)
    except AttnFuseError as error:
        return collections.Counter({"could not run": 1}), str(error)[:120]
    other = [f"{item.op}: {item.forecast}, ran {' '.join(item.ran)}" for item in found if item.outcome == "another kernel"]
    kernels = collections.Counter(kernel for item in found for kernel in item.ran)
    return collections.Counter(item.outcome for item in found), "; ".join(other) or ", ".join(sorted(kernels))


def main() -> None:
    """Runs all, writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seq", type=int, default=300)
    chosen = parser.parse_args()
    arch = check_gpu()
    total = {name: collections.Counter[str]() for name in POLICIES}
    rows: list[str] = []
    for path in sorted(chosen.folder.glob("*.onnx")):
        for name, policy in POLICIES.items():
            outcomes, word = confirmed(path, policy, arch, chosen.seq)
            total[name].update(outcomes)
            counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "nothing fused"
            rows.append(f"| {path.stem} | {name} | {counted} | {word} |")
            print(rows[-1], flush=True)
    lines = [
        "# Kernels: forecast and ran",
        "",
        f"`python -m benchmarks.kernels_on_gpu FOLDER OUT --seq {chosen.seq}` on sm{arch}, float16 exports of the zoo.",
        "",
        *(f"- policy {name}: {', '.join(f'{count} {what}' for what, count in found.items())}" for name, found in total.items()),
        "",
        "| model | policy | operators | kernels that ran, or what differs |",
        "|---|---|---|---|",
        *rows,
    ]
    chosen.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
