"""Reading a node's inputs and attributes, in whichever of an operator's versions it is written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.facts_view import Content, Dims, Known
from onnx_attnfuse.graph.ops import RESHAPES
from onnx_attnfuse.graph.sizes import Dim, Size

ShapeRule: TypeAlias = Callable[[ir.Node, Known], Sequence[Dims | None]]
"""The shape of each output, None where it is unknown, as for outputs that are left out at the end."""

_END_OF_AXIS = 1_000_000_000
"""An end from here on is that of the axis: exporters write 10^9, 2^31 - 1 or 2^63 - 1 for it, and no axis is as long."""
_ONE_AXIS_SINCE = 13


def rules(names: str, rule: ShapeRule) -> dict[str, ShapeRule]:
    """A table that gives one shape rule to several operators, named in a string."""
    return dict.fromkeys(names.split(), rule)


def input_dims(node: ir.Node, index: int, facts: Known) -> Dims | None:
    """The shape of an input, or None if it is unknown or left out."""
    return facts.dims(given(node, index))


def input_content(node: ir.Node, index: int, facts: Known) -> Content:
    """The content of an input, or None if it is unknown or left out."""
    return facts.content(given(node, index))


def fresh_dims(value: ir.Value, rank: int, facts: Known) -> Dims:
    """A shape of which only the rank is known."""
    return tuple(facts.fresh(value, axis) for axis in range(rank))


def requested_dims(node: ir.Node, index: int, facts: Known) -> Dims | None:
    """The shape that an input asks for, fresh symbols for lengths it does not tell; None if not even the rank is known."""
    content = input_content(node, index, facts)
    output = node.outputs[0]
    if isinstance(content, tuple):
        return tuple(item if isinstance(item, (int, Size)) else facts.fresh(output, axis) for axis, item in enumerate(content))
    length = input_dims(node, index, facts)
    return fresh_dims(output, length[0], facts) if length and isinstance(length[0], int) else None


def int_list(node: ir.Node, index: int, name: str, facts: Known) -> tuple[Dim, ...] | None:
    """A list of integers that newer opsets take as an input and older ones as an attribute; None if absent or unknown."""
    value = given(node, index)
    if value is None:
        found: Any = attribute(node, name)
        return None if found is None else tuple(cast("list[int]", found)) if isinstance(found, list) else (found,)
    content = facts.content(value)
    items = content if isinstance(content, tuple) else (content,)
    known = tuple(item for item in items if isinstance(item, (int, Size)))
    return known if len(known) == len(items) else None


def axes_of(node: ir.Node, index: int, rank: int, facts: Known) -> list[int] | None:
    """The `axes` input or attribute, made non-negative."""
    found = int_list(node, index, "axes", facts)
    if found is None or not all(isinstance(axis, int) for axis in found):
        return None
    return sorted(axis % rank for axis in found if isinstance(axis, int)) if rank else []


def softmax_axis(node: ir.Node, facts: Known, opset: int) -> int | None:
    """The one axis that a Softmax or LogSoftmax runs over, -1 for the last of an unknown rank; None if it is several.

    Before opset 13 they run over all axes from theirs on, which by default is the second.
    """
    axis: int = attribute(node, "axis", -1 if opset >= _ONE_AXIS_SINCE else 1)
    dims = input_dims(node, 0, facts)
    if dims is None:
        return axis if axis == -1 else None
    axis %= len(dims)
    return axis if opset >= _ONE_AXIS_SINCE or axis == len(dims) - 1 else None


def slice_bounds(node: ir.Node, rank: int, facts: Known) -> dict[int, tuple[Dim, Dim, int]] | None:
    """`{axis: (start, end, step)}` of a Slice as written, or None if any part is unknown."""
    starts, ends = int_list(node, 1, "starts", facts), int_list(node, 2, "ends", facts)
    axes, steps = int_list(node, 3, "axes", facts), int_list(node, 4, "steps", facts)
    if starts is None or ends is None or (axes is None and given(node, 3) is not None):
        return None
    if steps is None and given(node, 4) is not None:
        return None
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    bounds: dict[int, tuple[Dim, Dim, int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(axis, int) or not isinstance(step, int):
            return None
        bounds[axis % rank] = (start, end, step)
    return bounds


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of a value along one axis, `whole[start:stop:step]`, counted from the start of the axis."""

    whole: ir.Value
    axis: int
    start: Dim
    stop: Dim
    step: int = 1


def read_part(value: ir.Value | None, facts: Known) -> Part | None:
    """The range that a value is, by a Split, a Slice along one axis, or as an entry of a sequence; None where it is not known."""
    node = None if value is None else value.producer()
    index: Content = None if value is None else value.index()
    if is_standard(node, "SequenceAt") and node.inputs[0] is not None:
        node, index = node.inputs[0].producer(), input_content(node, 1, facts)
    whole = node.inputs[0] if is_standard(node, "Slice", "Split", "SplitToSequence") else None
    dims = facts.dims(whole)
    if node is None or whole is None or not dims:
        return None
    if node.op_type != "Slice":
        lengths = split_lengths(node, facts)
        if lengths is None or not isinstance(index, int) or not 0 <= index < len(lengths):
            return None
        start = functools.reduce(sizes.add, lengths[:index], 0)
        return Part(whole, attribute(node, "axis", 0) % len(dims), start, start + lengths[index])
    bounds = slice_bounds(node, len(dims), facts)
    if bounds is None or len(bounds) != 1:
        return None
    ((axis, (start, end, step)),) = bounds.items()
    total = dims[axis]
    if isinstance(total, int) and isinstance(start, int) and isinstance(end, int):
        return Part(whole, axis, *slice(start, end, step).indices(total))
    low = from_start(start, total)
    high = total if isinstance(end, int) and end >= _END_OF_AXIS else from_start(end, total)
    return None if step != 1 or low is None or high is None else Part(whole, axis, low, high)


