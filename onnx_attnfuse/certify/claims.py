"""The proof of one claim: both pieces are executed from the values at which they end, and their elements compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.arrays import Array, Unsupported, axes_of, met
from onnx_attnfuse.certify.execution import Execution, length_of
from onnx_attnfuse.certify.forms import as_digits, bases, halves
from onnx_attnfuse.certify.pairing import Claim, Pair, Side
from onnx_attnfuse.certify.prover import Judge, Prover
from onnx_attnfuse.certify.softmaxes import gathered
from onnx_attnfuse.certify.solvers import Obligation
from onnx_attnfuse.certify.terms import (
    BINDERS,
    MASKLIKE,
    ONE,
    TRUE,
    WEIGHT,
    ZERO,
    Number,
    Term,
    bind,
    from_polynomial,
    number,
    polynomial,
    rebuilt,
    size,
    subtract,
    walk,
)
from onnx_attnfuse.graph.assumptions import AssumptionName, named_in_order
from onnx_attnfuse.graph.constants import Array as NumPyArray
from onnx_attnfuse.graph.constants import constant_tensor
from onnx_attnfuse.graph.uses import sources

_TOLERANCES: Mapping[ir.DataType, float] = {ir.DataType.FLOAT: 2e-6, ir.DataType.FLOAT16: 4e-3, ir.DataType.BFLOAT16: 3e-2}
"""How far apart, of their size, constants may be that are roundings of one number."""
_HALF = frozenset([ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
LEVELS = (0, 1, 2, 3)
"""How far up pieces go: to the first value that both have; past masks and views; past all that is arithmetic; past products of
activations, which one of the models may have for their shape alone."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """The outcome of one claim."""

    claim: Claim
    proved: bool
    level: int
    obligations: tuple[Obligation, ...]
    open: tuple[tuple[str, Obligation], ...]
    boundary: Mapping[str, str]
    """The values at which the pieces end, by their names in obligations."""
    problem: str = ""
    """Why nothing could be asked."""
    assumed: tuple[AssumptionName, ...] = ()
    """Assumptions of this claim alone."""


class Piece:
    """The executions of both models for one claim, at one level."""

    def __init__(self, pair: Pair, claim: Claim, level: int) -> None:
        self._pair, self._claim, self._level = pair, claim, level
        self._sizes = Sizes(pair)
        self._names: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._leaves: dict[str, Array] = {}
        self._frontier = set[str]()
        self.met: tuple[Term, ...] = ()
        """Facts about lengths, as the model before runs; known with the results."""
        if level == 0:
            self._frontier = self._first_shared(claim.after)
        self.before = self._execution(pair.before)
        self.after = self._execution(pair.after)

    @property
    def boundary(self) -> Mapping[str, str]:
        """Names of the values at which execution ended, by their names in obligations."""
        ended = {**self.after.read, **self.before.read}
        return {name: value.name or "" for name, value in sorted(ended.items(), key=lambda item: int(item[0][1:]))}

    def results(self) -> tuple[Array, Array]:
        """The value before and the value after.

        Raises:
            Unsupported: Nothing is known of one.
        """
        list(met())
        before = self.before.array(self._claim.before, beyond=True)
        self.met = tuple(fact for fact in dict.fromkeys(met()) if fact is not TRUE)
        return before, self.after.array(self._claim.after, beyond=True)

    def weight(self, name: str) -> NumPyArray | None:
        """The numbers of a weight by its name in terms."""
        tensor = self.before.weights.get(name) or self.after.weights.get(name)
        return None if tensor is None else np.asarray(tensor.numpy(), np.float64)

    def given(self, side: Side, value: ir.Value) -> Array:
        """A value at which execution ends, as both pieces see it."""
        return (self.before if side is self._pair.before else self.after).array(value)

    def _execution(self, side: Side) -> Execution:
        def name(value: ir.Value) -> str:
            identity = side.own[value] if value is self._claim.after else side.identity_of(value)
            if identity not in self._names:
                self._names[identity] = f"{_letter(side, value)}{len(self._names)}"
                original = self._pair.by_identity.get(identity)
                if original is not None:
                    self._leaf(self._names[identity], original)
            return self._names[identity]

        return Execution(
            side.scope.facts, name, self._leaves, lambda value: self.ends(side, value), side.scope.opset, self._sizes.term
        )

    def _leaf(self, name: str, value: ir.Value) -> None:
        """Has both executions see the same shape."""
        from onnx_attnfuse.certify.arrays import unknown
        from onnx_attnfuse.certify.execution import length_of

        facts = self._pair.before.scope.facts
        dims, dtype = facts.dims(value), facts.dtype(value)
        if dims is not None and dtype is not None:
            self._leaves[name] = unknown(name, [length_of(dim, self._sizes.term) for dim in dims], dtype)

    def ends(self, side: Side, value: ir.Value) -> bool:
        """Whether execution ends at a value of one of the models."""
        if value is self._claim.before or value is self._claim.after:
            return False
        identity = side.identity_of(value)
        if identity not in self._pair.shared:
            return False
        heavy = side.is_heavy(value) and (self._level < 3 or not side.is_of_activations(value))
        if heavy or identity in self._frontier or identity in self._pair.joined:
            return identity in self._pair.shared_after
        return self._level < 2 and side.is_arithmetic(value) and identity in self._pair.shared_after

    def _first_shared(self, value: ir.Value) -> set[str]:
        """The identities of the first values above one that the model before has, too."""
        side, shared = self._pair.after, self._pair.shared
        above = sources([value], lambda item, _: item is value or side.identity_of(item) not in shared)
        return {identity for item in above if item is not value and (identity := side.identity_of(item)) in shared}


def _letter(side: Side, value: ir.Value) -> str:
    """The letter that an array's name begins with."""
    tensor = constant_tensor(value)
    if not side.is_ordinary(value):
        return MASKLIKE
    return WEIGHT if tensor is not None and tensor.dtype.is_floating_point() else "v"


