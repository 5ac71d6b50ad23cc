"""The channels of a head as terms: the graph executed from a value that they are linear in, and from none.

    run = ChannelExecution(facts, lengths, inside)
    run.array(value).at(*place)     # a polynomial over elements of `root` and of values beside it

Between a value and the rotated value, sums and products are those of numbers. All else is as written, one operator after the
other, so that two channels are equal only if the same floats are.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, length
from onnx_attnfuse.attention.masks.execution import MaskExecution
from onnx_attnfuse.attention.masks.mask_terms import Name
from onnx_attnfuse.attention.masks.mask_terms import size as size_of
from onnx_attnfuse.certify import arithmetic, arrays, meanings
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported
from onnx_attnfuse.certify.meanings.call import Call
from onnx_attnfuse.certify.terms import ONE, ZERO, Term, add, element, free, index, make, multiply, number, polynomial, product
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import Array as NumPyArray
from onnx_attnfuse.graph.constants import constant_array, has_unknown_attribute, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.sizes import Dim

_ALIKE = frozenset("Add Cast Cos Div Exp Mul Neg Pow Reciprocal Sin Sqrt Sub Where".split())
"""Operators that make equal channels of equal channels."""
_ODD = frozenset(["Cast", "Div", "Mul", "Sin"])
"""Those whose result changes its sign with that of each operand."""
_LINEAR = frozenset("Add Cast Mul Neg RotaryEmbedding Split Sub".split())
_MAX_COMPARED = 1 << 22
"""Elements of a constant whose columns are compared."""
_PAIR = "pair"


def pair_of(count: int) -> Term:
    """The index of one of several pairs of channels."""
    return index(_PAIR, number(count)) if count > 1 else ZERO


class ChannelExecution(MaskExecution):
    """One graph, executed as far as channels are followed in it.

    Args:
        facts: Shapes, types and contents of its values.
        lengths: Lengths that are not 0.
        inside: Values that are linear in another, where execution ends, as at all beside them; None: it goes on as far as it can.
        reads_floats: Whether constants among the latter are read.
    """

    def __init__(
        self, facts: Facts, lengths: frozenset[Dim], inside: Set[ir.Value] | None = None, *, reads_floats: bool = True
    ) -> None:
        super().__init__(facts, lengths)
        self._inside = inside
        self._contents: dict[tuple[object, ...], str] = {}

        def ends(value: ir.Value) -> bool:
            return value not in (inside or ()) and not (is_constant(value) and (reads_floats or facts.dtype(value) not in FLOATS))

        if inside is not None:
            self._ends = ends

    def _above(self, value: ir.Value, *, beyond: bool) -> Sequence[ir.Value | None] | None:
        node = value.producer()
        known = _ALIKE | {"Split"} if self._inside is None else _LINEAR
        if is_standard(node, *known) and not has_unknown_attribute(node) and not self._ends(value) and not is_constant(value):
            return node.inputs
        return super()._above(value, beyond=beyond)

    def _known_at(self, value: ir.Value, place: Index) -> Term | None:
        """That of the base; values that are linear in another are no known numbers, and so are not asked."""
        return None if self._inside is not None and value in self._inside else super()._known_at(value, place)

    def _computed(self, node: ir.Node, given: list[Array | None]) -> Sequence[Array | None]:
        if node.op_type == "Split" or (self._inside is not None and node.op_type in _LINEAR):
            meaning = meanings.of(node)
            if meaning is None:
                raise Unsupported(node.op_type)
            return meaning(Call(node, given, self.facts.opset))
        dtype = self.facts.dtype(node.outputs[0])
        if dtype is not None and node.op_type in _ALIKE and dtype in FLOATS:
            items = [item for item in given if item is not None]

            def read(place: Index) -> Term:
                return _written(node.op_type, [item.at(*arrays.aligned(place, item.shape)) for item in items], dtype)

            return [Array(self.shape(node.outputs[0]), dtype, read)]
        if node.op_type == "Slice" and self._inside is None:
            with contextlib.suppress(Unsupported):
                return super()._computed(node, given)
            return [self._cut(node, given[0])]
        return super()._computed(node, given)

    def _cut(self, node: ir.Node, data: Array | None) -> Array:
        """A part of a table from a row that only a run shows: whichever that is, it is one for all channels."""
        axes = None if data is None else axes_of(node, 3, data.rank, self.facts)
        if data is None or axes is None:
            raise Unsupported("Slice along unknown axes")
        rows = Name(f"rows of {node.outputs[0].name}", node)

        def read(place: Index) -> Term:
            if any(map(is_pair, (item for axis in axes for item in free(place[axis])))):
                raise Unsupported("Slice of channels from an unknown place")
            return data.at(*(element(rows, "Int", (item,)) if axis in axes else item for axis, item in enumerate(place)))

        return Array(self.shape(node.outputs[0]), data.dtype, read)

    def _is_read(self, found: Term) -> bool:
        del found
        return True

    def _of_table(self, value: ir.Value, place: Index) -> Term:
        """An element of a constant: 1 or -1 if it is, else one of the columns of a pair, which are the same wherever they lie."""
        array, dtype = constant_array(value, limit=_MAX_COMPARED), self.facts.dtype(value)
        steps = [step_of(item) for item in place]
        if array is None or dtype is None or (self._inside is None and not any(steps)):
            return super()._of_table(value, place)
        inner = list(place)
        for axis, step in enumerate(steps):
            if step is not None:
                inner[axis], factor, start = step
                array = np.take(array, [start + factor * at for at in range(int(inner[axis].args[0].data))], axis)
        if self._inside is not None and dtype in FLOATS:
            part: NumPyArray = np.asarray(array)[tuple(int(item.data) if item.op == "const" else slice(None) for item in inner)]
            signs = [sign for sign in (1, -1) if part.size and (part == sign).all()]
            return number(signs[0], "Real") if signs else self._plain(value, place)
        is_turned = dtype in FLOATS and bool(array.size) and bool(np.ravel(array)[int(np.argmax(array != 0))] < 0)
        array = -array if is_turned else array
        key = str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        name = self._contents.setdefault(key, f"c{len(self._contents)}")
        found = arrays.constant(array, name, dtype, listed=False).at(*inner)
        return _opposite(found) if is_turned else found

    def place(self, found: Term, length: Term) -> Term:
        """An index that is read: whichever element that is of, it is one for all channels.

        Raises:
            Unsupported: It differs by channel, and may count from the end.
        """
        if found.op == "const":
            return found if found.data >= 0 else add(found, length)
        if arithmetic.is_nonnegative(found):
            return found
        if any(map(is_pair, free(found))):
            raise Unsupported("an index that may count from the end")
        return element("place", "Int", (found, length))


def _written(op: str, items: Sequence[Term], dtype: ir.DataType) -> Term:
    """The result of an operator as it is written, without signs that it hands on: floats have them apart."""
    if op == "Neg":
        return _opposite(items[0])
    negative = [_is_negative(item) for item in items]
    if op in _ODD or op == "Cos":
        items = [_opposite(item) if is_negative else item for item, is_negative in zip(items, negative, strict=True)]
    found = make("apply", "Real", tuple(items), f"{op} {dtype.name}")
    return _opposite(found) if op in _ODD and sum(negative) % 2 else found


def _opposite(term: Term) -> Term:
    return multiply(number(-1, "Real"), term)


def _is_negative(term: Term) -> bool:
    """Whether a float is the opposite of another term."""
    return term.sort == "Real" and [factor < 0 for factor in polynomial(term).values()] == [True]


def step_of(item: Term) -> tuple[Term, int, int] | None:
    """The pair that an index is a multiple of, and the number that is added; None where it is another index."""
    parts = dict(polynomial(item))
    start = parts.pop((), 0)
    if len(parts) != 1:
        return None
    ((atoms, factor),) = parts.items()
    return (atoms[0], int(factor), int(start)) if len(atoms) == 1 and is_pair(atoms[0]) else None


def is_pair(term: Term) -> bool:
    """Whether a term is the index of a pair of channels."""
    return term.op == "index" and term.data == _PAIR


class Layout:
    """The index of each factor as a term, and back.

    Args:
        run: Gives lengths as terms.
        factors: The factors, in order: layers that are laid out alike have equal terms.
    """

    def __init__(self, run: MaskExecution, factors: Sequence[Factor]) -> None:
        self._run = run
        self._axes: dict[Term, Axis] = {}
        self.terms: dict[Factor, Term] = {}
        for count, factor in enumerate(factors):
            if factor.position is not None:
                self.terms[factor] = number(factor.position)
                continue
            self.name(term := index(f"i{count}", size_of(factor.size)), (factor,))
            self.terms[factor] = term

    def name(self, term: Term, axis: Axis) -> None:
        """Assigns factors to an index."""
        self._axes[term] = axis

    def at(self, axis: Axis, terms: Mapping[Factor, Term]) -> Term:
        """The index along an axis, of those of its factors."""
        total = number(0)
        for factor in axis:
            total = add(multiply(total, size_of(factor.size)), terms[factor])
        return total

    def axis(self, place: Term, dim: Dim, *, may_repeat: bool) -> Axis:
        """The factors of an index along an axis of length `dim`.

        Args:
            place: The index.
            dim: The length, all of which the factors run over.
            may_repeat: Whether it may also be 1.

        Raises:
            ValueError: The index is not made of them.
        """
        parts = dict(polynomial(place))
        start, found, stride = int(parts.pop((), 0)), list[Factor](), ONE
        wanted: dict[Term, Axis] = {}
        for atoms, factor in parts.items():
            (inner,) = [atom for atom in atoms if atom in self._axes]
            step = multiply(number(factor), product(atom for atom in atoms if atom is not inner))
            if wanted.setdefault(step, self._axes[inner]) is not self._axes[inner]:
                raise ValueError
        while wanted:
            axis = wanted.pop(stride, None) or _fixed(stride, (step.data for step in wanted if step.op == "const"), start)
            found = [*axis, *found]
            stride = size_of(length(found))
        covered = length(found)
        if isinstance(dim, int) and isinstance(covered, int) and covered < dim:
            found = [*_fixed(number(covered), [dim], start), *found]
        elif not (self._run.facts.same(dim, covered) or (may_repeat and found and sizes.exact_quotient(dim, covered) is None)):
            raise ValueError
        if self.at(tuple(found), {factor: number(factor.position or 0) for factor in found}) is not number(start):
            raise ValueError
        return tuple(found)


def _fixed(stride: Term, others: Iterable[int], start: int) -> Axis:
    """A factor with a fixed index between two others in one axis.

    Raises:
        ValueError: None fits there.
    """
    step, nearest = int(stride.data), min(others)
    if nearest <= step or nearest % step:
        raise ValueError
    return (Factor(nearest // step, start // step % (nearest // step)),)
