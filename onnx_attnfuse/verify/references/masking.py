"""Which keys a row may see, and how com.microsoft's MultiHeadAttention and Attention say it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import largest
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


def masked(logits: Array, mask: Array | None, fill: float, *, unidirectional: bool) -> Array:
    """Scores after padding and the triangle: padding adds `fill`, the triangle the lowest number in its place.

    So a row that sees only padding is as if there were none, as long as the type can tell its scores apart beside `fill`.
    """
    batch, _, rows, columns = logits.shape
    added = np.zeros(1, logits.dtype)
    if mask is not None:
        added = np.where(_kept(mask, batch, rows, columns), added, fill)
    if unidirectional:
        added = np.where(before(rows, columns, columns - rows), added, -largest(ir.DataType.from_numpy(logits.dtype)))
    return logits + added.astype(logits.dtype)


def _kept(mask: Array, batch: int, rows: int, columns: int) -> Array:
    """True where a mask of any form keeps a key, against (b, n, s, t).

    Raises:
        ValueError: It has none of the forms.
    """
    positions = places(columns)
    if mask.shape in {(batch,), (3 * batch + 2,)}:  # the second half of the longer form says where entries start
        return positions < mask[:batch, None, None, None]
    if mask.shape == (2 * batch,):
        ends, starts = mask.reshape(2, batch, 1, 1, 1)
        return (positions < ends) & (positions >= starts)
    if mask.shape == (batch, columns):
        return mask[:, None, None, :] > 0
    if mask.shape == (batch, rows, columns):
        return mask[:, None, :, :] > 0
    raise ValueError(f"a mask of {list(mask.shape)} is none for {batch} entries, {rows} queries and {columns} keys")
