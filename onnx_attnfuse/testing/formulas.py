"""Proofs of formulas: a pattern's written formula and its meaning, compared for all sizes by a solver.

    for proof in proofs(pattern):
        print(proof)

Enter at `proofs`. Operands are finite numbers; exponentials do not overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic, arrays, terms
from onnx_attnfuse.certify.arrays import Array, Index, Unsupported, elementwise
from onnx_attnfuse.certify.meanings import elements, reductions
from onnx_attnfuse.certify.meanings.call import Call
from onnx_attnfuse.certify.meanings.elements import inverse
from onnx_attnfuse.certify.prover import Judge, Prover
from onnx_attnfuse.certify.softmaxes import function, gathered, is_minus_infinity, weight
from onnx_attnfuse.certify.solvers import Solver
from onnx_attnfuse.certify.terms import FALSE, ONE, Term, add, multiply, number, polynomial, subtract
from onnx_attnfuse.language.decorators import Pattern
from onnx_attnfuse.language.expression import Tensor
from onnx_attnfuse.language.normal_form import kind_of, variants

_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL
_FRONT = (terms.size("batch", positive=True), terms.size("heads", positive=True))
_LOGICAL = frozenset(["And", "Or", "Not"])
_LETTERS = {
    "MatMul": "ik ij jk", "T": "ji ij", "ReduceSum": "i1 ij", "ReduceMax": "i1 ij", "ReduceMean": "i1 ij", "Concat": "ij ik il",
}  # fmt: skip
"""The rows and columns of the result and of each operand of operators by letters that are equal where they are; 1 is 1."""
_ALIKE = frozenset("Add Sub Mul Div Pow Min Max Less LessOrEqual Greater GreaterOrEqual Equal And Or Where".split())


@dataclasses.dataclass(frozen=True)
class FormulaProof:
    """The outcome of proving one combination of a pattern's alternatives."""

    choices: Mapping[str, str]
    proved: bool
    why: str = ""
    """The open terms, or those without a meaning here."""

    def __str__(self) -> str:
        chosen = "".join(f", {choice}={name}" for choice, name in sorted(self.choices.items()))
        return f"proved for all sizes{chosen}" if self.proved else f"not proved{chosen}: {self.why}"


def proofs(pattern: Pattern, solver: Solver | None = None) -> Iterator[FormulaProof]:
    """Proofs that the written formula equals its meaning, for each combination of alternatives; none where both are one formula.

    Raises:
        MissingDependencyError: No solver is installed.
    """
    if pattern.meaning is None or pattern.restates:
        return
    judge = (solver or Solver()).proves
    for choices, written in variants(pattern.written):
        for more, meaning in variants(pattern.meaning, choices):
            yield dataclasses.replace(_proof(written, meaning, judge), choices=dict(more))


def _proof(written: Tensor, meaning: Tensor, judge: Judge) -> FormulaProof:
    terms.restart()
    arithmetic.noted()
    prover = Prover(judge)
    try:
        shapes = _Shapes()
        shapes.alike(written, meaning)
        first, second = (_Reading(shapes).array(formula) for formula in (written, meaning))
        places = arrays.axes_of(first)
        one, other = (gathered(array.at(*places), is_finite=True) for array in (first, second))
        lengths = zip(first.shape, second.shape, strict=True)
        proved = all(prover.equal(*pair, ()) for pair in lengths) and prover.equal(one, other, ())
        proved = proved and all(prover.valid(lemma, (), "simplification") for lemma in arithmetic.noted())
    except Unsupported as error:
        return FormulaProof({}, proved=False, why=str(error))
    return FormulaProof({}, proved, "" if proved else "open is " + ", ".join(dict.fromkeys(name for name, _ in prover.open)))


class _Shapes:
    """Rows and columns of each part of a formula, as far as its operators say which are the same."""

    def __init__(self) -> None:
        self._same: dict[tuple[object, int], tuple[object, int]] = {}
        self.truths: set[str] = set()

    def alike(self, one: Tensor, other: Tensor) -> None:
        """Has two formulas be of one shape."""
        for item in (one, other):
            self._read(item, truth=False)
        for axis in (0, 1):
            self._join((_key(one), axis), (_key(other), axis))

    def length(self, formula: Tensor, axis: int) -> Term:
        """The length of the rows (0) or columns (1) of a formula."""
        found = self._root((_key(formula), axis))
        return ONE if found == (None, 0) else terms.size(f"{found[0]}.{found[1]}", positive=True)

    def _root(self, place: tuple[object, int]) -> tuple[object, int]:
        while place in self._same:
            place = self._same[place]
        return place

    def _join(self, one: tuple[object, int], other: tuple[object, int]) -> None:
        first, second = self._root(one), self._root(other)
        if first != second:
            first, second = (second, first) if first == (None, 0) else (first, second)
            self._same[first] = second

    def _read(self, item: Tensor, *, truth: bool) -> None:
        if item.op == "Variable":
            self.truths.update([item.name] if truth else [])
            if kind_of(item.name) == "scale":
                self._join((_key(item), 0), (None, 0))
                self._join((_key(item), 1), (None, 0))
        for place, part in enumerate(item.args):
            self._read(part, truth=item.op in _LOGICAL or (item.op == "Where" and place == 0))
        if item.op in _ALIKE:
            self._alike(item, _key(item))
            return
        lengths: dict[str, tuple[object, int]] = {"1": (None, 0)}
        letters = _LETTERS.get(item.op, "ij ij").split() if item.args else []
        for part, axes in zip((item, *item.args), letters, strict=False):
            for axis, letter in enumerate(axes):
                self._join(lengths.setdefault(letter, (_key(part), axis)), (_key(part), axis))

    def _alike(self, item: Tensor, own: object) -> None:
        for axis in (0, 1):
            parts = [part for part in item.args if part.op != "Number" and self._root((_key(part), axis)) != (None, 0)]
            for part in parts:
                self._join((own, axis), (_key(part), axis))
            if not parts:
                self._join((own, axis), (None, 0))