def sorted_parts(values: Sequence[ir.Value], facts: Known) -> list[ir.Value]:
    """Ranges of one value along its last axis, sorted; none where they are not all of it, each of its places once."""
    left = {value: part for value in values if (part := read_part(value, facts)) is not None}
    whole = next((part.whole for part in left.values()), None)
    dims = facts.dims(whole)
    ordered, end = list[ir.Value](), cast("Dim", 0)
    while dims and (value := next((value for value, part in left.items() if facts.same(part.start, end)), None)) is not None:
        part = left.pop(value)
        if (part.whole, part.axis, part.step) != (whole, len(dims) - 1, 1):
            return []
        ordered.append(value)
        end = part.stop
    return ordered if dims and len(ordered) == len(values) and facts.same(end, dims[-1]) else []


def span_of(node: ir.Node, facts: Known) -> tuple[int, ir.Value, Dim] | None:
    """The axis of a Slice `[start : start + length]`, the start, computed at run time, and the length; None for others."""
    axes, steps = int_list(node, 3, "axes", facts), int_list(node, 4, "steps", facts)
    start, end = (_viewed(given(node, place)) for place in (1, 2))
    if (
        axes is None
        or len(axes) != 1
        or not isinstance(axes[0], int)
        or steps not in {None, (1,)}
        or start is None
        or end is None
    ):
        return None
    node_of_end = end.producer()
    if not is_standard(node_of_end, "Add") or start not in (parts := [_viewed(item) for item in node_of_end.inputs]):
        return None
    added = node_of_end.inputs[1 - parts.index(start)]
    content = facts.content(added)
    length = content[0] if isinstance(content, tuple) and len(content) == 1 else content
    if not isinstance(length, (int, Size)) or isinstance(length, bool) or sizes.least(length) < 0:
        return None
    return axes[0], start, length


def _viewed(value: ir.Value | None) -> ir.Value | None:
    """The one number that a value is, before it was given another shape."""
    while value is not None and is_standard(node := value.producer(), *RESHAPES, "Identity"):
        value = node.inputs[0]
    return value


def slice_length(dim: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """The length of `[start:end:step]` of an axis of length `dim`, or None if the symbols do not determine it."""
    if step != 1:
        if not isinstance(dim, int) or not isinstance(start, int) or not isinstance(end, int):
            return None
        return len(range(dim)[slice(start, None if abs(end) >= _END_OF_AXIS else end, step)])
    if isinstance(dim, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(dim)[start:end])
    low = from_start(start, dim)
    high = dim if isinstance(end, int) and end >= _END_OF_AXIS else from_start(end, dim)
    if low is None or high is None:
        return None
    if high == dim:
        return dim - low
    if low != 0:
        return None
    return sizes.minimum(high, dim) if isinstance(high, int) or isinstance(dim, Size) else high


def from_start(bound: Dim, dim: Dim) -> Dim | None:
    """A slice's bound counted from the start of an axis of length `dim`; None where its sign depends on the symbols."""
    if sizes.least(bound) >= 0:
        return bound
    return bound + dim if sizes.least(bound * -1) >= 1 else None


def split_lengths(node: ir.Node, facts: Known) -> list[Dim] | None:
    """The lengths of the parts of a Split or SplitToSequence along its axis."""
    dims, lengths = input_dims(node, 0, facts), int_list(node, 1, "split", facts)
    axis: int = attribute(node, "axis", 0)
    length = dims[axis % len(dims)] if dims else None
    if node.op_type == "SplitToSequence" and isinstance(each := input_content(node, 1, facts), int):
        return [each] * (length // each) if isinstance(length, int) and each > 0 and length % each == 0 else None
    if lengths is not None:
        return list(lengths)
    if length is None or given(node, 1) is not None or node.op_type != "Split":
        return None
    count = len(node.outputs)
    each = sizes.exact_quotient(length, count)
    if each is not None:
        return [each] * count
    if not isinstance(length, int):
        return None
    chunk = -(-length // count)
    return [*[chunk] * (count - 1), length - chunk * (count - 1)]


def einsum_terms(node: ir.Node, facts: Known) -> tuple[list[str], str] | None:
    """An Einsum's operand and result subscripts, an ellipsis written out as digits; None if the result is not explicit."""
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    if "->" not in equation:
        return None
    left, right = equation.split("->")
    terms = left.split(",")
    if "." not in equation:
        return terms, right
    covered: list[int] = []
    for index, term in enumerate(terms):
        dims = input_dims(node, index, facts)
        if dims is None:
            return None
        covered.append(len(dims) - len(term.replace("...", "")) if "..." in term else 0)
    digits = "0123456789"[: max(covered)]
    written = [term.replace("...", digits[len(digits) - count :]) for term, count in zip(terms, covered, strict=True)]
    return written, right.replace("...", digits)