def prove(pair: Pair, claim: Claim, judge: Judge) -> Proof:
    """The proof of a claim at the first level at which there is one, else the open obligations at the last."""
    kind = tuple(None if (node := value.producer()) is None else node.op_type for value in (claim.before, claim.after))
    best: Proof | None = None
    for level in sorted(LEVELS, key=lambda level: level != pair.levels.get(kind)):  # where the last of the kind was proved first
        found = prove_at(pair, claim, judge, level)
        if found.proved:
            pair.levels[kind] = level
            return found
        best = found if best is None or level > best.level else best
    assert best is not None
    return best


def prove_at(pair: Pair, claim: Claim, judge: Judge, level: int) -> Proof:
    """The proof of a claim at one level, or the open obligations there."""
    arithmetic.name({})
    arithmetic.noted()
    arithmetic.name(Sizes(pair).named())
    piece, prover = Piece(pair, claim, level), Prover(judge)
    try:
        before, after = piece.results()
        places = places_of(before, after)
        if places != axes_of(before):
            piece = Piece(pair, claim, level)  # anew, as simplifications of other indices need no proof
            arithmetic.noted()
            before, after = piece.results()
        prover.met, prover.weight = piece.met, piece.weight
        prover.tolerance, prover.is_half = _TOLERANCES.get(before.dtype, 0.0), before.dtype in _HALF
        proved, problem = _compared(prover, pair, (before, after), places), ""
    except (Unsupported, RecursionError) as error:
        proved, problem = False, str(error) or "the piece is too deep"
    prover.shown = list(prover.shown)
    for lemma in arithmetic.noted():
        proved = proved and prover.valid(lemma, (), "simplification")
    left = () if proved else tuple(prover.open)
    assumed = named_in_order(*prover.assumed)
    return Proof(claim, proved, level, tuple(prover.shown), left, piece.boundary, problem, assumed)


def places_of(before: Array, after: Array) -> tuple[Term, ...]:
    """An index for each axis, as digits where it is divided.

    Raises:
        Unsupported: The two arrays are of other ranks or sorts.
    """
    if before.rank != after.rank or before.sort != after.sort:
        raise Unsupported(f"{before.rank} axes and {after.rank}, {before.dtype} and {after.dtype}")
    places = axes_of(before)
    for _ in range(2):  # a quotient by a product of sizes is clearer once other indices are digits
        terms = before.at(*places), after.at(*places)
        as_digits = tuple(_as_digits(terms, place) for place in places)
        if as_digits == places:
            break
        places = as_digits
    return places


def _compared(prover: Prover, pair: Pair, arrays: tuple[Array, Array], places: tuple[Term, ...]) -> bool:
    """Whether two arrays are equal; arrays compared before, in a layer above, are not compared again."""
    before, after = arrays
    lengths = tuple(zip(before.shape, after.shape, strict=True))
    one, other = gathered(before.at(*places)), gathered(after.at(*places))
    other = _snapped(other, _real_factors(one), _TOLERANCES.get(before.dtype, 0.0))
    key = (prover.judge, lengths, one, other, prover.met)
    if key in pair.compared:
        proved, prover.shown, prover.open, prover.assumed, rests = pair.compared[key]
        arithmetic.taken(rests)
        return proved
    proved = _equal(prover, lengths, one, other)
    if not prover.has_weighed:  # in another layer weights of these names are others
        pair.compared[key] = (proved, prover.shown, prover.open, prover.assumed, arithmetic.taken())
    return proved


