"""What small tensors contain: shape arithmetic read back into sizes, and the numbers that scales are computed from."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.shape_rules import axes_of, slice_bounds
from onnx_attnfuse.graph.sizes import Dim, Size

if TYPE_CHECKING:
    from onnx_attnfuse.graph.facts import Content, Facts, Scalar

_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16}


def _content(node: ir.Node, index: int, facts: Facts) -> Content:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else facts.content(value)


def _map(function: Callable[..., Scalar], *operands: Content) -> Content:
    """Applies a scalar function with rank-0 and length-1 broadcasting; elements that are unknown stay unknown."""
    lengths = {len(operand) for operand in operands if isinstance(operand, tuple)}
    if not lengths:
        return None if any(operand is None for operand in operands) else function(*operands)
    length = max(lengths)
    if lengths - {1, length} or any(operand is None for operand in operands):
        return None
    columns = [
        operand * length if isinstance(operand, tuple) and len(operand) == 1 else operand if isinstance(operand, tuple) else (operand,) * length
        for operand in operands
    ]
    return tuple(None if any(item is None for item in row) else function(*row) for row in zip(*columns, strict=True))


def _elementwise(function: Callable[..., Scalar]) -> Callable[[ir.Node, Facts], Content]:
    def rule(node: ir.Node, facts: Facts) -> Content:
        return _map(function, *(_content(node, index, facts) for index in range(len(node.inputs))))

    return rule


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Scalar, Scalar], Scalar]:
    def apply(left: Scalar, right: Scalar) -> Scalar:
        if (isinstance(left, Size) and isinstance(right, float)) or (isinstance(left, float) and isinstance(right, Size)):
            return None
        return function(left, right)

    return apply


def _divide(left: Scalar, right: Scalar) -> Scalar:
    if isinstance(left, float) or isinstance(right, float):
        return left / right if isinstance(left, (int, float)) and isinstance(right, (int, float)) and right else None
    if isinstance(left, (int, Size)) and isinstance(right, (int, Size)):
        return sizes.floor_quotient(left, right)
    return None


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    if not isinstance(base, (int, float)) or not isinstance(exponent, (int, float)) or (base < 0 and exponent != int(exponent)):
        return None
    return float(base) ** exponent if isinstance(base, float) or exponent < 0 else base**exponent


def _unary(function: Callable[[float], float]) -> Callable[[Scalar], Scalar]:
    return lambda item: function(item) if isinstance(item, (int, float)) else None


def _positive(size: Scalar) -> bool:
    """Whether the size is certainly no negative number: a product of axis lengths or a sum of such."""
    if isinstance(size, Size):
        return size.factor > 0 and all(all(_positive(part) for part in atom.parts) for atom in size.atoms)
    return isinstance(size, (int, float)) and size >= 0


def _compare(left: Scalar, right: Scalar) -> Scalar:
    if left == right:
        return True
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return False
    number, other = (left, right) if isinstance(left, (int, float)) else (right, left)
    return False if isinstance(number, (int, float)) and number < 0 and _positive(other) else None


def _where(condition: Scalar, chosen: Scalar, other: Scalar) -> Scalar:
    return None if condition is None else chosen if condition else other


def _where_rule(node: ir.Node, facts: Facts) -> Content:
    condition, chosen, other = (_content(node, index, facts) for index in range(3))
    if condition is None and chosen is not None and chosen == other:
        return chosen
    return _map(_where, condition, chosen, other)


def _cast(node: ir.Node, facts: Facts) -> Content:
    content = _content(node, 0, facts)
    like = node.inputs[1] if node.op_type == "CastLike" else None
    target = attribute(node, "to") if like is None else facts.dtype(like)
    if target is None:
        return None
    if target in _FLOATS:
        return _map(lambda item: float(item) if isinstance(item, (int, float)) else item, content)
    if target == ir.DataType.BOOL:
        return _map(lambda item: bool(item) if isinstance(item, (int, float)) else None, content)
    return _map(lambda item: int(item) if isinstance(item, (int, float)) and math.isfinite(item) else item, content)


def _shape(node: ir.Node, facts: Facts) -> Content:
    value = node.inputs[0]
    dims = facts.dims(value) if value is not None else None
    return None if dims is None else tuple(dims[slice(attribute(node, "start", 0), attribute(node, "end"))])


def _size(node: ir.Node, facts: Facts) -> Content:
    value = node.inputs[0]
    dims = facts.dims(value) if value is not None else None
    return None if dims is None else sizes.product(dims)


def _gather(node: ir.Node, facts: Facts) -> Content:
    data, indices = _content(node, 0, facts), _content(node, 1, facts)
    if not isinstance(data, tuple) or attribute(node, "axis", 0) not in {0, -1}:
        return None
    wanted = indices if isinstance(indices, tuple) else (indices,)
    picked: list[Scalar] = []
    for index in wanted:
        if not isinstance(index, int) or not -len(data) <= index < len(data):
            return None
        picked.append(data[index])
    return tuple(picked) if isinstance(indices, tuple) else picked[0]


def _slice(node: ir.Node, facts: Facts) -> Content:
    data = _content(node, 0, facts)
    bounds = slice_bounds(node, 1, facts)
    if not isinstance(data, tuple) or bounds is None or 0 not in bounds:
        return None
    start, end, step = bounds[0]
    return data[slice(start, end, step)] if isinstance(start, int) and isinstance(end, int) else None


def _concat(node: ir.Node, facts: Facts) -> Content:
    joined: list[Scalar] = []
    for index in range(len(node.inputs)):
        part = _content(node, index, facts)
        if not isinstance(part, tuple):
            value = node.inputs[index]
            dims = facts.dims(value) if value is not None else None
            if dims is None or len(dims) != 1 or not isinstance(dims[0], int):
                return None
            part = (None,) * dims[0]
        joined.extend(part)
    return tuple(joined)


def _split(node: ir.Node, facts: Facts) -> Content:
    return None if len(node.outputs) != 1 else _content(node, 0, facts)


def _regroup(node: ir.Node, facts: Facts) -> Content:
    """Reshape, Squeeze, Unsqueeze and Flatten between ranks 0 and 1."""
    content = _content(node, 0, facts)
    dims = facts.dims(node.outputs[0])
    if content is None or dims is None or len(dims) > 1:
        return None
    items = content if isinstance(content, tuple) else (content,)
    if len(dims) == 1:
        return items
    return items[0] if len(items) == 1 else None


def _constant_of_shape(node: ir.Node, facts: Facts) -> Content:
    dims = facts.dims(node.outputs[0])
    fill = attribute(node, "value")
    item = fill.numpy().flat[0].item() if fill is not None else 0.0
    if dims is None or len(dims) > 1 or not all(isinstance(dim, int) and dim <= 64 for dim in dims):
        return None
    return (item,) * dims[0] if dims and isinstance(dims[0], int) else item


def _range(node: ir.Node, facts: Facts) -> Content:
    bounds = [_content(node, index, facts) for index in range(3)]
    if not all(isinstance(bound, int) for bound in bounds):
        return None
    start, limit, delta = (bound for bound in bounds if isinstance(bound, int))
    return tuple(range(start, limit, delta)) if delta and abs((limit - start) // delta) <= 64 else None


def _reduce_product(node: ir.Node, facts: Facts) -> Content:
    content = _content(node, 0, facts)
    if not isinstance(content, tuple) or axes_of(node, 1, 1, facts) not in ([0], None):
        return None
    known = [item for item in content if isinstance(item, (int, Size))]
    if len(known) != len(content):
        return None
    total = sizes.product(known)
    return (total,) if attribute(node, "keepdims", 1) else total


def _pair(function: Callable[[Dim, Dim], Dim], numeric: Callable[..., Any]) -> Callable[..., Scalar]:
    def apply(left: Scalar, right: Scalar) -> Scalar:
        if isinstance(left, Size) or isinstance(right, Size):
            return function(left, right) if isinstance(left, (int, Size)) and isinstance(right, (int, Size)) else None
        return numeric(left, right)

    return lambda *items: functools.reduce(apply, items)


CONTENT_RULES: dict[str, Callable[[ir.Node, Facts], Content]] = {
    "Abs": _elementwise(lambda item: abs(item) if isinstance(item, (int, float)) else item if _positive(item) else None),
    "Add": _elementwise(_arithmetic(operator.add)),
    "Cast": _cast,
    "CastLike": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _elementwise(_divide),
    "Equal": _elementwise(_compare),
    "Expand": _regroup,
    "Flatten": _regroup,
    "Floor": _elementwise(_unary(math.floor)),
    "Gather": _gather,
    "Identity": lambda node, facts: _content(node, 0, facts),
    "Max": _elementwise(_pair(sizes.maximum, max)),
    "Min": _elementwise(_pair(sizes.minimum, min)),
    "Mul": _elementwise(_arithmetic(operator.mul)),
    "Neg": _elementwise(lambda item: item * -1 if item is not None else None),
    "Not": _elementwise(lambda item: not item if isinstance(item, bool) else None),
    "Pow": _elementwise(_power),
    "Range": _range,
    "Reciprocal": _elementwise(lambda item: 1 / item if isinstance(item, (int, float)) and item else None),
    "ReduceProd": _reduce_product,
    "Reshape": _regroup,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(lambda item: math.sqrt(item) if isinstance(item, (int, float)) and item >= 0 else None),
    "Squeeze": _regroup,
    "Sub": _elementwise(_arithmetic(operator.sub)),
    "Unsqueeze": _regroup,
    "Where": _where_rule,
}
