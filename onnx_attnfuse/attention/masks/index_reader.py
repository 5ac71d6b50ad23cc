"""Pulling one element of a mask: *what stands at index (b, n, i, j)*, one rule per operator.

Views rewrite the index, element-wise operators build the expression, and what no rule knows becomes a read element of that value.
A pulled element is exact, not a guess: it holds for every index and size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.masks import simplify
from onnx_attnfuse.attention.masks.constant_tables import element_of, literal, unnamed_element
from onnx_attnfuse.attention.masks.expression import (
    Apply,
    Element,
    Expression,
    Linear,
    at_most_zero,
    choice,
    combine,
    constant,
    divided,
    scaled,
)
from onnx_attnfuse.attention.masks.reshape_index import At, regrouped
from onnx_attnfuse.attention.masks.running_sums import running_sum
from onnx_attnfuse.attention.masks.slice_index import cut_from
from onnx_attnfuse.attention.masks.traverse import index_factors, is_larger
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given, has_unknown_attribute, is_constant, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.sizes import Dim

_MAX_EXPRESSION_DEPTH = 400
_LARGEST = 256
"""Parts of an expression beyond which it is not looked into: a value that is used twice over and over has 2^n of them."""
_MAX_READS = 1 << 13
"""Elements that are read on the way to one; from there on what is left is not looked into."""


class Reader:
    """Reads elements of values of one graph."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._known: dict[tuple[ir.Value, At], Expression] = {}
        self._reads = 0
        """Elements that were read for the one that is being read."""

    def element(self, value: ir.Value, at: At, depth: int = 0) -> Expression:
        """The element of `value` at an index given as one integer expression per axis."""
        key = (value, at)
        if key not in self._known:
            self._reads = self._reads + 1 if depth else 1
            found = self._read(value, at, depth) if self._reads <= _MAX_READS else Element(value, at)
            self._known[key] = Element(value, at) if is_larger(found, _LARGEST) else found
        return self._known[key]

    def _read(self, value: ir.Value, at: At, depth: int) -> Expression:
        constant_element = element_of(value, at, self.facts)
        if constant_element is not None:
            return constant_element
        node = value.producer()
        if is_constant(value):
            return unnamed_element(value, at, self.facts)
        if node is None or depth > _MAX_EXPRESSION_DEPTH:
            return Element(value, at)
        rule = _RULES.get(node.op_type) if is_standard(node) and not has_unknown_attribute(node) else None
        found = None if rule is None else rule(self, node, at, depth + 1)
        return Element(value, at) if found is None else found

    def input(self, node: ir.Node, position: int, at: At, depth: int) -> Expression:
        """The element of an input at an index of its own."""
        value = node.inputs[position]
        assert value is not None
        return self.element(value, at, depth)

    def broadcast_input(self, node: ir.Node, position: int, at: At, depth: int) -> Expression | None:
        """The element of an input that broadcasts against the result, at an index of the result."""
        value = node.inputs[position]
        dims = None if value is None else self.facts.dims(value)
        if value is None or dims is None or len(dims) > len(at):
            return None
        own = at[len(at) - len(dims) :]
        return self.element(value, tuple(constant(0) if dim == 1 else item for dim, item in zip(dims, own, strict=True)), depth)

    def input_dims(self, node: ir.Node, position: int, at: At = ()) -> Sequence[Dim] | None:
        """The shape of an input, where there is an element at an index of the result: no axis that it runs over is empty."""
        value = given(node, position)
        dims = None if value is None else self.facts.dims(value)
        present = {factor.size for item in at for factor in index_factors(item)}
        return None if dims is None else [sizes.not_empty(dim, present) for dim in dims]


_Rule: TypeAlias = Callable[[Reader, ir.Node, At, int], "Expression | None"]


