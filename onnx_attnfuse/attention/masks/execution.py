"""Executes the graph above a mask to terms. Views and gathers have the meanings of certificates; floats keep their order.

Execution ends at an operator without a meaning here, and at one whose result is no form over indices, comparison or choice. The
result of such an operator is an element that is read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.masks import operators
from onnx_attnfuse.attention.masks.mask_terms import Name, name_of
from onnx_attnfuse.attention.masks.mask_terms import size as size_of
from onnx_attnfuse.certify import arithmetic, arrays, meanings
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported, sort_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution
from onnx_attnfuse.certify.meanings.call import Call
from onnx_attnfuse.certify.terms import Term, add, element, ite, multiply, number, size, to_real, truth, walk
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_array, has_unknown_attribute, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import from_start, slice_bounds, span_of
from onnx_attnfuse.graph.sizes import Dim, Size

_MATRIX = 1 << 24
_LARGEST = 256
"""Parts of a term beyond which it is not looked into: a value that is used twice over and over has 2^n of them."""
_MAX_DEPTH = 120
_ELEMENTWISE = frozenset(
    """Add Sub Mul Div Mod Neg Abs Min Max Equal Less LessOrEqual Greater GreaterOrEqual And Or Xor Not Where
    Pow Log Floor Ceil Exp Sqrt Reciprocal Sign BitwiseAnd BitwiseOr BitwiseXor BitwiseNot""".split()
)
_VIEWS = frozenset(
    """Concat ConstantOfShape CumSum Gather GatherElements GatherND Identity Pad Squeeze Tile Transpose Trilu Unsqueeze""".split()
)
"""Operators with the same meaning as in certificates."""
_COUNTED = frozenset([ir.DataType.INT64, ir.DataType.INT32])


class MaskExecution(Execution):
    """One graph, executed as far as masks are read in it.

    Args:
        facts: Shapes, types and contents of its values.
        present: Lengths that are not 0, since an element is read that they are the range of an index of.
        end: A value that is not looked into.
    """

    def __init__(self, facts: Facts, present: frozenset[Dim], end: ir.Value | None = None) -> None:
        super().__init__(facts, self.name, {}, lambda value: value is end, facts.opset, size)
        self._known, self._present, self._depth = facts, present, 0
        self._names_of: dict[ir.Value, Name] = {}
        self._numbers: dict[ir.Value, float | None] = {}
        self._tables: dict[ir.Value, tuple[str, Array, bool]] = {}
        """Constants: the name that their elements have, their formula, and whether they hold nothing but 0 and 1."""

    def name(self, value: ir.Value) -> Name:
        """The name of a value in terms."""
        if value not in self._names_of:
            self._names_of[value] = name_of(value)
        return self._names_of[value]

    def _above(self, value: ir.Value, *, beyond: bool) -> Sequence[ir.Value | None] | None:
        node = value.producer()
        if (
            node is None
            or (self._ends(value) and not beyond)
            or is_constant(value)
            or has_unknown_attribute(node)
            or not is_standard(node)
        ):
            return None
        if node.op_type not in _RULES or self._known.dims(value) is None or self._known.dtype(value) is None:
            return None
        if self._known.content(value) is not None and self._known.rank(value) == 0:
            return None
        return node.inputs[:1] if node.op_type in _BY_SHAPE else node.inputs

    def _computed(self, node: ir.Node, given: list[Array | None]) -> Sequence[Array | None]:
        return [_RULES[node.op_type](self, node, given)]

    def shape(self, value: ir.Value) -> list[Term]:
        """The shape of a value that has one."""
        dims = self._known.dims(value)
        if dims is None:
            raise Unsupported(f"the shape of {value.name}")
        return [size_of(sizes.not_empty(dim, self._present)) for dim in dims]

    def _guarded(self, value: ir.Value, array: Array) -> Array:
        def at(place: Index) -> Term:
            found = self._known_at(value, place)
            if found is None and self._depth < _MAX_DEPTH:
                self._depth += 1
                try:
                    found = array.at(*place)
                except UNKNOWN:
                    found = None
                finally:
                    self._depth -= 1
            return self._plain(value, place) if found is None or not self._is_read(found) else found

        return Array(self.shape(value), array.dtype, at)

    def _is_read(self, found: Term) -> bool:
        """Whether a term is looked into; else the value is read that it is an element of."""
        return operators.is_read(found) and _count(found) <= _LARGEST

    def _known_at(self, value: ir.Value, place: Index) -> Term | None:
        """The known value of an element: the one of a list of sizes, or the number that all are."""
        dtype, item = self._known.dtype(value), self._known.content(value)
        if dtype is None:
            return None
        if isinstance(item, tuple):
            at = int(place[0].data) if place[0].op == "const" else len(item)
            item = item[at] if -len(item) <= at < len(item) else None
        if isinstance(item, (int, Size)) and not isinstance(item, bool):
            return size_of(item) if dtype.is_integer() else None
        if value not in self._numbers:
            self._numbers[value] = self._known.number(value)
        every = self._numbers[value]
        return None if every is None else _literal(every, dtype)

    def _end(self, value: ir.Value) -> Array:
        dims, dtype = self._known.dims(value), self._known.dtype(value)
        if dims is None or dtype is None:
            return _Unknown()
        if self._ends(value):
            return Array(self.shape(value), dtype, lambda place: self._plain(value, place))

        def read(place: Index) -> Term:
            found = self._known_at(value, place)
            if found is not None:
                return found
            return self._of_table(value, place) if is_constant(value) else self._plain(value, place)

        return Array(self.shape(value), dtype, read)

    def _plain(self, value: ir.Value, place: Index) -> Term:
        """An element that is read."""
        return element(self.name(value), sort_of(self._known.dtype(value) or ir.DataType.UNDEFINED), place)

    def _of_table(self, value: ir.Value, place: Index) -> Term:
        """An element of a constant: a formula where it follows one, else one that is read, as a choice where all are 0 or 1.

        Of constants that hold the same the first that was asked for is read: exporters write a table once for each place.
        """
        if value not in self._tables:
            self._tables[value] = self._table(value)
        name, table, binary = self._tables[value]
        found = element(name, table.sort, place)
        if all(map(arithmetic.is_nonnegative, place)):
            with contextlib.suppress(Unsupported):
                found = table.at(*place)
        if not binary or found.op != "element":
            return found
        zero = number(0, found.sort)
        return ite(arithmetic.is_zero(found), zero, number(1, found.sort))

    def _table(self, value: ir.Value) -> tuple[str, Array, bool]:
        array, dtype = constant_array(value, limit=_MATRIX), self._known.dtype(value) or ir.DataType.UNDEFINED
        if array is None or not array.size:
            return self.name(value), arrays.unknown(self.name(value), self.shape(value), dtype), False
        key = str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        known = self._known.once("constants by content", dict[tuple[object, ...], ir.Value])
        if key not in known or not known[key].uses():  # a rewrite may have removed it since
            known[key] = value
        name, binary = self.name(known[key]), dtype != ir.DataType.BOOL and bool(np.isin(array, [0, 1]).all())
        return name, arrays.constant(array, name, dtype, listed=False), binary

    def place(self, found: Term, length: Term) -> Term:
        """An index that is read or computed, as a form; a negative constant counts from the end.

        Raises:
            Unsupported: It is none, or may be outside of the axis.
        """
        if found.op == "const":
            return found if found.data >= 0 else add(found, length)
        if not operators.is_form(found):
            raise Unsupported("an index that is no form")
        if not self._known.assumed.indices_in_range and _reads(found):
            raise Unsupported("an index that may be outside")
        return found

    @property
    def facts(self) -> Facts:
        """Shapes, types and contents of the graph's values."""
        return self._known


