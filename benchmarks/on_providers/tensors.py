"""Arrays as files of their bytes, so that a process in Python and one in node read the same."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Told = dict[str, Any]
"""Name, element type, sizes and file of an array, as plain JSON types."""


def save(arrays: Mapping[str, Array], prefix: pathlib.Path) -> list[Told]:
    """Writes arrays beside each other.

    Args:
        arrays: The arrays by name.
        prefix: The beginning of the names of the files.

    Returns:
        What each is and where.
    """
    told: list[Told] = []
    for place, (name, array) in enumerate(arrays.items()):
        file = f"{prefix}.{place}.bin"
        pathlib.Path(file).write_bytes(np.ascontiguousarray(array).tobytes())
        told.append({"name": name, "type": array.dtype.name, "dims": list(array.shape), "file": file})
    return told


def load(told: Sequence[Told]) -> dict[str, Array]:
    """Arrays that `save`, or a process in node, has written, by name."""
    return {item["name"]: np.fromfile(item["file"], _dtype(item["type"])).reshape(item["dims"]) for item in told}


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