def _elementwise(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    operands: list[Expression] = []
    for position in range(len(node.inputs)):
        operand = reader.broadcast_input(node, position, at, depth)
        if operand is None:
            return None
        operands.append(operand)
    found = simplify.apply(node.op_type, operands, reader.facts.dtype(node.outputs[0]))
    return Apply(node.op_type, tuple(operands)) if found is None else found


def _clip(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    """The least of a ceiling and the greatest of a floor and the element; attributes of old opsets are left alone."""
    found, dtype = reader.input(node, 0, at, depth), reader.facts.dtype(node.outputs[0])
    if "min" in node.attributes or "max" in node.attributes:
        return None
    for position, op in ((1, "Max"), (2, "Min")):
        if given(node, position) is not None:
            operands = (found, reader.input(node, position, (), depth))
            simpler = simplify.apply(op, operands, dtype)
            found = Apply(op, operands) if simpler is None else simpler
    return found


def _cast(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    inner = reader.input(node, 0, at, depth)
    target = reader.facts.dtype(node.outputs[0])
    source = None if node.inputs[0] is None else reader.facts.dtype(node.inputs[0])
    return None if target is None else simplify.cast(inner, source, target)


def _identity(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    return reader.input(node, 0, at, depth)


def _transpose(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    perm = attribute(node, "perm") or [*range(len(at))][::-1]
    inner: list[Expression] = [constant(0)] * len(at)
    for position, axis in enumerate(perm):
        inner[axis] = at[position]
    return reader.input(node, 0, tuple(inner), depth)


def _unsqueeze(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    axes = axes_of(node, 1, len(at), reader.facts)
    if axes is None:
        return None
    return reader.input(node, 0, tuple(item for axis, item in enumerate(at) if axis not in axes), depth)


def _squeeze(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    dims = reader.input_dims(node, 0)
    if dims is None:
        return None
    given = len(node.inputs) > 1 or "axes" in node.attributes
    axes = axes_of(node, 1, len(dims), reader.facts) if given else [axis for axis, dim in enumerate(dims) if dim == 1]
    if axes is None or len(dims) - len(axes) != len(at):
        return None
    rest = iter(at)
    return reader.input(node, 0, tuple(constant(0) if axis in axes else next(rest) for axis in range(len(dims))), depth)


def _reshape(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    old, new = reader.input_dims(node, 0), reader.facts.dims(node.outputs[0])
    if old is None or new is None:
        return None
    inner = regrouped(at, new, old)
    return None if inner is None else reader.input(node, 0, inner, depth)


def _expand(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    return reader.broadcast_input(node, 0, at, depth)


def _tile(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    old, new = reader.input_dims(node, 0), reader.facts.dims(node.outputs[0])
    if old is None or new is None:
        return None
    inner: list[Expression] = []
    for place, dim, tiled in zip(at, old, new, strict=True):
        parts = divided(place, dim) if dim not in {1, tiled} and isinstance(place, Linear) else None
        if parts is None and dim not in {1, tiled}:
            return None
        inner.append(constant(0) if dim == 1 else place if parts is None else parts[1])
    return reader.input(node, 0, tuple(inner), depth)


def _slice(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    dims = reader.input_dims(node, 0, at)
    if dims is None:
        return None

    def told(start: ir.Value, size: Dim) -> Linear | None:
        rank = reader.facts.rank(start) or 0
        return _place(reader.element(start, (constant(0),) * rank, depth), size, reader.facts)

    inner = cut_from(node, dims, at, reader.facts, told)
    return None if inner is None else reader.input(node, 0, inner, depth)


def _gather(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    dims, indices = reader.input_dims(node, 0), reader.input_dims(node, 1)
    if dims is None or indices is None:
        return None
    axis: int = attribute(node, "axis", 0) % len(dims)
    picked = reader.input(node, 1, at[axis : axis + len(indices)], depth)
    place = _place(picked, dims[axis], reader.facts)
    return None if place is None else reader.input(node, 0, (*at[:axis], place, *at[axis + len(indices) :]), depth)


def _gather_elements(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    dims = reader.input_dims(node, 0)
    if dims is None:
        return None
    axis: int = attribute(node, "axis", 0) % len(dims)
    place = _place(reader.input(node, 1, at, depth), dims[axis], reader.facts)
    return None if place is None else reader.input(node, 0, (*at[:axis], place, *at[axis + 1 :]), depth)


def _gather_nd(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    dims, indices = reader.input_dims(node, 0), reader.input_dims(node, 1)
    if dims is None or indices is None or attribute(node, "batch_dims", 0) or not isinstance(indices[-1], int):
        return None
    outer = len(indices) - 1
    places: list[Expression] = []
    for axis in range(indices[-1]):
        place = _place(reader.input(node, 1, (*at[:outer], constant(axis)), depth), dims[axis], reader.facts)
        if place is None:
            return None
        places.append(place)
    return reader.input(node, 0, (*places, *at[outer:]), depth)


def _place(picked: Expression, size: Dim, facts: Facts) -> Linear | None:
    """An index that is read or computed, as a form; a negative constant counts from the end."""
    if isinstance(picked, Element):
        picked = Linear(((picked, 1),))
    if not isinstance(picked, Linear):
        return None
    if any(isinstance(atom, Element) for atom, _ in picked.terms) and not facts.assumed.indices_in_range:
        return None
    if not picked.terms and isinstance(picked.offset, int) and picked.offset < 0:
        return constant(size + picked.offset)
    return picked


def _concat(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    axis: int = attribute(node, "axis", 0) % len(at)
    place = at[axis]
    if not isinstance(place, Linear):
        return None
    start: Dim = 0
    parts: list[tuple[Dim, Expression]] = []
    for position in range(len(node.inputs)):
        dims = reader.input_dims(node, position, at)
        if dims is None:
            return None
        inner = combine(place, constant(start), -1)
        if _outside(inner, dims[axis]):
            start = start + dims[axis]
            continue
        start = start + dims[axis]
        parts.append((start, reader.input(node, position, (*at[:axis], inner, *at[axis + 1 :]), depth)))
    if not parts:
        return None
    result = parts[-1][1]
    for end, part in reversed(parts[:-1]):
        result = choice(at_most_zero(combine(combine(place, constant(end), -1), constant(1))), part, result)
    return result


def _outside(place: Linear, size: Dim) -> bool:
    """Whether a known place is certainly not in an axis of known length."""
    return not place.terms and isinstance(place.offset, int) and isinstance(size, int) and not 0 <= place.offset < size


def _range(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    start, step = (simplify.as_form(reader.input(node, place, (), depth)) for place in (0, 2))
    place = at[0]
    if start is None or step is None or step.terms or not isinstance(place, Linear):
        return None
    return combine(start, scaled(place, step.offset))


def _pad(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    """A number around a tensor: zeros behind a mask of the tokens so far, in front of relative positions of all but one."""
    dims, pads, filled = reader.input_dims(node, 0), given(node, 1), given(node, 2)
    content = None if pads is None else reader.facts.content(pads)
    ends = [end for end in content if end is not None and not isinstance(end, float)] if isinstance(content, tuple) else []
    if dims is None or len(ends) != 2 * len(dims) or given(node, 3) is not None:
        return None
    number = 0.0 if filled is None else reader.facts.number(filled)
    if number is None or attribute(node, "mode", "constant") != "constant":
        return None
    inner = list(at)
    inside: list[Expression] = []
    for axis, (front, behind) in enumerate(zip(ends[: len(dims)], ends[len(dims) :], strict=True)):
        if front == 0 and behind == 0:
            continue
        place = at[axis]
        if not isinstance(place, Linear):
            return None
        inner[axis] = place = combine(place, constant(front), -1)
        if front != 0:
            inside.append(at_most_zero(scaled(place, -1)))
        if behind != 0:
            inside.append(at_most_zero(combine(combine(place, constant(dims[axis]), -1), constant(1))))
    found = reader.input(node, 0, tuple(inner), depth)
    nothing = simplify.zero_like(found) if number == 0 else literal(number, reader.facts.dtype(node.outputs[0]))
    for condition in inside:
        found = choice(condition, found, nothing)
    return found


def _trilu(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    shift = reader.input(node, 1, (), depth) if len(node.inputs) > 1 and node.inputs[1] is not None else constant(0)
    row, column = at[-2:]
    if not isinstance(shift, Linear) or not isinstance(row, Linear) or not isinstance(column, Linear):
        return None
    inner = reader.input(node, 0, at, depth)
    beyond = combine(combine(column, row, -1), shift, -1)
    upper = bool(attribute(node, "upper", 1))
    kept = at_most_zero(scaled(beyond, -1)) if upper else at_most_zero(beyond)
    return choice(kept, inner, simplify.zero_like(inner))


def _constant_of_shape(reader: Reader, node: ir.Node, at: At, depth: int) -> Expression | None:
    number = reader.facts.number(node.outputs[0])
    return None if number is None else literal(number, reader.facts.dtype(node.outputs[0]))


_ELEMENTWISE = (
    "Add Sub Mul Div Mod Neg Abs Min Max Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor Not Where "
    "Pow Log Floor Ceil Exp Sqrt Reciprocal Sign BitwiseAnd BitwiseOr BitwiseNot"
)
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": running_sum,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Identity": _identity,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
