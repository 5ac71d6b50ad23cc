"""Where the keys of each entry of a batch lie, and the cache with new ones behind those of the past."""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array


def lengths(last: Array, total: Array, rows: int) -> tuple[Array, Array, int]:
    """Where the new keys of each entry start and end, and the longest end.

    Raises:
        ValueError: An entry is longer than the longest, or shorter than what is new in it.
    """
    ends, longest = last.reshape(-1) + 1, int(total.reshape(-1)[0])
    starts = np.zeros_like(ends) if rows == longest else ends - rows
    if starts.min() < 0 or ends.min() < 1 or ends.max() > longest:
        raise ValueError(f"lengths of {ends.tolist()}, the longest {longest}, do not fit {rows} queries")
    return starts, ends, longest


def appended(past: Array | None, fresh: Array, starts: Array, longest: int) -> Array:
    """The cache with the new keys or values of each entry behind its past; as long as it was, if that is longer."""
    batch, heads, rows, size = fresh.shape
    length = longest if past is None else max(longest, past.shape[2])
    result = np.zeros((batch, heads, length, size), fresh.dtype)
    for entry, start in enumerate(starts.tolist()):
        if past is not None:
            result[entry, :, :start] = past[entry, :, :start]
        result[entry, :, start : start + rows] = fresh[entry]
    return result
