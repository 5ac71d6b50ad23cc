"""Builds what ORTModule needs of C++ on a machine without a GPU, beside the installed onnxruntime-training.

    .venv-training/bin/python tests/training/build_extensions.py

Its own installer builds the CUDA extensions as soon as torch is a CUDA build, and stops where there is no CUDA toolkit. Those for
the CPU are enough there; they are built as if torch knew no CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import runpy
import shutil
import sys
import tempfile
from unittest import mock

import torch


def main() -> int:
    """Builds every CPU extension that is not there yet; returns the exit status."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        sys.stderr.write("onnxruntime-training is not installed; pip install onnxruntime-training==1.19.2\n")
        return 2
    home = pathlib.Path(spec.origin).parent / "training" / "ortmodule" / "torch_cpp_extensions"
    for setup in sorted(home.glob("cpu/*/setup.py")):
        if any(home.glob(f"{setup.parent.name}*.so")):
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # a setup.py reads the pyproject.toml of the working directory
            arguments = [str(setup), "build", "--build-base", folder]
            with mock.patch.object(torch.version, "cuda", None), mock.patch.object(sys, "argv", arguments):
                runpy.run_path(str(setup), run_name="__main__")
            for library in pathlib.Path(folder).glob("lib.*/*.so"):
                shutil.copy2(library, home)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
