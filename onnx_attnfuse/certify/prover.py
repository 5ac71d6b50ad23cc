"""The proof that two elements are equal: sums by summands, softmaxes by scores, all else by obligations for a solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from onnx_attnfuse.certify import arithmetic, digits
from onnx_attnfuse.certify.magnitudes import absorbed
from onnx_attnfuse.certify.scores import is_masked
from onnx_attnfuse.certify.smt import Obligation, obligation
from onnx_attnfuse.certify.statements import informed, instances, outermost
from onnx_attnfuse.certify.terms import (
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Term,
    add,
    conjoin,
    disjoin,
    free,
    from_polynomial,
    index,
    negate,
    number,
    polynomial,
    substitute,
    subtract,
    truth,
    walk,
)

Facts = tuple[Term, ...]
_MAX_SPLITS = 12
_MAX_CASES = 8
_MAX_PRODUCTS = 6


class Judge(Protocol):
    """Who says whether an obligation holds."""

    def holds(self, asked: Obligation) -> bool:
        """Whether it does."""
        ...


@dataclasses.dataclass
class Prover:
    """Proofs of one claim; what was shown is in `shown`, what was not in `open`."""

    judge: Judge
    existing: Facts = ()
    """What is so because there is an element to compare: its axes are not empty."""
    met: Facts = ()
    """What is so of lengths because the model before runs; told where nothing else shows a claim."""
    shown: list[Obligation] = dataclasses.field(default_factory=list[Obligation])
    open: list[tuple[str, Obligation]] = dataclasses.field(default_factory=list[tuple[str, Obligation]])
    _count: int = 0
    _done: dict[tuple[Term, Term, Facts], bool] = dataclasses.field(default_factory=dict[tuple[Term, Term, Facts], bool])

    def valid(self, goal: Term, facts: Facts, what: str = "") -> bool:
        """Whether a truth value holds wherever the facts do; noted as open where `what` says what it is for."""
        if goal is TRUE or FALSE in facts:
            return True
        given = instances((*self.existing, *facts) if goal is FALSE else facts, goal)
        asked = obligation(given, goal)
        if not _is_tangled(goal) and self._shown(asked):
            return True
        if what:
            sizes = _sizes(goal)
            met = [fact for fact in self.met if not sizes.isdisjoint(_sizes(fact))]
            if met and self._shown(obligation([*given, *met], goal)):
                return True
            self.open.append((what, asked))
        return False

    def _shown(self, asked: Obligation) -> bool:
        """Whether an obligation holds; noted if it does."""
        if not self.judge.holds(asked):
            return False
        self.shown.append(asked)
        return True

    def equal(self, one: Term, other: Term, facts: Facts, what: str = "value") -> bool:
        """Whether two terms are equal wherever the facts hold."""
        key = (one, other, facts)
        if key not in self._done:
            self._done[key] = self._equal(one, other, facts, what, _MAX_SPLITS)
        return self._done[key]

    def _equal(self, one: Term, other: Term, facts: Facts, what: str, splits: int) -> bool:
        if one is other:
            return True
        if one.sort != other.sort or splits == 0:
            return False
        if one.sort == "Bool":
            return self._equivalent(one, other, facts, what)
        for first, second, turned in ((one, other, False), (other, one, True)):
            if first.op == "ite":
                return self._split(first, second, facts, what, splits, turned=turned)
        if {"ninf", "nan"} & {one.op, other.op}:
            return self.valid(FALSE, facts, what)
        condition = _condition(one) or _condition(other)
        if condition is not None:
            return self._by_cases(condition, (one, other), facts, what, splits)
        merged = self._merged(one, other, facts)
        if one is merged or self._vanish(one, merged, facts, splits):
            return True
        return self.valid(arithmetic.equals(one, merged), facts, what)

    def _vanish(self, one: Term, other: Term, facts: Facts, splits: int) -> bool:
        """Whether one is 0, and the other is made of sums of nothing but zeros."""
        for zero, sums in ((one, other), (other, one)):
            if (
                zero.op == "const"
                and not zero.data
                and all(any(atom.op == "sum" for atom in atoms) for atoms in polynomial(sums))
            ):
                return all(self._is_nothing(atoms, facts, splits) for atoms in polynomial(sums))
        return False

    def _is_nothing(self, atoms: tuple[Term, ...], facts: Facts, splits: int) -> bool:
        for atom in atoms:
            if atom.op == "sum":
                self._count += 1
                bound = index(f"k{self._count}", atom.args[0].args[0])
                body = substitute(atom.args[1], {atom.args[0]: bound})
                if self._equal(body, number(0, body.sort), facts, "", splits - 1):
                    return True
        return False

    def _split(self, choice: Term, other: Term, facts: Facts, what: str, splits: int, *, turned: bool) -> bool:
        """Equality by the cases of a choice; the second's condition is decided by the first's where it can be."""
        condition = choice.args[0]
        for test, part in ((condition, choice.args[1]), (negate(condition), choice.args[2])):
            if test in facts:
                return self._equal(*((other, part) if turned else (part, other)), facts, what, splits - 1)
        if other.op == "ite" and other.args[0] is not condition and self._equivalent(condition, other.args[0], facts, ""):
            other = substitute(other, {other.args[0]: condition})
        return self._by_cases(condition, (other, choice) if turned else (choice, other), facts, what, splits)

    def _by_cases(self, condition: Term, pair: tuple[Term, Term], facts: Facts, what: str, splits: int) -> bool:
        """Equality where a condition holds, and where it does not."""
        for holds in (True, False):
            assumed = (*facts, condition if holds else negate(condition))
            if self.valid(FALSE, assumed):
                continue
            one, other = (substitute(item, {condition: truth(holds)}) for item in pair)
            if holds and condition.op == "all":
                one, other = (informed(item, condition) for item in (one, other))
            narrowed = _narrowed(condition, holds=holds)
            if narrowed:
                one, other = substitute(one, narrowed), substitute(other, narrowed)
                assumed = tuple(substitute(fact, narrowed) for fact in assumed)
            if not self._equal(one, other, assumed, what, splits - 1):
                return False
        return True

    def _equivalent(self, one: Term, other: Term, facts: Facts, what: str) -> bool:
        merged = self._merged(one, other, facts)
        return one is merged or self.valid(arithmetic.equals(one, merged), facts, what)

    def _merged(self, one: Term, other: Term, facts: Facts) -> Term:
        """The second term with its sums replaced by those of the first that are equal."""
        places: dict[Term, Term] = {}
        candidates = list(outermost(one))
        for item in outermost(other):
            if item in candidates:
                continue
            for candidate in candidates:
                if candidate.op == item.op and candidate.sort == item.sort and self.same(candidate, item, facts):
                    places[item] = candidate
                    break
        return _replaced(other, places)

    def same(self, one: Term, other: Term, facts: Facts) -> bool:
        """Whether two sums, softmaxes or the like are equal."""
        key = (one, other, facts)
        if key not in self._done:
            self._done[key] = self._same(one, other, facts)
        return self._done[key]

    def _same(self, one: Term, other: Term, facts: Facts) -> bool:
        lengths = one.args[0].args[0], other.args[0].args[0]
        if not self._equal(*lengths, facts, "length", _MAX_SPLITS):
            return False
        self._count += 1
        bound = index(f"k{self._count}", lengths[0])
        bodies = [substitute(item.args[1], {item.args[0]: bound}) for item in (one, other)]
        if one.op == "softmax":
            others = zip(one.args[2:], other.args[2:], strict=False)
            rest = len(one.args) == len(other.args) and all(self.equal(left, right, facts, "key") for left, right in others)
            return rest and self.equal(absorbed(bodies[0]), absorbed(bodies[1]), facts, "score")
        tried = len(self.open)
        if one.op == "sum" and self._same_attention(bodies, bound, facts):
            del self.open[tried:]
            return True
        if all(
            self.equal(substitute(bodies[0], places), substitute(bodies[1], places), facts, "summand")
            for places in digits.cases(bound, digits.bases(bodies, bound))
        ):
            del self.open[tried:]
            return True
        return False

    def _same_attention(self, bodies: Sequence[Term], bound: Term, facts: Facts) -> bool:
        """Whether two sums of weighed values are equal where some key of the row takes part, key by key."""
        left, right = (_weighed(body, bound) for body in bodies)
        if left is None or right is None:
            return False
        (first, values), (second, other_values) = left, right
        if len(first.args) != len(second.args):
            return False
        scores = [substitute(item.args[1], {item.args[0]: bound}) for item in (first, second)]
        if len(first.args) == 3 and self._are_level(scores, bound, facts):
            return self.equal(values, other_values, facts, "value of a key of a level row")
        masks = [is_masked(score) for score in scores]
        if not self._equivalent(masks[0], masks[1], facts, "mask"):
            return False
        seen = (*facts, negate(masks[0]))
        if not all(self.equal(*pair, facts, "sink") for pair in zip(first.args[3:], second.args[3:], strict=True)):
            return False
        if not self.equal(scores[0], scores[1], seen, "score of a key that is seen"):
            return False
        if not self.equal(values, other_values, seen, "value of a key that is seen"):
            return False
        if len(first.args) > 3 or self._sees_a_key(masks[0], bound, facts):
            return True
        return self._same_unseen(scores, masks[0], (values, other_values), bound, facts)

    def _same_unseen(self, scores: Sequence[Term], mask: Term, values: tuple[Term, Term], bound: Term, facts: Facts) -> bool:
        """Whether rows that see no key weigh all keys the same, or are alike."""
        unseen = (*facts, mask)
        every = arithmetic.every(bound, mask)
        row = (*facts, every)
        if not self.equal(*values, unseen, "value of a key that is not seen"):
            return False
        if self._are_level(scores, bound, row):
            return True
        return self.equal(absorbed(scores[0]), absorbed(scores[1]), (*row, mask), "score in a row that sees no key")

    def _are_level(self, scores: Sequence[Term], bound: Term, facts: Facts) -> bool:
        """Whether all keys of a row have one score, in both."""
        return all(self._is_level(absorbed(score), bound, facts) for score in scores)

    def _is_level(self, score: Term, bound: Term, facts: Facts) -> bool:
        leaves = list(_leaves(score, TRUE))
        if not any(leaf.op == "const" for leaf, _ in leaves):
            return False
        found = {leaf for leaf, test in leaves if not self.valid(negate(test), facts)}
        return len(found) == 1 and not any(bound in free(leaf) or leaf.op in {"ninf", "nan"} for leaf in found)

    def _sees_a_key(self, mask: Term, bound: Term, facts: Facts) -> bool:
        """Whether a key takes part: because a fact says so, or because one of those that come to mind does."""
        if mask is FALSE:
            return True
        for fact in facts:
            if fact.op == "not" and fact.args[0].op == "all":
                every = fact.args[0]
                if self._equal(bound.args[0], every.args[0].args[0], facts, "", _MAX_SPLITS):
                    body = substitute(every.args[1], {every.args[0]: bound})
                    if self.valid(disjoin(negate(mask), body), facts):
                        return True
        return any(self._takes_part(mask, bound, key, facts) for key in _keys(mask, bound))

    def _takes_part(self, mask: Term, bound: Term, key: Term, facts: Facts) -> bool:
        inside = conjoin(arithmetic.at_most(ZERO, key), arithmetic.below(key, bound.args[0]))
        return self.valid(conjoin(inside, negate(substitute(mask, {bound: key}))), facts)


def _sizes(term: Term) -> set[Term]:
    return {item for item in walk(term) if item.op == "size"}


def _is_tangled(goal: Term) -> bool:
    """Whether a goal is an equality of so many products of reals that solvers find no end, whatever their limits."""
    if goal.op != "eq0" or goal.args[0].sort != "Real":
        return False
    return sum(len(atoms) > 1 for atoms in polynomial(goal.args[0])) > _MAX_PRODUCTS


def _keys(mask: Term, bound: Term) -> Iterator[Term]:
    """Keys that a row probably sees: its own, counted from either end, and the first and the last."""
    length = bound.args[0]
    yield ZERO
    yield subtract(length, ONE)
    for item in sorted(free(mask) - {bound}, key=lambda item: str(item.data)):
        yield item
        yield subtract(add(item, length), item.args[0])


def _narrowed(condition: Term, *, holds: bool) -> dict[Term, Term]:
    """An index that is compared with a size, as one from 0 to the size, or from there to its end."""
    if condition.op != "le0":
        return {}
    for item in sorted(free(condition), key=lambda item: str(item.data)):
        if item.args[0].op == "const" and item.args[0].data <= _MAX_CASES:
            values = range(item.args[0].data)
            left = [value for value in values if substitute(condition, {item: number(value)}) is not truth(not holds)]
            if left and len(left) < len(values) and left == list(range(left[0], left[-1] + 1)):
                rest = index(f"{item.data}n", number(len(left)))
                return {item: number(left[0]) if len(left) == 1 else add(number(left[0]), rest)}
    parts = polynomial(condition.args[0])
    for (item, *others), factor in ((atoms, factor) for atoms, factor in parts.items() if atoms):
        if others or item.op != "index" or abs(factor) != 1:
            continue
        rest = from_polynomial({atoms: times for atoms, times in parts.items() if atoms != (item,)}, "Int")
        if free(rest) or item in free(rest):
            continue
        is_low = (factor > 0) == holds
        edge = subtract(ONE, rest) if factor > 0 else rest
        if is_low:
            return {item: index(f"{item.data}l", edge)}
        return {item: add(edge, index(f"{item.data}h", subtract(item.args[0], edge)))}
    return {}


def _condition(term: Term) -> Term | None:
    """The condition of a choice in a sum, a product or a function; None if there is none."""
    if term.sort == "Bool":
        return None
    found: list[Term] = []
    pending = [atom for atoms in polynomial(term) for atom in atoms]
    while pending:
        atom = pending.pop()
        if atom.op == "ite":
            found.append(atom.args[0])
        elif atom.op == "function":
            pending += [part for item in atom.args for atoms in polynomial(item) for part in atoms]
    return min(found) if found else None


def _leaves(term: Term, test: Term) -> Iterator[tuple[Term, Term]]:
    if term.op == "ite":
        yield from _leaves(term.args[1], conjoin(test, term.args[0]))
        yield from _leaves(term.args[2], conjoin(test, negate(term.args[0])))
    else:
        yield term, test


def _replaced(term: Term, places: dict[Term, Term]) -> Term:
    return substitute(term, places) if places else term


def _weighed(body: Term, bound: Term) -> tuple[Term, Term] | None:
    """A softmax at an index, and what it is multiplied by; None if the summand is no such product."""
    found = [item for item in outermost(body) if item.op == "softmax" and item.args[2] is bound]
    if len(found) != 1 or not _is_linear(body, found[0]):
        return None
    nothing = substitute(body, {found[0]: number(0, "Real")})
    if nothing.op != "const" or nothing.data:
        return None
    return found[0], substitute(body, {found[0]: number(1, "Real")})


def _is_linear(term: Term, atom: Term) -> bool:
    """Whether a term is linear in an atom, which stands in no sum and in no condition."""
    if term is atom:
        return True
    if term.op == "ite":
        return not _has(term.args[0], atom) and all(_is_linear(part, atom) or not _has(part, atom) for part in term.args[1:])
    if term.op != "poly":
        return not _has(term, atom)
    for atoms in polynomial(term):
        parts = [item for item in atoms if _has(item, atom)]
        if len(parts) > 1 or not all(_is_linear(item, atom) for item in parts):
            return False
    return True


def _has(term: Term, atom: Term) -> bool:
    return any(item is atom for item in walk(term))
