"""The bias that MultiHeadAttention and Attention add for padding and for the triangle, from every documented mask."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import largest
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.core import working_type
from onnx_attnfuse.transforms.decompose.pieces import TRUTH, before, by_entry, chosen, compared, known, places
from onnx_attnfuse.transforms.decompose.site import Site

_DEFAULT_PADDING_FILL = -10000.0
"""Added to the scores of padding where `mask_filter_value` is not given."""


def penalty(
    site: Site, mask: ir.Value | None, sizes: tuple[Dim, Dim, Dim], *, triangle: bool, starts: bool = False
) -> ir.Value | None:
    """The penalty that masks scores: `mask_filter_value` for padding, and for the triangle the lowest number in its place.

    Args:
        site: The operator.
        mask: Lengths or truth values, in any of the forms the operators take.
        sizes: Entries, queries and keys.
        triangle: Whether a row sees the keys up to its own only, which is as far from the last as the row is.
        starts: Whether (2b) are ends and starts.

    Returns:
        A value that broadcasts to (b, n, s, t), in the type of the scores; None if nothing is added.

    Raises:
        Refused: The mask has a shape that tells no form.
    """
    build, (_, rows, columns) = site.build, sizes
    wide = working_type(site.dtype())
    found, zero = None, build.scalar(0.0, wide)
    if mask is not None:
        kept = _kept(site, mask, sizes, starts=starts)
        found = chosen(build, kept, zero, build.scalar(site.attribute("mask_filter_value", _DEFAULT_PADDING_FILL), wide))
    if triangle:
        lowest = build.scalar(-largest(wide), wide)
        found = chosen(build, before(build, rows, columns, columns - rows), zero if found is None else found, lowest)
    return found


def _kept(site: Site, mask: ir.Value, sizes: tuple[Dim, Dim, Dim], *, starts: bool) -> ir.Value:
    """True where the mask keeps a key: (b, 1, 1, t) or (b, 1, s, t)."""
    build, (batch, rows, columns), dims = site.build, sizes, site.dims(mask)
    if len(dims) in {2, 3}:
        nothing = build.constant(np.asarray(0, np.int32))
        kept = compared(build, "Greater", mask, nothing)
        return build.reshape(kept, (batch, 1, 1, columns) if len(dims) == 2 else (batch, 1, rows, columns))
    if len(dims) != 1:
        raise Refused("mask-form", f"a mask of {len(dims)} axes is not spelled out", site.node.name)
    ends, keys = _first(site, mask, batch), places(build, columns)
    seen = compared(build, "Less", keys, by_entry(build, ends))
    if not starts or dims[0] in {batch, 3 * batch + 2}:
        return seen
    if dims[0] != 2 * batch:
        raise Refused("mask-form", f"whether {dims[0]} numbers are lengths, or ends and starts, is unknown", site.node.name)
    begins = build.cast(build.node("Slice", _behind(site, mask, batch), dims=[batch], dtype=ir.DataType.INT32), ir.DataType.INT64)
    return build.logical("And", [seen, build.elementwise("GreaterOrEqual", [keys, by_entry(build, begins)], TRUTH)])


def _first(site: Site, mask: ir.Value, batch: Dim) -> ir.Value:
    """The first number of each entry, as integers like those of positions."""
    build = site.build
    ends = mask if known(build, mask)[0] == batch else build.slice(mask, 0, 0, batch)
    return build.cast(ends, ir.DataType.INT64)


def _behind(site: Site, mask: ir.Value, batch: Dim) -> list[ir.Value]:
    """Inputs of a Slice of the second number of each entry."""
    build = site.build
    return [mask, build.shape([batch]), build.shape([2 * batch]), build.constant([0])]
