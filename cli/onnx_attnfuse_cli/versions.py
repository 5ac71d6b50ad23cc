"""Which versions are installed, found without importing anything."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str:
    """The installed version of a package, or `not installed`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
