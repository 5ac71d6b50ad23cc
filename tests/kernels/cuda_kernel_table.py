"""The kernels that ONNX Runtime's CUDA provider has, as onnx_attnfuse/kernels/cuda_kernels.txt: taken from a build that has them.

    python tests/kernels/cuda_kernel_table.py                  # with onnxruntime-gpu, on a machine with a GPU; writes the table
    python tests/kernels/cuda_kernel_table.py --wheel FILE.whl # the same of a wheel, without a GPU; needs gcc, nm and readelf
    python tests/kernels/cuda_kernel_table.py --check          # exits 1 if the table says something else
    python tests/kernels/cuda_kernel_table.py --provider CPUExecutionProvider --output /dev/stdout   # to see it work without one

The types of kernels that are registered one by one for an operator are put together: all types that a parameter may have.

A wheel is unpacked into a temporary folder, beside libraries that define each symbol its providers want of CUDA and TensorRT,
and is read in a second process. TensorRT's symbols are needed, too: the list of kernels walks over all providers of the build,
and crashes where one does not load.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

ROOT = pathlib.Path(__file__).parents[2]
TABLE = ROOT / "onnx_attnfuse" / "kernels" / "cuda_kernels.txt"
FORM = "# domain operator versions inputs>outputs parameter=types; a dash is a parameter of one fixed type"
Registered: TypeAlias = tuple[str, str, tuple[int, int], Mapping[str, Sequence[str]]]
"""A kernel: domain, operator, first and last version, and the types of each parameter as ONNX writes them."""

_OPEN = 2**31 - 1
_TENSOR = re.compile(r"tensor\((\w+)\)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--provider", default="CUDAExecutionProvider")
    parser.add_argument("--output", type=pathlib.Path, default=TABLE)
    parser.add_argument("--wheel", type=pathlib.Path, help="read this wheel of the running Python's version, without a GPU")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    wanted = parser.parse_args()
    if wanted.wheel is not None:
        return of_wheel(wanted.wheel.resolve(), [item for item in sys.argv[1:] if item not in {"--wheel", str(wanted.wheel)}])
    rows = list(lines(installed(wanted.provider)))
    if not rows:
        sys.exit(f"this build of onnxruntime {onnxruntime.__version__} has no kernels of {wanted.provider}")
    head = (
        f"# Kernels of {wanted.provider} in onnxruntime {onnxruntime.__version__}, written by tests/kernels/cuda_kernel_table.py"
    )
    text = "\n".join([head, FORM, *rows, ""])
    if wanted.check:
        same = wanted.output.read_text(encoding="utf-8").splitlines()[2:] == rows
        print("the table is as it was" if same else f"{wanted.output} says something else; write it anew")
        return int(not same)
    wanted.output.write_text(text, encoding="utf-8")
    print(f"{len(rows)} kernels", file=sys.stderr)
    return 0


def installed(provider: str) -> Iterator[Registered]:
    """The kernels of a provider in the build of onnxruntime that is installed."""
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == provider:
            yield kernel.domain, kernel.op_name, kernel.version_range, kernel.type_constraints


def lines(kernels: Iterable[Registered]) -> Iterator[str]:
    """A line for each operator and range of versions."""
    types: dict[tuple[str, str, int, int], dict[str, set[str]]] = {}
    for domain, op, versions, constraints in kernels:
        found = types.setdefault((domain or "ai.onnx", op, *versions), {})
        for parameter, names in constraints.items():
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


def of_wheel(wheel: pathlib.Path, arguments: Sequence[str]) -> int:
    """Runs this script with the onnxruntime of a wheel, and libraries of its own making in the place of CUDA's."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        stubs = pathlib.Path(folder) / "stubs"
        stubs.mkdir()
        make_stubs(pathlib.Path(folder, "onnxruntime", "capi").glob("libonnxruntime_providers_*.so"), stubs)
        environment = os.environ | {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": folder}
        return subprocess.call([sys.executable, __file__, *arguments], env=environment)


def make_stubs(providers: Iterable[pathlib.Path], folder: pathlib.Path) -> None:
    """Writes the libraries of NVIDIA that providers load; all that their functions do is return 0.

    The loader wants each symbol in the version that its user asks for.
    """
    versions: dict[str, str] = {}
    libraries: set[str] = set()
    for provider in providers:
        dynamic = subprocess.check_output(["readelf", "-d", provider], text=True)
        libraries.update(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv).+?)\]", dynamic))
        undefined = subprocess.check_output(["nm", "-D", "--undefined-only", "--with-symbol-versions", provider], text=True)
        for line in undefined.splitlines():
            name, _, version = line.split()[-1].partition("@")
            versions[name] = version.strip("@")
    for library in libraries:
        names = [name for name in versions if library_of(name) == library.split(".so")[0]]
        version = next((versions[name] for name in names if versions[name]), library)
        source, script = folder / f"{library}.c", folder / f"{library}.map"
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names) or "int nothing;\n")
        script.write_text(version + " { global: *; };\n")
        linked = [f"-Wl,-soname,{library}", str(source), f"-Wl,--version-script={script}"]
        subprocess.check_call(["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(folder / library), *linked])


def library_of(symbol: str) -> str:
    """The library of NVIDIA that defines a symbol, without its version; empty for others."""
    if re.match(r"cuda[A-Z]|__cuda", symbol):
        return "libcudart"
    found = re.match(r"cublasLt|cublas|curand|cudnn|cufft", symbol)
    if found is not None:
        return f"lib{found[0]}"
    if re.match(r"cu[A-Z]", symbol):
        return "libcuda"
    if symbol.startswith("createNv") and "onnx" in symbol.lower():
        return "libnvonnxparser"
    is_maker = symbol.startswith(("create", "get", "init")) and re.search(r"Infer|getPluginRegistry|getLogger", symbol)
    return "libnvinfer" if is_maker else ""


if __name__ == "__main__":
    sys.exit(main())
