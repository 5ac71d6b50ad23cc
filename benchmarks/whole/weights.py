"""Weights for graphs that were stored without them: seeded noise, written once to the data file the graph refers to."""

from __future__ import annotations

import math
import pathlib
import zlib
from typing import Any

import numpy as np
import onnx

PLACE = "{}.onnx.data"
"""The data file of a model, by its name."""
PAGE = 4096
_POOL = 16_777_259
"""Different numbers that are drawn; a prime, so that rows of a weight are not alike."""
_SCALE = 0.02


def fill(path: pathlib.Path) -> int:
    """Writes the weights of a graph, unless they are there; returns their size in bytes.

    Vectors named ``weight`` scale what was normalised, and are 1. All else is normal with a standard deviation of 0.02.
    """
    tensors = [tensor for tensor in onnx.load(path, load_external_data=False).graph.initializer if tensor.external_data]
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors]
    size = max((int(place["offset"]) + int(place["length"]) for place in places), default=0)
    target = path.with_name(PLACE.format(path.stem))
    if target.exists() and target.stat().st_size == size:
        return size
    pool = (np.random.default_rng(0).standard_normal(_POOL, np.float32) * _SCALE).astype(np.float16)
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as file:
        for tensor, place in zip(tensors, places, strict=True):
            file.seek(int(place["offset"]))
            for piece in _pieces(tensor, pool):
                file.write(piece)
        file.truncate(size)
    part.replace(target)
    return size


def _pieces(tensor: onnx.TensorProto, pool: np.ndarray[Any, Any]) -> list[Any]:
    """What a tensor consists of, as pieces of the pool."""
    count = math.prod(tensor.dims)
    if tensor.data_type != onnx.TensorProto.FLOAT16:
        raise ValueError(f"{tensor.name} is not float16")
    if len(tensor.dims) == 1 and tensor.name.endswith("weight"):
        return [np.ones(count, np.float16)]
    start = zlib.crc32(tensor.name.encode()) % _POOL
    pieces = [pool[start : start + count]]
    left = count - pieces[0].size
    pieces += [pool] * (left // _POOL) + [pool[: left % _POOL]]
    return [memoryview(piece) for piece in pieces if piece.size]
