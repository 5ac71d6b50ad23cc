"""Sums over an index, in a normal form; and numbers made of weights alone, which are known.

Two terms may be equal by the numbers that both models hold. A bias that was moved after a product, columns that were cut out of a
weight, biases that were put one after the other: the difference of the two terms is a sum of products, and its part in weights is
0 at every index, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_attnfuse.certify.terms import (
    ONE,
    WEIGHT,
    ZERO,
    Number,
    Polynomial,
    Sort,
    Term,
    add,
    bind,
    free,
    from_polynomial,
    ite,
    multiply,
    number,
    polynomial,
    substitute,
    to_real,
    walk,
)

_MOST = 1 << 24
"""Numbers that are held at a time."""
_MOST_AT_ALL = 1 << 27
"""Numbers that are computed for one comparison."""
_OPERATORS = frozenset(["const", "poly", "index", "element", "sum", "div", "mod"])


def total(bound: Term, body: Term) -> Term:
    """The sum over an index; factors that do not depend on it are in front, and choices that do not are around."""
    if body.op in {"nan", "ninf"}:
        return body
    sort: Sort = body.sort
    parts = polynomial(body)
    for atom in sorted({atom for atoms in parts for atom in atoms if atom.op == "ite" and bound not in free(atom.args[0])}):
        return ite(atom.args[0], *(total(bound, substitute(body, {atom: part})) for part in atom.args[1:]))
    if not parts:
        return body
    if bound.args[0] is ONE:
        return substitute(body, {bound: ZERO})
    if len(parts) == 1:
        ((atoms, factor),) = parts.items()
        outside = tuple(atom for atom in atoms if bound not in free(atom))
        inside = tuple(atom for atom in atoms if bound in free(atom))
        front = from_polynomial({outside: factor}, sort)
        if len(inside) == 1 and _is_weight_of_key(inside[0], bound):
            return front
        if not inside:
            return multiply(front, bound.args[0] if sort == "Int" else to_real(bound.args[0]))
        return multiply(front, bind("sum", bound, from_polynomial({inside: 1}, sort), sort))
    groups = _groups(bound, parts) if sort == "Real" else [parts]
    if len(groups) > 1:
        return add(*(total(bound, from_polynomial(group, sort)) for group in groups))
    found = bind("sum", bound, body, sort)
    named, parts = found.args[0], polynomial(found.args[1])
    lead = parts[min(parts, key=lambda atoms: [atom.digest for atom in atoms])]  # whatever the index was called
    if sort == "Real" and lead != 1:
        scaled = from_polynomial({atoms: Fraction(factor) / Fraction(lead) for atoms, factor in parts.items()}, sort)
        return multiply(number(lead, sort), bind("sum", named, scaled, sort))
    return found


def _groups(bound: Term, parts: Polynomial) -> list[Polynomial]:
    """Summands that are summed together: those made of weights, each that all keys of a row share, and all others."""
    weights: Polynomial = {atoms: factor for atoms, factor in parts.items() if all(map(is_of_weights, atoms))}
    shared = [{atoms: factor} for atoms, factor in parts.items() if _is_shared(atoms, bound)]
    alone = {atoms for group in (weights, *shared) for atoms in group}
    rest: Polynomial = {atoms: factor for atoms, factor in parts.items() if atoms not in alone}
    return [group for group in (weights, *shared, rest) if group]


def _is_shared(atoms: tuple[Term, ...], bound: Term) -> bool:
    """Whether a product is the weight of a key, times a factor that does not depend on the key."""
    inside = [atom for atom in atoms if bound in free(atom)]
    return len(inside) == 1 and _is_weight_of_key(inside[0], bound)


def _is_weight_of_key(atom: Term, bound: Term) -> bool:
    """Whether an element is the weight of a key in a softmax without a sink; over all keys these come to 1."""
    if atom.op != "softmax" or len(atom.args) != 3 or bound in free(atom.args[1]):
        return False
    return atom.args[2] is bound and atom.args[0].args[0] is bound.args[0]


Numbers = npt.NDArray[Any]
Places = Mapping[Term, Numbers]
"""The numbers of indices, each along an axis of its own."""
Weights = Callable[[str], Numbers | None]
"""The numbers of a weight, by its name in terms."""


def is_of_weights(term: Term) -> bool:
    """Whether a real number is made of the elements of weights, at indices of known lengths, and of constants."""
    if "of weights" not in term.memo:
        parts = list(walk(term))
        term.memo["of weights"] = (
            term.sort == "Real"
            and all(item.op in _OPERATORS for item in parts)
            and all(str(item.data).startswith(WEIGHT) for item in parts if item.op == "element")
            and all(item.args[0].op == "const" for item in parts if item.op == "index")
        )
    return bool(term.memo["of weights"])


def holds_weights(term: Term) -> bool:
    """Whether a real number has a part of its own that is made of weights."""
    if term.sort != "Real":
        return False
    return any(atom.op != "const" and is_of_weights(atom) for atoms in polynomial(term) for atom in atoms)


def is_nothing(difference: Term, weights: Weights, tolerance: float) -> bool:
    """Whether a number is 0 whatever else is in it, as its part in weights is 0 at each index.

    Args:
        difference: The number.
        weights: The weights.
        tolerance: How much of the size of their summands rounding may leave.
    """
    factors = _factors(difference)
    if any(set(own) == {()} for own in factors.values()):
        return False
    try:
        return all(_vanishes(from_polynomial(own, "Real"), weights, tolerance) for own in factors.values())
    except LookupError:
        return False


def _factors(term: Term) -> Mapping[tuple[Term, ...], Polynomial]:
    """The factor of weights and constants that each product of other things has."""
    found: dict[tuple[Term, ...], dict[tuple[Term, ...], Number]] = {}
    for atoms, factor in polynomial(term).items():
        own = tuple(atom for atom in atoms if is_of_weights(atom))
        rest = tuple(atom for atom in atoms if not is_of_weights(atom))
        group = found.setdefault(rest, {})
        group[own] = group.get(own, 0) + factor
    return found


def _vanishes(term: Term, weights: Weights, tolerance: float) -> bool:
    """Whether a number made of weights is 0 at every index.

    Raises:
        LookupError: An index lies outside of a weight, or there are too many numbers.
    """
    computed, sizes = _Computed(weights), _Computed(weights, sizes=True)
    for places in _grids(term):
        if bool((np.abs(computed.of(term, places)) > tolerance * sizes.of(term, places)).any()):
            return False
    return True


def _grids(term: Term) -> Iterator[dict[Term, Numbers]]:
    """The numbers of the free indices of a term, the longest index cut so that the computation fits.

    Raises:
        LookupError: There are too many.
    """
    indices = sorted(free(term), key=lambda item: (-item.args[0].data, str(item.data)))
    lengths = [int(item.args[0].data) for item in indices]
    inner = max((_inner(atom) for atoms in polynomial(term) for atom in atoms), default=1)
    each = math.prod(lengths[1:]) * inner
    if math.prod(lengths) * inner > _MOST_AT_ALL or each > _MOST:
        raise LookupError("too many numbers")
    if not indices:
        yield {}
        return
    step = max(1, _MOST // max(each, 1))
    rest = {item: np.arange(length) for item, length in zip(indices[1:], lengths[1:], strict=True)}
    for start in range(0, lengths[0], step):
        yield {indices[0]: np.arange(start, min(start + step, lengths[0])), **rest}


def _inner(term: Term) -> int:
    """How many numbers are summed for one of a term."""
    if term.op == "sum":
        return int(term.args[0].args[0].data) * _inner(term.args[1])
    return max((_inner(item) for item in term.args if item.sort == "Real"), default=1)


class _Computed:
    """Terms as numbers; with `sizes` the sizes of all summands are added, to bound the rounding error."""

    def __init__(self, weights: Weights, *, sizes: bool = False) -> None:
        self._weights, self._size = weights, np.abs if sizes else np.positive

    def of(self, term: Term, places: Places) -> Numbers:
        """A term at all places, an axis for each index.

        Raises:
            LookupError: An index lies outside of a weight.
        """
        axes = {item: values.reshape([-1 if place == axis else 1 for axis in range(len(places))])
                for place, (item, values) in enumerate(places.items())}  # fmt: skip
        return np.asarray(self._of(term, axes), np.float64)

    def _of(self, term: Term, places: Places) -> Numbers:
        if term.op == "const":
            return self._size(np.asarray(float(term.data) if term.sort == "Real" else int(term.data)))
        if term.op == "index":
            return places[term]
        if term.op == "poly":
            total = np.zeros((1,) * len(places)) if term.sort == "Real" else np.zeros((1,) * len(places), np.int64)
            for atoms, factor in polynomial(term).items():
                item = np.asarray(float(factor) if term.sort == "Real" else int(factor))
                item = self._size(item) if term.sort == "Real" else item
                for atom in atoms:
                    item = item * self._of(atom, places)
                total = total + item
            return total
        if term.op == "sum":
            return self._summed(term, places)
        if term.op in {"div", "mod"}:
            left, right = (self._of(item, places) for item in term.args)
            return left // right if term.op == "div" else left % right
        return self._element(term, places)

    def _summed(self, term: Term, places: Places) -> Numbers:
        bound, body = term.args
        inner = {item: values[..., np.newaxis] for item, values in places.items()}
        inner[bound] = np.arange(int(bound.args[0].data)).reshape([1] * len(places) + [-1])
        found = self._of(body, inner)
        if found.shape[-1:] == (1,):
            return found[..., 0] * int(bound.args[0].data)
        return found.sum(axis=-1)

    def _element(self, term: Term, places: Places) -> Numbers:
        array = self._weights(str(term.data))
        at = [np.asarray(self._of(item, places), np.int64) for item in term.args]
        if array is None or len(at) != array.ndim:
            raise LookupError(str(term.data))
        if any(bool(((item < 0) | (item >= length)).any()) for item, length in zip(at, array.shape, strict=True)):
            raise LookupError(f"outside of {term.data}")
        return self._size(array[tuple(at)])