class _Unknown(Array):
    """A value of unknown rank."""

    def __init__(self) -> None:
        super().__init__((), ir.DataType.FLOAT, lambda _: number(0, "Real"))

    def __getattribute__(self, name: str) -> Any:
        raise Unsupported("a value of unknown rank")


def _reads(term: Term) -> bool:
    return any(item.op == "element" for item in walk(term))


def _count(term: Term) -> int:
    """The parts of a term, written out."""
    if "parts" not in term.memo:
        term.memo["parts"] = 1 + sum(map(_count, term.args))
    return int(term.memo["parts"])


def _literal(value: float, dtype: ir.DataType) -> Term:
    """A number of an element type."""
    if dtype == ir.DataType.BOOL:
        return truth(bool(value))
    return number(int(value)) if dtype.is_integer() else operators.literal(value)


_Rule = Callable[[MaskExecution, ir.Node, "Sequence[Array | None]"], Array]


def _input(items: Sequence[Array | None], place: int) -> Array:
    found = items[place] if place < len(items) else None
    if found is None:
        raise Unsupported(f"no input {place}")
    return found


def _result(run: MaskExecution, node: ir.Node, read: Callable[[Index], Term]) -> Array:
    return Array(run.shape(node.outputs[0]), _type(run, node), read)


def _type(run: MaskExecution, node: ir.Node) -> ir.DataType:
    dtype = run.facts.dtype(node.outputs[0])
    if dtype is None:
        raise Unsupported("an unknown element type")
    return dtype


