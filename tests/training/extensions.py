"""Builds the C++ extensions of ORTModule on a machine without a GPU, beside the installed onnxruntime-training.

    python -m tests.training.extensions

ORTModule's own installer builds the CUDA extensions as soon as torch is a CUDA build, and stops where there is no CUDA toolkit.
Those for the CPU are enough there; they are built as if torch knew no CUDA. `torch_interop_utils`, which runs custom functions of
autograd, is left out where its sources are of another PyTorch; `newer_torch` says what that means.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import runpy
import shutil
import sys
import tempfile
from collections.abc import Generator
from typing import Any
from unittest import mock

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.training.ortmodule.newer_torch import INTEROP, extensions, interop_can_be_built, is_built


def build() -> list[str]:
    """Builds every CPU extension that is not there yet, and can be.

    Returns:
        The names of those that were built.

    Raises:
        MissingDependencyError: onnxruntime-training or torch is not installed.
    """
    missing = [name for name in ("torch", "onnxruntime.training") if not _is_installed(name)]
    if missing:
        raise MissingDependencyError(
            f"{missing[0].replace('.', '-')} is not installed; run pip install onnxruntime-training==1.19.2 torch"
        )
    home = extensions()
    sources = sorted(setup.parent for setup in home.glob("cpu/*/setup.py"))
    wanted = [source for source in sources if not is_built(source.name) and (source.name != INTEROP or interop_can_be_built())]
    for source in wanted:
        _build(source, home)
    return [source.name for source in wanted]


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def _build(source: pathlib.Path, home: pathlib.Path) -> None:
    """Builds one extension and copies it to where ORTModule looks for it."""
    torch: Any = importlib.import_module("torch")
    with tempfile.TemporaryDirectory() as folder, _working_in(folder):  # a setup.py reads the folder's pyproject.toml
        arguments = [str(source / "setup.py"), "build", "--build-base", folder]
        with mock.patch.object(torch.version, "cuda", None), mock.patch.object(sys, "argv", arguments):
            runpy.run_path(arguments[0], run_name="__main__")
        for library in pathlib.Path(folder).glob("lib.*/*.so"):
            shutil.copy2(library, home)


@contextlib.contextmanager
def _working_in(folder: str) -> Generator[None]:
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    build()