def _snapped(term: Term, known: Sequence[Fraction], tolerance: float) -> Term:
    """The term with each real constant replaced by the one it is a rounding of."""
    done: dict[Term, Term] = {}

    def nearest(value: Number) -> Number:
        for item in known:
            if item != value and abs(item - value) <= tolerance * abs(item):
                return item
        return value

    def visit(item: Term) -> Term:
        found = done.get(item)
        if found is not None:
            return found
        args = tuple(map(visit, item.args))
        if item.op == "const" and item.sort == "Real":
            found = number(nearest(item.data), "Real")
        elif item.op == "poly" and item.sort == "Real":
            parts: dict[tuple[Term, ...], Number] = {}
            for atoms, factor in polynomial(item).items():
                key = tuple(sorted(map(visit, atoms)))
                parts[key] = parts.get(key, 0) + nearest(factor)
            found = from_polynomial(parts, "Real")
        elif args == item.args:
            found = item
        elif item.op in BINDERS:
            found = bind(item.op, args[0], args[1], item.sort, *args[2:], data=item.data)
        else:
            found = rebuilt(item, args)
        done[item] = found
        return found

    return visit(term)


def _real_factors(term: Term) -> list[Fraction]:
    """The real constants in a term, but for whole numbers."""
    found: dict[Fraction, None] = {}
    for item in walk(term):
        if item.sort == "Real" and item.op in {"const", "poly"}:
            found.update((Fraction(factor), None) for factor in polynomial(item).values() if factor not in {0, 1, -1})
    return list(found)


def _equal(prover: Prover, lengths: Sequence[tuple[Term, Term]], one: Term, other: Term) -> bool:
    for axis, (length, wanted) in enumerate(lengths):
        exists = arithmetic.at_most(ZERO, length)
        if not prover.equal(length, wanted, () if exists is TRUE else (exists,), f"length of axis {axis}"):
            return False
    prover.existing = tuple(arithmetic.at_most(ONE, length) for length, _ in lengths if length.op != "const")
    return prover.equal(one, other, ())


def _as_digits(terms: tuple[Term, Term], place: Term) -> Term:
    """An index as digits, where it is divided."""
    if place.op != "index":
        return place
    widths = bases(terms, place)
    return as_digits(place, widths) if widths else halves(terms, place) or place


class Sizes:
    """The symbols of the model before."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        side = pair.before
        self._known: dict[str, Term] = {}
        self._open: set[str] = set()
        self._execution = Execution(side.scope.facts, side.identity_of, {}, side.is_heavy, side.scope.opset, self.term)

    def term(self, name: str) -> Term:
        """The size of a symbol; the symbol itself, if that is not known."""
        if name not in self._known:
            if name in self._open:
                return self._symbol(name)
            self._open.add(name)
            self._known[name] = self._found(name)
            self._open.remove(name)
        return self._known[name]

    def _found(self, name: str) -> Term:
        alias = self._pair.aliases.get(name)
        if alias is not None:
            found = length_of(alias, self.term)
            if all(item.op != "size" or item.data != name for item in walk(found)):
                return found
        origin = self._pair.before.scope.facts.origins.get(name)
        if origin is None or name != f"{origin[0].name}.{origin[1]}":
            return self._symbol(name)
        return self._computed(*origin) or self._symbol(name)

    def named(self) -> dict[Term, Term]:
        """Quotients of which lengths of scores are made, as symbols: of these all that counts is that they are at least 1."""
        found: dict[Term, Term] = {}
        for dim in self._pair.divided:
            length = length_of(dim, self.term)
            parts = polynomial(length)
            quotients = [atoms for atoms, factor in parts.items() if len(atoms) == 1 and atoms[0].op == "div" and factor == 1]
            if len(quotients) == 1 and not any(quotients[0][0] in atoms for atoms in parts if atoms != quotients[0]):
                rest = subtract(length, quotients[0][0])
                found[quotients[0][0]] = subtract(size(str(dim), positive=True), rest)
        return found

    def _symbol(self, name: str) -> Term:
        return size(name, positive=name in self._pair.positive)

    def _computed(self, value: ir.Value, axis: int) -> Term | None:
        """The length of an axis as the node of the value computes it."""
        if value.producer() is None:
            return None
        try:
            shape = self._execution.array(value, beyond=True).shape
        except (Unsupported, RecursionError):
            return None
        return shape[axis] if axis < len(shape) else None
