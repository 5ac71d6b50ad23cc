"""Which keys a row may see."""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, places


def before(rows: int, columns: int, offset: int | Array) -> Array:
    """True up to the key that is `offset` behind the row."""
    return places(columns) <= places(rows)[:, None] + offset


def seen(rows: int, columns: int, offset: int, *, causal: bool, window: int) -> Array:
    """True for the keys before a row's own, that one counted, or for the last `window` of these; for all if not `causal`."""
    if not causal:
        return np.ones((rows, columns), np.bool_)
    found = before(rows, columns, offset)
    return found & ~before(rows, columns, offset - window) if window > 0 else found