def _elementwise(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    """Integers and truth values as in certificates, floats as written; where that is nothing to read, the operator as it is."""
    inputs, dtype = [_input(items, place) for place in range(len(items))], _type(run, node)
    plain = all(item.sort != "Real" for item in inputs) and node.op_type != "Where" and dtype not in FLOATS
    meant = _view(run, node, items) if plain else None

    def read(place: Index) -> Term:
        operands = [item.at(*arrays.aligned(place, item.shape)) for item in inputs]
        if meant is None:
            return operators.apply(node.op_type, operands, dtype)
        try:
            found = operators.drawn(meant.at(*place))
        except UNKNOWN:
            found = None
        readable = found is not None and operators.is_read(found) and operators.fits(found, dtype)
        return found if found is not None and readable else operators.opaque(node.op_type, operands, dtype)

    return _result(run, node, read)


def _clip(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    """The least of a ceiling and the greatest of a floor and the element; attributes of old opsets are left alone."""
    data, dtype = _input(items, 0), _type(run, node)
    if "min" in node.attributes or "max" in node.attributes:
        raise Unsupported("Clip by attributes")
    ends = [(op, item) for op, item in zip(("Max", "Min"), items[1:], strict=False) if item is not None]

    def read(place: Index) -> Term:
        found = data.at(*place)
        for op, item in ends:
            found = operators.apply(op, (found, item.at()), dtype)
        return found

    return _result(run, node, read)


def _cast(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    data, target = _input(items, 0), _type(run, node)
    return _result(run, node, lambda place: operators.cast(data.at(*place), data.dtype, target))


def _view(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    meaning = meanings.of(node)
    if meaning is None:
        raise Unsupported(node.op_type)
    call = Call(node, items, run.facts.opset, place=run.place)
    (result,) = meaning(call)
    assert result is not None
    call.finish()
    return result


def _running_sum(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    if _type(run, node) not in _COUNTED:
        raise Unsupported("a running sum that may be rounded")
    return _view(run, node, items)


def _reshape(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    return arrays.reshaped(_input(items, 0), run.shape(node.outputs[0]))


def _expand(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    data = _input(items, 0)
    return _result(run, node, lambda place: data.at(*arrays.aligned(place, data.shape)))


def _range(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    start, step = (operators.form_of(_input(items, place).at()) for place in (0, 2))
    if start is None or step is None or not operators.is_measure(step):
        raise Unsupported("Range by an unknown step")

    def read(place: Index) -> Term:
        found = add(start, multiply(step, place[0]))
        return found if _type(run, node).is_integer() else to_real(found)

    return _result(run, node, read)


def _slice(run: MaskExecution, node: ir.Node, items: Sequence[Array | None]) -> Array:
    """A part that begins at a known place, or at one that only a run shows, which is taken to be inside."""
    data, value = _input(items, 0), node.inputs[0]
    dims = run.facts.dims(value)
    bounds = None if dims is None else slice_bounds(node, len(dims), run.facts)
    found = span_of(node, run.facts) if bounds is None else None
    if dims is None or (bounds is None and found is None):
        raise Unsupported("Slice from an unknown place")
    begins: dict[int, tuple[Term, int]] = {}
    if found is not None:
        start = run.array(found[1])
        begins[found[0] % len(dims)] = run.place(start.at(*[number(0)] * start.rank), data.shape[found[0]]), 1
    for axis, (bound, _, step) in (bounds or {}).items():
        first = from_start(bound, dims[axis])
        if first is None or step < 1:
            raise Unsupported("Slice from an unknown place, or backwards")
        begins[axis] = size_of(first), step

    def read(place: Index) -> Term:
        inner = list(place)
        for axis, (first, step) in begins.items():
            inner[axis] = add(first, multiply(number(step), place[axis]))
        return data.at(*inner)

    return _result(run, node, read)


_BY_SHAPE = frozenset(["Reshape", "Flatten", "Expand", "Slice"])
"""Operators of which the shape of the result says all that their other inputs say, or facts do."""
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_VIEWS, _view),
    "Cast": _cast, "CastLike": _cast, "Clip": _clip, "CumSum": _running_sum, "Expand": _expand, "Flatten": _reshape,
    "Range": _range, "Reshape": _reshape, "Slice": _slice,
}  # fmt: skip
