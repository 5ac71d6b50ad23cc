"""An addition to a part of a tensor in place, as a sum of the whole tensor and a padded addend.

    scores[:, :, 1:, 1:] += bias    # MViT: relative positions count for all but the class token

Exporters write the part that was added to back by ScatterND, for one axis after the other or for all at once.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.index_reader import Reader, scattered_to
from onnx_attnfuse.attention.masks.mask_terms import index
from onnx_attnfuse.certify.terms import ZERO, subtract
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import slice_bounds

_PADS_ARE_AN_INPUT = 11
_Place = tuple[tuple[int, int], ...]
"""An index as (axis of the updated tensor, offset) for each axis of a value."""


@enabling("sums written back into a slice rewritten as sums with a padded addend", "ScatterND", None)
def as_padded_sum(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A ScatterND of a part of a tensor with something added to it, as an Add; of the part as it was, as the tensor."""
    data, updates, result = given(node, 0), given(node, 2), node.outputs[0]
    facts = builder.facts
    starts = _starts(node, facts)
    if data is None or updates is None or starts is None or builder.opset < _PADS_ARE_AN_INPUT:
        return None
    base, place = data, tuple(enumerate(starts))
    while (above := _above(base, place, facts)) is not None and not is_standard(base.producer(), "Slice"):
        base, place = above
    turn = [[axis for axis, _ in place].index(axis) for axis in range(len(place))]  # from the base to the data
    part = tuple((axis, 0) for axis in range(len(place)))
    if _is_there(updates, part, base, place, facts):
        same = builder.node("Identity", [data], hint=f"{node.name}/same")
        return EnablingChange(((result, same),), (base,))
    while (above := _above(updates, part, facts)) is not None and not is_standard(updates.producer(), "Slice"):
        updates, part = above
    total = updates.producer()
    if not is_standard(total, "Add"):
        return None
    for one, other in ((total.inputs[0], total.inputs[1]), (total.inputs[1], total.inputs[0])):
        if one is None or other is None or facts.dims(one) != facts.dims(updates):
            continue
        if not _is_there(one, part, base, place, facts):
            continue
        padded = _padded(other, updates, [[axis for axis, _ in part].index(axis) for axis, _ in place], base, place, builder)
        if padded is None:
            return None
        whole = builder.node("Add", [base, padded], hint=f"{node.name}/sum")
        return EnablingChange(((result, builder.transpose(whole, turn)),), (base, other))
    return None


def _starts(node: ir.Node, facts: Facts) -> tuple[int, ...] | None:
    """Where the part that is written begins, for each axis; None where it is no contiguous part, or not of known shape."""
    data, updates = (given(node, place) for place in (0, 2))
    dims, new = (None if value is None else facts.dims(value) for value in (data, updates))
    if dims is None or new is None or len(dims) != len(new) or attribute(node, "reduction", "none") != "none":
        return None
    where = [ZERO if dim == 1 else index(Factor(dim)) for dim in new]
    starts: list[int] = []
    for place, own in zip(scattered_to(node, where, Reader(facts)), where, strict=True):
        moved = subtract(place, own)
        if moved.op != "const":
            return None
        starts.append(int(moved.data))
    return tuple(starts)


def _above(value: ir.Value, place: _Place, facts: Facts) -> tuple[ir.Value, _Place] | None:
    """The value that another one is a view of, and the index there; None where it is none of these views."""
    node = value.producer()
    source = None if node is None or not node.inputs else node.inputs[0]
    if node is None or source is None or not is_standard(node, "Expand", "Identity", "Reshape", "Slice", "Transpose"):
        return None
    if node.op_type in {"Expand", "Identity", "Reshape"}:
        dims = facts.dims(value)
        return (source, place) if dims is not None and facts.dims(source) == dims else None
    if node.op_type == "Transpose":
        perm: list[int] = attribute(node, "perm", list(range(len(place)))[::-1])
        return source, tuple(place[perm.index(axis)] for axis in range(len(place)))
    bounds = slice_bounds(node, len(place), facts)
    if bounds is None:
        return None
    moved = list(place)
    for axis, (start, _, step) in bounds.items():
        if step != 1 or not isinstance(start, int) or start < 0:
            return None
        moved[axis] = moved[axis][0], moved[axis][1] + start
    return source, tuple(moved)


def _is_there(value: ir.Value, place: _Place, base: ir.Value, there: _Place, facts: Facts) -> bool:
    """Whether a value is the part of `base` at the index `there`."""
    while value is not base:
        above = _above(value, place, facts)
        if above is None:
            return False
        value, place = above
    return place == there


def _padded(
    addend: ir.Value, total: ir.Value, perm: list[int], base: ir.Value, place: _Place, builder: Builder
) -> ir.Value | None:
    """An addend of a part as one of the whole: -0 elsewhere, which changes no number. None: it is not known how far that goes."""
    facts = builder.facts
    own, part, whole = facts.dims(addend), facts.dims(total), facts.dims(base)
    if own is None or part is None or whole is None or len(own) > len(part):
        return None
    own = [*[1] * (len(part) - len(own)), *own]
    before = [start for _, start in place]
    lengths = [whole[axis] - start - part[perm[axis]] for axis, start in enumerate(before)]
    after = [length for length in lengths if isinstance(length, int)]
    if len(after) < len(lengths):
        return None
    cut = [bool(start or end) for start, end in zip(before, after, strict=True)]
    full = [part[perm[axis]] if cut[axis] else own[perm[axis]] for axis in range(len(place))]
    value = builder.transpose(builder.reshape(addend, own), perm)
    short = [dim != own[axis] for dim, axis in zip(full, perm, strict=True)]
    value = builder.expand(value, full, short) if any(short) else value
    if not any(cut):
        return value
    ends = builder.constant([*before, *after])
    nothing = builder.scalar(-0.0, facts.dtype(base))
    return builder.node("Pad", [value, ends, nothing])
