"""ai.onnx Attention of opsets 23 to 25, decomposed as ONNX Runtime computes it.

A row that sees nothing gives 0, and the lowest number of a mask's type is not seen, either.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.core import (
    AttentionInputs,
    arithmetic,
    before,
    by_entry,
    chosen,
    compared,
    decompose,
    joined,
    length_of,
    merge_heads,
    moved,
    places,
    split_heads,
)
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import held_as_lowest, largest, widened
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_MASKED = 2
"""The mode in which the scores after the mask are given out."""
WINDOWS = "left_window_size", "right_window_size"
"""How far before and after its own position a row sees, -1 for without end."""


def body(fused: FusedNode) -> Body:
    """The output, both presents, and the scores or weights that are asked for.

    Raises:
        Refused: It cannot be decomposed exactly.
    """
    build, dtype = fused.build, fused.dtype()
    if dtype == ir.DataType.DOUBLE:
        raise Refused(
            "not-decomposed", "Attention in float64 cannot be decomposed: its fully masked rows differ", fused.node.name
        )
    scale = fused.attribute("scale")
    if scale is not None and scale <= 0:
        raise Refused("malformed", f"a scale of {scale}", fused.node.name)
    query, key, value = _operands(fused)
    _, heads, rows, size = dims_of(build, query)
    past = fused.all_given("past_key", "past_value")
    offset: Dim | ir.Value = 0
    if past:
        offset = fused.dims(past[0])[2]
        key, value = (joined(build, [old, new], 2) for old, new in zip(past, (key, value), strict=True))
    lengths, columns = fused.given("nonpad_kv_seqlen"), dims_of(build, key)[2]
    mask = _mask(fused, columns)
    seen = [mask] if mask is not None and build.facts.dtype(mask) == ir.DataType.BOOL else []
    if lengths is not None:
        seen.append(compared(build, "Less", places(build, columns), by_entry(build, lengths)))
        offset = arithmetic(build, "Sub", by_entry(build, lengths), length_of(build, rows))
    seen += _within(fused, rows, columns, offset)
    sees_itself = isinstance(offset, ir.Value) or columns == offset + rows or fused.attribute(WINDOWS[0], -1) < 0
    problem = AttentionInputs(
        query,
        key,
        value,
        dtype,
        fused.number(heads, "the number of heads"),
        fused.number(size, "the head size"),
        scale=scale,
        softcap=fused.attribute("softcap", 0.0),
        added=() if mask is None or mask in seen else (_unseen(fused, mask, (rows, columns)),),
        seen=build.chained("And", seen) if seen else None,
        empty_is_zero=mask is not None or lengths is not None or not sees_itself,
    )
    found = decompose(build, problem)
    mode: int = fused.attribute("qk_matmul_output_mode", 0)
    masked = _masked(build, problem, found.capped, mask) if mode == _MASKED else found.masked
    asked = (found.raw, found.capped, masked, found.weights)[mode]
    result = merge_heads(build, found.result) if len(fused.dims(fused.operand("Q"))) == 3 else found.result
    frontier = (*map(fused.operand, "QKV"), *past)
    return Body((result, key, value, build.cast(asked, dtype)), frontier, masks=() if mask is None else (mask,))


def _masked(build: Builder, problem: AttentionInputs, scores: ir.Value, mask: ir.Value | None) -> ir.Value:
    """The scores after the mask as they are given out: a mask is added as it is, an unseen key has the lowest number."""
    wide = widened(problem.dtype)
    if mask is not None and problem.added:
        scores = build.elementwise("Add", [scores, build.cast(mask, wide)], wide)
    if problem.seen is None:
        return scores
    return chosen(build, problem.seen, scores, build.scalar(-largest(problem.dtype), wide))


def _within(fused: FusedNode, rows: Dim, columns: Dim, offset: Dim | ir.Value) -> list[ir.Value]:
    """Truth values for the keys that are not too far before a row's position, and not too far after it."""
    back, ahead = (fused.attribute(name, -1) for name in WINDOWS)
    build = fused.build
    ahead = 0 if fused.attribute("is_causal", 0) else ahead
    found = [before(build, rows, columns, moved(build, offset, ahead))] if ahead >= 0 else []
    if back >= 0:
        found.append(before(build, rows, columns, moved(build, offset, -back - 1), opposite=True))
    return found


def _operands(fused: FusedNode) -> list[ir.Value]:
    """Queries (b, n, s, h), keys and values (b, m, t, h)."""
    found = list(map(fused.operand, "QKV"))
    if len(fused.dims(found[0])) == 4:
        return found
    counts = [fused.count(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    head_sizes = [fused.share(fused.dims(item)[2], count, "the head size") for item, count in zip(found, counts, strict=True)]
    if head_sizes[0] != head_sizes[1]:
        raise Refused("malformed", f"heads of {head_sizes[0]} channels meet keys of {head_sizes[1]}", fused.node.name)
    return [split_heads(fused.build, *item) for item in zip(found, counts, head_sizes, strict=True)]


def _mask(fused: FusedNode, columns: Dim) -> ir.Value | None:
    """The mask; keys beyond its length are masked."""
    mask, build = fused.given("attn_mask"), fused.build
    if mask is None:
        return None
    *leading, last = fused.dims(mask)
    if not isinstance(last, int) or not isinstance(columns, int) or last >= columns:
        fused.equal.append((last, columns))
        return mask
    dtype = build.facts.dtype(mask)
    if dtype is None or not (dtype.is_floating_point() or dtype == ir.DataType.BOOL):
        raise Refused("malformed", "a mask of neither numbers nor truth values", fused.node.name)
    filler = build.constant(np.asarray(False)) if dtype == ir.DataType.BOOL else build.scalar(-math.inf, dtype)
    dims = (*leading, columns - last)
    return joined(build, [mask, build.expand(filler, dims, [True] * len(dims))], len(leading))


def _unseen(fused: FusedNode, mask: ir.Value, scores: tuple[Dim, Dim]) -> ir.Value:
    """The mask with -inf for the lowest number of its type, which is a number in masks that are repeated along rows.

    What float32 leaves unrounded counts as what it is rounded to: a CPU may compute the mask of a half in float32 as far as here.
    """
    build, dtype, dims = fused.build, fused.build.facts.dtype(mask), fused.dims(mask)
    if dtype is None:
        raise Refused("unknown-type", f"the element type of '{mask.name}' is unknown", fused.node.name)
    pairs = zip(dims[-2:], scores, strict=False)
    if any(one != other for one, other in pairs if isinstance(one, int) and isinstance(other, int)):
        return mask
    wide = widened(dtype)
    seen = compared(build, "Greater", build.cast(mask, wide), build.scalar(held_as_lowest(dtype), wide))
    return chosen(build, seen, mask, build.scalar(-math.inf, dtype))