def _key(item: Tensor) -> object:
    return item.name if item.op == "Variable" else item


class _Reading:
    """A formula as an array of terms."""

    def __init__(self, shapes: _Shapes) -> None:
        self._shapes = shapes

    def array(self, item: Tensor) -> Array:
        """The result of a formula as an array, (batch, heads, rows, columns).

        Raises:
            Unsupported: It has an operator without a meaning here.
        """
        if item.op == "Number":
            return arrays.scalar(number(item.value, "Real"), _FLOAT)
        if item.op == "Variable":
            dtype = _BOOL if item.name in self._shapes.truths else _FLOAT
            prefix = terms.MASKLIKE if kind_of(item.name) == "mask" else "v"
            shape = [*_FRONT, self._shapes.length(item, 0), self._shapes.length(item, 1)]
            if kind_of(item.name) == "scale":
                return Array([], dtype, lambda _: terms.element(prefix + item.name, "Real", ()))
            return arrays.unknown(prefix + item.name, shape, dtype)
        split = self._by_parts(item)
        if split is not None:
            return split
        given = [self.array(part) for part in item.args]
        if item.op == "T":
            return arrays.permuted(given[0], [0, 1, 3, 2])
        if item.op == "Concat":
            return arrays.concatenated(given, 3)
        if item.op == "Softmax":
            return _softmax(given)
        if item.op == "Log":
            return logarithm(given[0])
        if item.op == "LogSoftmax":
            exponentials = self._called("ReduceSum", [self._called("Exp", given)])
            return self._called("Sub", [given[0], logarithm(exponentials)])
        found = self._called(item.op, given)
        return exponential(given[0], found) if item.op == "Exp" else found

    def _by_parts(self, item: Tensor) -> Array | None:
        """A product of concatenations, `concat(a, b) @ concat(c, d).T`, as the sum of `a @ c.T` and `b @ d.T`.

        None if it is none, or if lengths of the parts are not known to agree.
        """
        if item.op != "MatMul" or item.args[1].op != "T":
            return None
        left, right = item.args[0], item.args[1].args[0]
        if left.op != "Concat" or right.op != "Concat" or len(left.args) != len(right.args):
            return None
        pairs = [(self.array(one), self.array(other)) for one, other in zip(left.args, right.args, strict=True)]
        if any(one.shape[3] is not other.shape[3] for one, other in pairs):
            return None
        products = [arrays.matmul(one, arrays.permuted(other, [0, 1, 3, 2])) for one, other in pairs]
        return self._called("Sum", products)

    @staticmethod
    def _called(op: str, given: Sequence[Array]) -> Array:
        meaning = {**elements.MEANINGS, **reductions.MEANINGS}.get(op)
        if meaning is None:
            raise Unsupported(f"{op} has no meaning here")
        attributes = [ir.AttrInt64s("axes", [-1])] if op.startswith("Reduce") else []
        (result,) = meaning(Call(ir.Node("", op, [], attributes), given, 18))
        assert result is not None
        return result


def _softmax(given: Sequence[Array]) -> Array:
    """Weights along the columns; with finite scores there is no row whose exponentials are all 0."""
    scores, *sinks = given

    def read(at: arrays.Index) -> Term:
        sink = sinks[0].at(*arrays.aligned((*at[:3], terms.ZERO), sinks[0].shape)) if sinks else None
        return weight(lambda key: scores.at(*at[:3], key), scores.shape[3], at[3], sink=sink)

    return Array(scores.shape, scores.dtype, read)


def logarithm(data: Array) -> Array:
    """The logarithm of each element.

    Raises:
        Unsupported: An element may be 0 or less.
    """
    return elementwise([data], data.dtype, _logarithm)


def exponential(data: Array, plain: Array) -> Array:
    """The exponential of each element; a logarithm that is added or subtracted becomes a factor or a divisor.

    Args:
        data: The exponent.
        plain: Its exponential, for elements without a logarithm.
    """

    def read(at: Index) -> Term:
        return _factors(data.at(*at)) or plain.at(*at)

    return Array(data.shape, data.dtype, read)


def _logarithm(term: Term) -> Term:
    if not _is_positive(term):
        raise Unsupported("a logarithm of a number that may be 0")
    return function("log", term)


def _is_positive(term: Term) -> bool:
    """Whether a number is positive: made of exponentials of numbers by sums and products alone. No axis of a formula is empty."""
    parts = polynomial(term)
    return bool(parts) and all(factor > 0 and all(map(_is_positive_atom, atoms)) for atoms, factor in parts.items())


def _is_positive_atom(atom: Term) -> bool:
    if atom.op == "sum":
        return _is_positive(atom.args[1])
    return atom.op == "function" and atom.data == "exp" and is_minus_infinity(atom.args[0]) is FALSE


def _factors(term: Term) -> Term | None:
    """exp(x ± log(y)) as exp(x) times or over y; None where there is no logarithm."""
    if term.sort != "Real":
        return None
    found = [
        (atoms[0], factor)
        for atoms, factor in polynomial(term).items()
        if len(atoms) == 1 and atoms[0].op == "function" and atoms[0].data == "log" and factor in {1, -1}
    ]
    if not found:
        return None
    rest = term
    for atom, factor in found:
        rest = subtract(rest, atom) if factor == 1 else add(rest, atom)
    result = function("exp", rest)
    for atom, factor in found:
        result = multiply(result, atom.args[0] if factor == 1 else inverse(atom.args[0]))
    return result
