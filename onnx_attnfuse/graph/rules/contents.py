"""Contents of small tensors: shape arithmetic read back into sizes, and the numbers that scales are computed from."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS, within
from onnx_attnfuse.graph.facts_view import Content, Known, Scalar
from onnx_attnfuse.graph.ops import RESHAPES
from onnx_attnfuse.graph.rules.reading import axes_of, input_content, input_dims, slice_bounds
from onnx_attnfuse.graph.sizes import Dim, Size

ContentRule: TypeAlias = Callable[[ir.Node, Known], Content]

_MAX_CONTENT_LENGTH = 64
_VIEWS = RESHAPES | {"Slice", "Transpose"}


def _map(function: Callable[..., Scalar], *operands: Content) -> Content:
    """Applies a scalar function with rank-0 and length-1 broadcasting; elements that are unknown stay unknown."""
    if any(operand is None for operand in operands):
        return None
    lengths = {len(operand) for operand in operands if isinstance(operand, tuple)}
    if not lengths:
        return function(*operands)
    length = max(lengths)
    if lengths - {1, length}:
        return None
    columns = [_stretched(operand, length) for operand in operands]
    return tuple(None if any(item is None for item in row) else function(*row) for row in zip(*columns, strict=True))


def _stretched(operand: Content, length: int) -> tuple[Scalar, ...]:
    items = operand if isinstance(operand, tuple) else (operand,)
    return items * length if len(items) == 1 else items


def _elementwise(function: Callable[..., Scalar]) -> ContentRule:
    def rule(node: ir.Node, facts: Known) -> Content:
        return _map(function, *(input_content(node, index, facts) for index in range(len(node.inputs))))

    return rule


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Scalar, Scalar], Scalar]:
    def apply(left: Scalar, right: Scalar) -> Scalar:
        if (isinstance(left, Size) and isinstance(right, float)) or (isinstance(left, float) and isinstance(right, Size)):
            return None
        return function(left, right)

    return apply


def _numeric(function: Callable[[float], float]) -> Callable[[Scalar], Scalar]:
    """A function of finite numbers; None where it has no finite result."""

    def apply(item: Scalar) -> Scalar:
        if not isinstance(item, (int, float)) or not math.isfinite(item):
            return None
        try:
            return function(item)
        except (ArithmeticError, ValueError):
            return None

    return apply


def _remainder(node: ir.Node, facts: Known) -> Content:
    """A remainder of the sign of the divisor, as ONNX has it of whole numbers."""
    operands = (input_content(node, index, facts) for index in (0, 1))
    return None if attribute(node, "fmod", 0) else _map(_rest, *operands)


def _rest(left: Scalar, right: Scalar) -> Scalar:
    if not isinstance(left, (int, Size)) or not isinstance(right, int) or not right:
        return None
    return left - sizes.floor_quotient(left, right) * right


def _divide(node: ir.Node, facts: Known) -> Content:
    is_float = facts.dtype(node.outputs[0]) in FLOATS
    operands = (input_content(node, index, facts) for index in (0, 1))
    return _map(_real_quotient if is_float else _whole_quotient, *operands)


def _real_quotient(left: Scalar, right: Scalar) -> Scalar:
    """Sizes that were made floats divide as sizes only where they come out even."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left / right if right else None
    if isinstance(left, (int, Size)) and isinstance(right, (int, Size)):
        return sizes.exact_quotient(left, right)
    return None


def _whole_quotient(left: Scalar, right: Scalar) -> Scalar:
    """ONNX cuts a quotient off towards zero; sizes are not negative."""
    if not isinstance(left, (int, Size)) or not isinstance(right, (int, Size)) or right == 0:
        return None
    if isinstance(left, int) and isinstance(right, int):
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    return sizes.floor_quotient(left, right)


def _power(base: Scalar, exponent: Scalar) -> Scalar:
    if not isinstance(base, (int, float)) or not isinstance(exponent, (int, float)) or (base < 0 and exponent != int(exponent)):
        return None
    try:
        return float(base) ** exponent if isinstance(base, float) or exponent < 0 else base**exponent
    except ArithmeticError:
        return None


def _absolute(item: Scalar) -> Scalar:
    if isinstance(item, (int, float)):
        return abs(item)
    return item if _positive(item) else None


def _negative(item: Scalar) -> Scalar:
    return None if item is None else item * -1


def _not(item: Scalar) -> Scalar:
    return not item if isinstance(item, bool) else None


def _positive(size: Scalar) -> bool:
    """Whether the size is certainly no negative number: a product of axis lengths or a sum of such."""
    if isinstance(size, Size):
        return size.factor > 0 and all(all(_positive(part) for part in atom.parts) for atom in size.atoms)
    return isinstance(size, (int, float)) and size >= 0


