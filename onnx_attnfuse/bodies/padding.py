"""The bias that MultiHeadAttention and Attention add for padding and for the triangle, from every documented mask."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import TRUTH, AttentionInputs, before, by_entry, chosen, compared, places
from onnx_attnfuse.bodies.fused_node import FusedNode
from onnx_attnfuse.graph.build import dims_of
from onnx_attnfuse.graph.dtypes import largest, widened
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_DEFAULT_PADDING_FILL = -10000.0
"""Added to the scores of padding where `mask_filter_value` is not given."""


def attention_inputs(
    fused: FusedNode, operands: tuple[ir.Value, ir.Value, ir.Value], heads: int, mask: ir.Value | None, *, starts: bool = False
) -> AttentionInputs:
    """The attention of the operator: its scale, its bias, and what the mask and the triangle add to the scores.

    Args:
        fused: The operator.
        operands: Queries (b, n, s, h), keys (b, n, t, h) and values (b, n, t, v), those of earlier positions included.
        heads: How many heads there are.
        mask: Lengths or truth values, in any of the forms the operators take.
        starts: Whether (2b) are ends and starts.

    Raises:
        Refused: The mask has a shape that tells no form.
    """
    batch, _, rows, size = dims_of(fused.build, operands[0])
    sizes = batch, rows, dims_of(fused.build, operands[1])[2]
    penalty = _penalty(fused, mask, sizes, triangle=bool(fused.attribute("unidirectional", 0)), starts=starts)
    return AttentionInputs(
        *operands,
        fused.dtype(),
        heads,
        fused.number(size, "the head size"),
        scale=fused.attribute("scale"),
        added=tuple(item for item in (fused.given("attention_bias"), penalty) if item is not None),
    )


def _penalty(
    fused: FusedNode, mask: ir.Value | None, sizes: tuple[Dim, Dim, Dim], *, triangle: bool, starts: bool
) -> ir.Value | None:
    """The penalty that masks scores: `mask_filter_value` for padding, and for the triangle the lowest number in its place.

    A triangle lets a row see the keys up to its own only, which is as far from the last as the row is. The value broadcasts to
    (b, n, s, t), in the type of the scores; None if nothing is added.
    """
    build, (_, rows, columns) = fused.build, sizes
    wide = widened(fused.dtype())
    found, zero = None, build.scalar(0.0, wide)
    if mask is not None:
        kept = _kept(fused, mask, sizes, starts=starts)
        found = chosen(build, kept, zero, build.scalar(fused.attribute("mask_filter_value", _DEFAULT_PADDING_FILL), wide))
    if triangle:
        lowest = build.scalar(-largest(wide), wide)
        found = chosen(build, before(build, rows, columns, columns - rows), zero if found is None else found, lowest)
    return found


def _kept(fused: FusedNode, mask: ir.Value, sizes: tuple[Dim, Dim, Dim], *, starts: bool) -> ir.Value:
    """True where the mask keeps a key: (b, 1, 1, t) or (b, 1, s, t)."""
    build, (batch, rows, columns), dims = fused.build, sizes, fused.dims(mask)
    if len(dims) in {2, 3}:
        nothing = build.constant(np.asarray(0, np.int32))
        fused.take_equal(dims, (batch, columns) if len(dims) == 2 else (batch, rows, columns), "the mask")
        kept = compared(build, "Greater", mask, nothing)
        return build.reshape(kept, (batch, 1, 1, columns) if len(dims) == 2 else (batch, 1, rows, columns))
    if len(dims) != 1:
        raise Refused("mask-form", f"a mask of {len(dims)} axes cannot be decomposed", fused.node.name)
    if not starts and dims[0] == 2 * batch:
        raise Refused("mask-form", "ends and starts are a mask of Attention only", fused.node.name)
    if isinstance(batch, int) and isinstance(dims[0], int) and dims[0] not in {batch, 2 * batch, 3 * batch + 2}:
        raise Refused("mask-form", f"a mask of {dims[0]} numbers does not fit {batch} entries", fused.node.name)
    ends, keys = _first(fused, mask, batch), places(build, columns)
    seen = compared(build, "Less", keys, by_entry(build, ends))
    if not starts or dims[0] in {batch, 3 * batch + 2}:
        return seen
    if dims[0] != 2 * batch:
        raise Refused("mask-form", f"whether {dims[0]} numbers are lengths, or ends and starts, is unknown", fused.node.name)
    begins = build.cast(
        build.node("Slice", _lengths_slice(fused, mask, batch), dims=[batch], dtype=ir.DataType.INT32), ir.DataType.INT64
    )
    return build.chained("And", [seen, build.elementwise("GreaterOrEqual", [keys, by_entry(build, begins)], TRUTH)])


def _first(fused: FusedNode, mask: ir.Value, batch: Dim) -> ir.Value:
    """The first number of each entry, as integers like those of positions."""
    build = fused.build
    ends = mask if dims_of(build, mask)[0] == batch else build.slice(mask, 0, 0, batch)
    return build.cast(ends, ir.DataType.INT64)


def _lengths_slice(fused: FusedNode, mask: ir.Value, batch: Dim) -> list[ir.Value]:
    """Inputs of a Slice of the second number of each entry."""
    build = fused.build
    return [mask, build.shape([batch]), build.shape([2 * batch]), build.constant([0])]
