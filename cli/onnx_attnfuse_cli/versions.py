"""Which versions are installed, found without importing anything."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

_ABSENT = "not installed"
_RUNTIMES = ("onnxruntime-gpu", "onnxruntime")


def version_of(package: str) -> str:
    """The installed version of a package, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT


def versions() -> Iterator[tuple[str, str]]:
    """Packages and Python with their versions, this library first; torch only where it is installed."""
    yield "attnfuse", version_of("onnx-attnfuse")
    yield from ((package, version_of(package)) for package in ("onnx", "onnx-ir"))
    runtimes = [(package, version) for package in _RUNTIMES if (version := version_of(package)) != _ABSENT]
    yield from runtimes or [("onnxruntime", _ABSENT)]
    if (torch := version_of("torch")) != _ABSENT:
        yield "torch", torch
    yield "Python", platform.python_version()