def _equal(left: Scalar, right: Scalar) -> Scalar:
    if left == right:
        return True
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return False
    number, other = (left, right) if isinstance(left, (int, float)) else (right, left)
    return False if isinstance(number, (int, float)) and number < 0 and _positive(other) else None


def _choose(condition: Scalar, chosen: Scalar, other: Scalar) -> Scalar:
    return None if condition is None else chosen if condition else other


def _where(node: ir.Node, facts: Known) -> Content:
    condition, chosen, other = (input_content(node, index, facts) for index in range(3))
    if condition is None and chosen is not None and chosen == other:
        return chosen
    return _map(_choose, condition, chosen, other)


def _cast(node: ir.Node, facts: Known) -> Content:
    content = input_content(node, 0, facts)
    like = node.inputs[1] if node.op_type == "CastLike" else None
    target = attribute(node, "to") if like is None else facts.dtype(like)
    if target is None:
        return None
    if target in FLOATS:
        return _map(functools.partial(_as_float, ir.DataType(target)), content)
    return _map(_as_bool if target == ir.DataType.BOOL else _as_int, content)


def _as_float(dtype: ir.DataType, item: Scalar) -> Scalar:
    return within(float(item), dtype) if isinstance(item, (int, float)) else item


def _as_bool(item: Scalar) -> Scalar:
    return bool(item) if isinstance(item, (int, float)) else None


def _as_int(item: Scalar) -> Scalar:
    if isinstance(item, float):
        return int(item) if math.isfinite(item) else None
    return int(item) if isinstance(item, int) else item


def _shape(node: ir.Node, facts: Known) -> Content:
    dims = input_dims(node, 0, facts)
    return None if dims is None else dims[slice(attribute(node, "start", 0), attribute(node, "end"))]


def _size(node: ir.Node, facts: Known) -> Content:
    dims = input_dims(node, 0, facts)
    return None if dims is None else sizes.product(dims)


def _gather(node: ir.Node, facts: Known) -> Content:
    data, indices = input_content(node, 0, facts), input_content(node, 1, facts)
    if not isinstance(data, tuple) or attribute(node, "axis", 0) not in {0, -1}:
        return None
    picked: list[Scalar] = []
    for index in indices if isinstance(indices, tuple) else (indices,):
        if not isinstance(index, int) or not -len(data) <= index < len(data):
            return None
        picked.append(data[index])
    return tuple(picked) if isinstance(indices, tuple) else picked[0]


def _slice(node: ir.Node, facts: Known) -> Content:
    data = input_content(node, 0, facts)
    bounds = slice_bounds(node, 1, facts)
    if not isinstance(data, tuple) or bounds is None or 0 not in bounds:
        return None
    start, end, step = bounds[0]
    return data[slice(start, end, step)] if isinstance(start, int) and isinstance(end, int) else None


def _concat(node: ir.Node, facts: Known) -> Content:
    joined: list[Scalar] = []
    for index in range(len(node.inputs)):
        part = input_content(node, index, facts)
        if not isinstance(part, tuple):
            dims = input_dims(node, index, facts)
            if dims is None or len(dims) != 1 or not isinstance(dims[0], int):
                return None
            part = (None,) * dims[0]
        joined.extend(part)
    return tuple(joined)


def _split(node: ir.Node, facts: Known) -> Content:
    return None if len(node.outputs) != 1 else input_content(node, 0, facts)


def _regroup(node: ir.Node, facts: Known) -> Content:
    """Reshape, Squeeze, Unsqueeze, Flatten and Expand to ranks 0 and 1."""
    content = input_content(node, 0, facts)
    if content is None and node.inputs[0] is not None and (found := _elements(node.inputs[0], facts)) is not None:
        content = tuple(found.ravel().tolist())
    dims = facts.dims(node.outputs[0])
    if content is None or dims is None or len(dims) > 1:
        return None
    items = content if isinstance(content, tuple) else (content,)
    if not dims:
        return items[0] if len(items) == 1 else None
    if node.op_type == "Expand" and len(items) == 1:
        return items * dims[0] if isinstance(dims[0], int) and dims[0] <= _MAX_CONTENT_LENGTH else None
    return items


