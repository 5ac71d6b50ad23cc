"""Values computed from weights alone are known: two terms may be equal by the numbers that both models hold.

A bias that was moved after a product, columns that were cut out of a weight, biases that were put one after the other: the
difference of the two terms is a sum of products, and its part in weights is 0 at every index, but for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_attnfuse.certify.terms import WEIGHT, Number, Polynomial, Term, free, from_polynomial, polynomial, walk

_MOST = 1 << 24
"""Numbers that are held at a time."""
_MOST_AT_ALL = 1 << 27
"""Numbers that are computed for one comparison."""
_OPERATORS = frozenset(["const", "poly", "index", "element", "sum", "div", "mod"])

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
