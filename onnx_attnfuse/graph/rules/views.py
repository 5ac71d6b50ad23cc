"""Shapes of operators that rearrange or repeat elements."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given
from onnx_attnfuse.graph.facts_view import Dims, Known, broadcast
from onnx_attnfuse.graph.rules.reading import ShapeRule, axes_of, fresh_dims, input_content, input_dims, int_list, requested_dims
from onnx_attnfuse.graph.sizes import Dim, Size


def _transpose(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    perm: list[int] | None = attribute(node, "perm")
    if dims is None:
        return [None if perm is None else fresh_dims(node.outputs[0], len(perm), facts)]
    return [tuple(dims[axis] for axis in perm) if perm is not None else dims[::-1]]


def _reshape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims, wanted = input_dims(node, 0, facts), input_content(node, 1, facts)
    output = node.outputs[0]
    if not isinstance(wanted, tuple):
        return [requested_dims(node, 1, facts)]
    result: list[Dim | None] = []
    for axis, item in enumerate(wanted):
        if item == 0 and not attribute(node, "allowzero", 0):
            result.append(dims[axis] if dims is not None and axis < len(dims) else None)
        else:
            result.append(item if isinstance(item, (int, Size)) and item != -1 else None)
    unknown = [axis for axis, dim in enumerate(result) if dim is None]
    if len(unknown) == 1 and dims is not None:
        rest = sizes.product(dim for dim in result if dim is not None)
        result[unknown[0]] = sizes.exact_quotient(sizes.product(dims), rest)
    if not unknown and dims is not None:
        result = [_number(axis, result, dims, facts) for axis in range(len(result))]
    lengths = tuple(facts.fresh(output, axis) if dim is None else dim for axis, dim in enumerate(result))
    if dims is not None and len(dims) == len(wanted) == 2 and unknown == [1] and result[0] is not None:
        facts.fit(dims[0], result[0])
    if dims is not None and len(unknown) <= 1:
        facts.meet(sizes.product(dims), sizes.product(lengths))
    return [lengths]


def _number(axis: int, wanted: Sequence[Dim | None], dims: Dims, facts: Known) -> Dim | None:
    """A length that is asked for, as the number that it has to be where all other lengths leave only that."""
    asked, others = wanted[axis], sizes.product(dim for place, dim in enumerate(wanted) if place != axis and dim is not None)
    quotient = sizes.exact_quotient(sizes.product(dims), others)
    if asked is None or quotient is None:
        return asked
    is_number, is_enforced = isinstance(quotient, int), isinstance(others, int) or facts.assumed.nonempty_axes
    if is_enforced and is_number:
        facts.enforce(asked, quotient)
    elif is_enforced:
        facts.fit(asked, quotient)
    return quotient if is_number else asked


def _flatten(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [fresh_dims(node.outputs[0], 2, facts)]
    axis: int = attribute(node, "axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return [(sizes.product(dims[:axis]), sizes.product(dims[axis:]))]


def _unsqueeze(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    raw = int_list(node, 1, "axes", facts)
    if dims is None or raw is None:
        return [None]
    axes = axes_of(node, 1, len(dims) + len(raw), facts) or []
    rest = iter(dims)
    return [tuple(1 if axis in axes else next(rest) for axis in range(len(dims) + len(axes)))]


def _squeeze(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    if len(node.inputs) < 2 and "axes" not in node.attributes:
        if all(isinstance(dim, int) for dim in dims) or len(dims) == 1:
            return [tuple(dim for dim in dims if dim != 1) if len(dims) > 1 else ()]
        return [None]
    axes = axes_of(node, 1, len(dims), facts)
    return [None if axes is None else tuple(dim for axis, dim in enumerate(dims) if axis not in axes)]


def _expand(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if isinstance(input_content(node, 1, facts), tuple):
        return [broadcast([dims, requested_dims(node, 1, facts)], facts)]
    target = given(node, 1)
    length = None if target is None else facts.dims(target)
    if not length or not isinstance(length[0], int):
        return [None]
    return [fresh_dims(node.outputs[0], max(length[0], len(dims or ())), facts)]


def _tile(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    repeats = int_list(node, 1, "repeats", facts)
    if dims is None:
        return [None]
    if repeats is None or len(repeats) != len(dims):
        return [fresh_dims(node.outputs[0], len(dims), facts)]
    return [tuple(dim * repeat for dim, repeat in zip(dims, repeats, strict=True))]


VIEWS: dict[str, ShapeRule] = {
    "Expand": _expand,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