def _elements(value: ir.Value, facts: Known) -> npt.NDArray[Any] | None:
    """The elements of a small tensor of any rank that is a view of a list: TorchScript writes pads and repeats by such."""
    node, content, dims = value.producer(), facts.content(value), facts.dims(value)
    shape = [dim for dim in dims or () if isinstance(dim, int)]
    if dims is None or len(shape) < len(dims) or math.prod(shape) > _MAX_CONTENT_LENGTH:
        return None
    if content is not None:
        return _listed(content if isinstance(content, tuple) else (content,), shape)
    if is_standard(node, "OneHot"):
        return _one_hot(node, facts)
    inner = _elements(node.inputs[0], facts) if is_standard(node, *_VIEWS) and node.inputs[0] is not None else None
    if inner is None or node is None:
        return None
    if node.op_type == "Transpose":
        return np.transpose(inner, attribute(node, "perm"))
    if node.op_type != "Slice":
        return inner.reshape(shape)
    bounds = slice_bounds(node, inner.ndim, facts)
    cuts = [(bounds or {}).get(axis, (0, length, 1)) for axis, length in enumerate(inner.shape)]
    if bounds is None or not all(isinstance(bound, int) for cut in cuts for bound in cut):
        return None
    return inner[tuple(slice(*cut) for cut in cuts)]


def _listed(items: tuple[Scalar, ...], shape: Sequence[int]) -> npt.NDArray[Any]:
    """Numbers, sizes and unknowns as an array."""
    array: npt.NDArray[Any] = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _one_hot(node: ir.Node, facts: Known) -> npt.NDArray[Any] | None:
    """One row that is hot in one place."""
    indices, depth, values = (input_content(node, index, facts) for index in range(3))
    if not isinstance(indices, tuple) or not isinstance(depth, int) or not isinstance(values, tuple):
        return None
    if len(indices) != 1 or not isinstance(indices[0], int) or not -depth <= indices[0] < depth:
        return None
    off, on = values
    return _listed(tuple(on if place == indices[0] % depth else off for place in range(depth)), (1, depth))


def _identity(node: ir.Node, facts: Known) -> Content:
    return input_content(node, 0, facts)


def _constant_of_shape(node: ir.Node, facts: Known) -> Content:
    dims = facts.dims(node.outputs[0])
    fill = attribute(node, "value")
    item: Scalar = fill.numpy().flat[0].item() if fill is not None else 0.0
    if dims is None or len(dims) > 1:
        return None
    if not dims:
        return item
    return (item,) * dims[0] if isinstance(dims[0], int) and dims[0] <= _MAX_CONTENT_LENGTH else None


def _range(node: ir.Node, facts: Known) -> Content:
    start, limit, delta = (input_content(node, index, facts) for index in range(3))
    if not isinstance(start, int) or not isinstance(limit, int) or not isinstance(delta, int) or not delta:
        return None
    return tuple(range(start, limit, delta)) if abs((limit - start) // delta) <= _MAX_CONTENT_LENGTH else None


def _reduce_product(node: ir.Node, facts: Known) -> Content:
    content = input_content(node, 0, facts)
    if not isinstance(content, tuple) or axes_of(node, 1, 1, facts) not in ([0], None):
        return None
    known = [item for item in content if isinstance(item, (int, Size))]
    if len(known) != len(content):
        return None
    total = sizes.product(known)
    return (total,) if attribute(node, "keepdims", 1) else total


def _extreme(function: Callable[[Dim, Dim], Dim], numeric: Callable[..., Any]) -> Callable[..., Scalar]:
    def apply(left: Scalar, right: Scalar) -> Scalar:
        if isinstance(left, Size) or isinstance(right, Size):
            return function(left, right) if isinstance(left, (int, Size)) and isinstance(right, (int, Size)) else None
        return numeric(left, right)

    return lambda *items: functools.reduce(apply, items)


CONTENTS: dict[str, ContentRule] = {
    "Abs": _elementwise(_absolute),
    "Add": _elementwise(_arithmetic(operator.add)),
    "Cast": _cast,
    "CastLike": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _divide,
    "Equal": _elementwise(_equal),
    "Expand": _regroup,
    "Flatten": _regroup,
    "Floor": _elementwise(_numeric(lambda item: float(math.floor(item)))),
    "Gather": _gather,
    "Identity": _identity,
    "Mod": _remainder,
    "Max": _elementwise(_extreme(sizes.maximum, max)),
    "Min": _elementwise(_extreme(sizes.minimum, min)),
    "Mul": _elementwise(_arithmetic(operator.mul)),
    "Neg": _elementwise(_negative),
    "Not": _elementwise(_not),
    "Pow": _elementwise(_power),
    "Range": _range,
    "Reciprocal": _elementwise(_numeric(lambda item: 1 / item)),
    "ReduceProd": _reduce_product,
    "Reshape": _regroup,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
    "Sqrt": _elementwise(_numeric(math.sqrt)),
    "Squeeze": _regroup,
    "Sub": _elementwise(_arithmetic(operator.sub)),
    "Unsqueeze": _regroup,
    "Where": _where,
}
"""The rule of each operator whose result follows from its inputs' contents or shapes."""
