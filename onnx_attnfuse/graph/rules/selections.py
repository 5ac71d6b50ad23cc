"""Shapes of operators that join tensors, cut them up or pick from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array, given, is_standard
from onnx_attnfuse.graph.facts_view import Dims, Known
from onnx_attnfuse.graph.rules.reading import (
    ShapeRule,
    fresh_dims,
    input_content,
    input_dims,
    int_list,
    requested_dims,
    rules,
    slice_bounds,
    slice_length,
    span_of,
    split_lengths,
)
from onnx_attnfuse.graph.sizes import Dim


def _concat(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return _joined(node, range(len(node.inputs)), facts)


def _concat_quantised(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """After scale and zero point of the result come tensors of quantised numbers, each with its own."""
    return _joined(node, range(2, len(node.inputs), 3), facts)


def _joined(node: ir.Node, places: Iterable[int], facts: Known) -> Sequence[Dims | None]:
    parts = [input_dims(node, index, facts) for index in places]
    known = next((part for part in parts if part is not None), None)
    if not known:
        return [None]
    joined: int = attribute(node, "axis", 0) % len(known)
    total: Dim | None = 0
    for part in parts:
        for axis, (one, other) in enumerate(zip(known, part or (), strict=False)):
            if axis != joined:
                facts.enforce(one, other)
        total = total + part[joined] if total is not None and part is not None and len(part) == len(known) else None
    if total is None:
        total = facts.fresh(node.outputs[0], joined)
    return [_with_length(known, joined, total)]


def _split(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return []
    axis: int = attribute(node, "axis", 0) % len(dims)
    lengths = split_lengths(node, facts) or [facts.fresh(output, axis) for output in node.outputs]
    return [_with_length(dims, axis, lengths[index]) for index in range(len(node.outputs))]


def _slice(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    bounds = slice_bounds(node, len(dims), facts)
    output = node.outputs[0]
    if bounds is None and (found := span_of(node, facts)) is not None:
        axis, _, span = found
        axis %= len(dims)
        return [_with_length(dims, axis, facts.span(output, axis, span))]
    if bounds is None:
        axes = int_list(node, 3, "axes", facts)
        touched = {axis % len(dims) for axis in axes if isinstance(axis, int)} if axes is not None else set(range(len(dims)))
        return [tuple(facts.fresh(output, axis) if axis in touched else dim for axis, dim in enumerate(dims))]
    result: list[Dim] = []
    for axis, dim in enumerate(dims):
        length = slice_length(dim, *bounds[axis]) if axis in bounds else dim
        result.append(facts.fresh(output, axis) if length is None else length)
    return [tuple(result)]


def _gather(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    data, indices = input_dims(node, 0, facts), input_dims(node, 1, facts)
    if data is None or indices is None:
        return [None]
    axis: int = attribute(node, "axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _gather_packed(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Blocks of quantised numbers, of which a byte may hold several along the last axis."""
    data, indices = input_dims(node, 0, facts), input_dims(node, 1, facts)
    if not data or indices is None:
        return [None]
    packed = facts.dtype(node.inputs[0])
    each = 8 // attribute(node, "bits", 4) if packed == ir.DataType.UINT8 else 1
    data, axis = (*data[:-1], data[-1] * each), attribute(node, "gather_axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _embeddings(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Rows of a table for every id, and how many ids of an entry are no padding."""
    ids, table = input_dims(node, 0, facts), input_dims(node, 2, facts)
    if ids is None or table is None or len(table) != 2:
        return [None]
    return [(*ids, table[1]), ids[:1]]


def _gather_nd(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    data, indices = input_dims(node, 0, facts), input_dims(node, 1, facts)
    if data is None or indices is None or not isinstance(indices[-1], int):
        return [None]
    return [(*indices[:-1], *data[indices[-1] + attribute(node, "batch_dims", 0) :])]


def _top_k(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return []
    axis: int = attribute(node, "axis", -1) % len(dims)
    asked = input_content(node, 1, facts)
    count = asked[0] if isinstance(asked, tuple) and len(asked) == 1 else attribute(node, "k")
    return [_with_length(dims, axis, count if isinstance(count, int) else facts.fresh(output, axis)) for output in node.outputs]


def _part(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The shape of a part of a sequence, where a tensor was cut into parts of one length."""
    cut = None if node.inputs[0] is None else node.inputs[0].producer()
    dims = input_dims(cut, 0, facts) if is_standard(cut, "SplitToSequence") else None
    lengths = None if cut is None or not dims else split_lengths(cut, facts)
    if cut is None or not dims or not lengths or len(set(lengths)) > 1:
        return [None]
    return [_with_length(dims, attribute(cut, "axis", 0) % len(dims), lengths[0])]


def _same_rank(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    return [None if dims is None else fresh_dims(output, len(dims), facts) for output in node.outputs]


def _resize(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Lengths that are asked for, or whole multiples of those before; lengths scaled by a fraction are unknown."""
    dims, asked = input_dims(node, 0, facts), requested_dims(node, 3, facts)
    if dims is None or attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return _same_rank(node, facts)
    axes: list[int] = attribute(node, "axes", list(range(len(dims))))
    scales = constant_array(given(node, 2 if len(node.inputs) > 2 else 1))
    lengths = list(fresh_dims(node.outputs[0], len(dims), facts))
    if asked is not None and len(asked) == len(axes):
        for axis, length in zip(axes, asked, strict=True):
            lengths[axis] = length
    elif scales is not None and scales.size == len(axes):
        for axis, scale in zip(axes, scales.tolist(), strict=True):
            lengths[axis] = dims[axis] * int(scale) if scale == int(scale) else lengths[axis]
    else:
        return _same_rank(node, facts)
    untouched = set(range(len(dims))).difference(axis % len(dims) for axis in axes)
    return [tuple(dims[axis] if axis in untouched else length for axis, length in enumerate(lengths))]


def _pad(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    pads = int_list(node, 1, "pads", facts)
    if dims is None or pads is None or len(pads) != 2 * len(dims) or given(node, 3) is not None:
        return _same_rank(node, facts)
    return [tuple(dim + pads[axis] + pads[axis + len(dims)] for axis, dim in enumerate(dims))]


def _with_length(dims: Dims, axis: int, length: Dim) -> Dims:
    return (*dims[:axis], length, *dims[axis + 1 :])


SELECTIONS: dict[str, ShapeRule] = {
    **rules("Resize Upsample", _resize),
    "Concat": _concat,
    "EmbedLayerNormalization": _embeddings,
    "Gather": _gather,
    "GatherBlockQuantized": _gather_packed,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "QLinearConcat": _concat_quantised,
    "SequenceAt": _part,
    "Slice": _slice,
    "Split": _split,
    "TopK": _top_k,
}
