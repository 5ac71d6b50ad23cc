"""The kernels that ONNX Runtime's CUDA provider has, as onnx_attnfuse/kernels/cuda_kernels.txt: taken from a build that has them.

    python benchmarks/cuda_kernel_table.py                  # with onnxruntime-gpu, on a machine with a GPU; writes the table
    python benchmarks/cuda_kernel_table.py --check          # exits 1 if the table says something else
    python benchmarks/cuda_kernel_table.py --provider CPUExecutionProvider --output /dev/stdout     # to see it work without one

The types of kernels that are registered one by one for an operator are put together: all types that a parameter may have.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Iterator

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "onnx_attnfuse" / "kernels" / "cuda_kernels.txt"
FORM = "# domain operator versions inputs>outputs parameter=types; a dash is a parameter of one fixed type"
_OPEN = 2**31 - 1
_TENSOR = re.compile(r"tensor\((\w+)\)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--provider", default="CUDAExecutionProvider")
    parser.add_argument("--output", type=pathlib.Path, default=TABLE)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    wanted = parser.parse_args()
    rows = list(lines(wanted.provider))
    if not rows:
        sys.exit(f"this build of onnxruntime {onnxruntime.__version__} has no kernels of {wanted.provider}")
    head = f"# Kernels of {wanted.provider} in onnxruntime {onnxruntime.__version__}, written by benchmarks/cuda_kernel_table.py"
    text = "\n".join([head, FORM, *rows, ""])
    if wanted.check:
        same = wanted.output.read_text(encoding="utf-8").splitlines()[2:] == rows
        print("the table is as it was" if same else f"{wanted.output} says something else; write it anew")
        return int(not same)
    wanted.output.write_text(text, encoding="utf-8")
    print(f"{len(rows)} kernels", file=sys.stderr)
    return 0


def lines(provider: str) -> Iterator[str]:
    """A line for each operator and range of versions."""
    types: dict[tuple[str, str, int, int], dict[str, set[str]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider != provider:
            continue
        found = types.setdefault((kernel.domain or "ai.onnx", kernel.op_name, *kernel.version_range), {})
        for parameter, names in kernel.type_constraints.items():
            found.setdefault(parameter, set()).update(_TENSOR.findall(" ".join(names)))
    formals = parameters()
    for (domain, op, first, last), found in sorted(types.items()):
        versions = f"{first}+" if last >= _OPEN else f"{first}-{last}"
        since = max((number for number in formals.get((domain, op), {}) if number <= first), default=None)
        inputs, outputs = ([], []) if since is None else formals[domain, op][since]
        sides = (",".join(name if name in found else "-" for name in side) for side in (inputs, outputs))
        yield " ".join(
            [domain, op, versions, ">".join(sides), *(f"{name}={'|'.join(sorted(found[name]))}" for name in sorted(found))]
        )


def parameters() -> dict[tuple[str, str], dict[int, tuple[list[str], list[str]]]]:
    """The type parameters of the inputs and outputs of every operator, by the version of its schema."""
    found: dict[tuple[str, str], dict[int, tuple[list[str], list[str]]]] = {}
    for schema in state.get_all_operator_schema():
        sides = ([item.typeStr for item in schema.inputs], [item.typeStr for item in schema.outputs])
        found.setdefault((schema.domain or "ai.onnx", schema.name), {})[schema.since_version] = sides
    return found


if __name__ == "__main__":
    sys.exit(main())
