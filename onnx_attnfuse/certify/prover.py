"""The proof that two elements are equal: sums by summands, softmaxes by scores, all else by obligations for a solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.forms import (
    bases,
    by_digits,
    condition_of,
    in_pairs,
    informed,
    instances,
    is_tangled,
    leaves,
    likely_keys,
    narrowed,
    outermost,
    sizes_in,
    sums_over_digits,
    weighed,
)
from onnx_attnfuse.certify.magnitudes import absorbed
from onnx_attnfuse.certify.softmaxes import is_masked, without_row
from onnx_attnfuse.certify.solvers import Obligation, obligation
from onnx_attnfuse.certify.sums import Weights, holds_weights, is_nothing
from onnx_attnfuse.certify.terms import (
    FALSE,
    TRUE,
    ZERO,
    Term,
    conjoin,
    disjoin,
    free,
    index,
    negate,
    number,
    polynomial,
    substitute,
    subtract,
    truth,
)
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.thresholds import ABSORBS, LEVELS_HALF

Facts = tuple[Term, ...]
_MAX_SPLITS = 12
_NO_SINK = 3
"""The parts of a softmax without a sink: an index, the score that it is read for, and the key."""


@dataclasses.dataclass
class _Row:
    """The scores of a row while they are compared."""

    key: Term
    """The index of the key."""
    shifts: list[Term] = dataclasses.field(default_factory=list[Term])
    """By how much they differ, case by case."""


Judge = Callable[[Obligation], bool]
"""Who says whether an obligation holds."""


@dataclasses.dataclass
class Prover:
    """Proofs of one claim; proved facts are in `shown`, others in `open`."""

    judge: Judge
    existing: Facts = ()
    """Facts implied by the existence of the compared element: its axes are not empty."""
    met: Facts = ()
    """Facts about lengths, as the model before runs; used where nothing else shows a claim."""
    weight: Weights = lambda _: None
    """The numbers of weights, by their names."""
    tolerance: float = 0.0
    """How much of their size rounding leaves where weights are compared by their numbers."""
    has_weighed: bool = False
    """Whether that was done."""
    is_half: bool = False
    """Whether numbers are of 16 bits."""
    assumed: set[AssumptionName] = dataclasses.field(default_factory=set[AssumptionName])
    """Assumptions of this claim alone."""
    shown: list[Obligation] = dataclasses.field(default_factory=list[Obligation])
    open: list[tuple[str, Obligation]] = dataclasses.field(default_factory=list[tuple[str, Obligation]])
    _row: _Row | None = None
    _count: int = 0
    _done: dict[tuple[Term, Term, Facts], bool] = dataclasses.field(default_factory=dict[tuple[Term, Term, Facts], bool])

    def valid(self, goal: Term, facts: Facts, what: str = "") -> bool:
        """Whether a truth value holds wherever the facts do; noted as open for the purpose `what`."""
        if goal is TRUE or FALSE in facts:
            return True
        given = instances((*self.existing, *facts) if goal is FALSE else facts, goal)
        asked = obligation(given, goal)
        if not is_tangled(goal) and self._shown(asked):
            return True
        if what:
            sizes = sizes_in(goal)
            met = [fact for fact in self.met if not sizes.isdisjoint(sizes_in(fact))]
            if met and self._shown(obligation([*given, *met], goal)):
                return True
            self.open.append((what, asked))
        return False

    def _shown(self, asked: Obligation) -> bool:
        """Whether an obligation holds; noted if it does."""
        if not self.judge(asked):
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
            if self._row is not None:
                self._row.shifts.append(number(0, one.sort))
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
        condition = condition_of(one) or condition_of(other)
        if condition is not None:
            return self._by_cases(condition, (one, other), facts, what, splits)
        if self._row is not None:
            return self._equal_but_for_a_shift(self._row, one, other, facts, what, splits)
        return self._equal_numbers(one, other, facts, what, splits)

    def _equal_numbers(self, one: Term, other: Term, facts: Facts, what: str, splits: int) -> bool:
        """Whether two numbers without a choice are equal."""
        merged = self._merged(one, other, facts)
        if one is merged or self._vanish(one, merged, facts, splits) or self._same_weights(one, merged):
            return True
        tried = len(self.open)
        if self.valid(arithmetic.equals(one, merged), facts, what):
            return True
        rewritten = sums_over_digits(one, other)
        if rewritten == (one, other) or not self._equal(*rewritten, facts, "", splits - 1):
            return False
        del self.open[tried:]
        return True

    def _same_weights(self, one: Term, other: Term) -> bool:
        """Whether two numbers differ in nothing but weights that are the same numbers."""
        difference = subtract(one, other)
        if not holds_weights(difference):
            return False
        self.has_weighed = True
        return is_nothing(difference, self.weight, self.tolerance)

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
            if self.valid(FALSE, assumed) or (holds and self._fails_at_a_key(condition, facts)):
                continue
            one, other = (substitute(item, {condition: truth(holds)}) for item in pair)
            if holds and condition.op == "all":
                one, other = (informed(item, condition) for item in (one, other))
            places = narrowed(condition, holds=holds)
            if places:
                one, other = substitute(one, places), substitute(other, places)
                assumed = tuple(substitute(fact, places) for fact in assumed)
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
        return substitute(other, places)

    def same(self, one: Term, other: Term, facts: Facts) -> bool:
        """Whether two sums, softmaxes or the like are equal."""
        key = (one, other, facts)
        if key not in self._done:
            outer, self._row = self._row, None
            self._done[key] = self._same(one, other, facts)
            self._row = outer
        return self._done[key]

    def _same(self, one: Term, other: Term, facts: Facts) -> bool:
        lengths = one.args[0].args[0], other.args[0].args[0]
        if not self._equal(*lengths, facts, "length", _MAX_SPLITS):
            return False
        self._count += 1
        bound = index(f"k{self._count}", lengths[0])
        bodies = [substitute(item.args[1], {item.args[0]: bound}) for item in (one, other)]
        if one.op == "softmax":
            others = one.args[_NO_SINK:]
            pairs = zip(one.args[2:], other.args[2:], strict=False)
            rest = len(one.args) == len(other.args) and all(self.equal(left, right, facts, "key") for left, right in pairs)
            scores = absorbed(bodies[0]), absorbed(bodies[1])
            return rest and self._alike(scores, None if others else bound, facts, "score")
        tried = len(self.open)
        if one.op == "sum" and self._same_attention(bodies, bound, facts):
            del self.open[tried:]
            return True
        if all(
            self.equal(substitute(bodies[0], places), substitute(bodies[1], places), facts, "summand")
            for places in by_digits(bound, bases(bodies, bound))
        ):
            del self.open[tried:]
            return True
        self._count += 1
        for pairs in in_pairs(bodies, bound, f"k{self._count}") if one.op == "sum" else ():
            if all(self.equal(*pair, facts, "summand of a pair") for pair in pairs):
                del self.open[tried:]
                return True
        return False

    def _same_attention(self, bodies: Sequence[Term], bound: Term, facts: Facts) -> bool:
        """Whether two sums of weighed values are equal where some key of the row takes part, key by key."""
        left, right = (weighed(body, bound) for body in bodies)
        if left is None or right is None:
            return False
        (first, values), (second, other_values) = left, right
        if len(first.args) != len(second.args):
            return False
        if any(item.args[0].args != bound.args for item in (first, second)):
            return self._same_over_more_keys(first, second, facts) and self.equal(values, other_values, facts, "value of a key")
        scores = [substitute(item.args[1], {item.args[0]: bound}) for item in (first, second)]
        if len(first.args) == _NO_SINK and self._are_level(scores, bound, facts):
            return self.equal(values, other_values, facts, "value of a key of a level row")
        masks = [is_masked(score) for score in scores]
        if not self._equivalent(masks[0], masks[1], facts, "mask"):
            return False
        seen = (*facts, negate(masks[0]))
        if not all(self.equal(*pair, facts, "sink") for pair in zip(first.args[3:], second.args[3:], strict=True)):
            return False
        shared = bound if len(first.args) == _NO_SINK else None
        if not self._alike((scores[0], scores[1]), shared, seen, "score of a key that is seen"):
            return False
        if not self.equal(values, other_values, seen, "value of a key that is seen"):
            return False
        if len(first.args) > _NO_SINK or self._sees_a_key(masks[0], bound, facts):
            return True
        return self._same_unseen(scores, masks[0], (values, other_values), bound, facts)

    def _same_over_more_keys(self, first: Term, second: Term, facts: Facts) -> bool:
        """Whether two softmaxes over more keys than are summed are equal; a sink may be a key without a value."""
        if first.args[0].args != second.args[0].args or first.args[2:] != second.args[2:]:
            return False
        scores = first.args[1], substitute(second.args[1], {second.args[0]: first.args[0]})
        return self.equal(*scores, facts, "score of a key")

    def _alike(self, scores: tuple[Term, Term], key: Term | None, facts: Facts, what: str) -> bool:
        """Whether scores are equal, or differ by one number for all keys of a row, which a softmax does not see.

        Args:
            scores: The score of a key, in both models.
            key: The index of the key; None where there is a sink, which the number would have to be added to.
            facts: Known facts.
            what: The name of the comparison.
        """
        if key is None:
            return self.equal(*scores, facts, what)
        outer, self._row = self._row, _Row(key)
        try:
            if not self._equal(*scores, facts, what, _MAX_SPLITS):
                return False
            shifts = self._row.shifts
        finally:
            self._row = outer
        return all(self.equal(shift, shifts[0], facts) for shift in shifts)

    def _equal_but_for_a_shift(self, row: _Row, one: Term, other: Term, facts: Facts, what: str, splits: int) -> bool:
        """Whether two scores are equal in one case, but for a term common to all keys of the row; that is noted."""
        kept = one, other
        if row.key in free(one) & free(other):
            kept = without_row(row.key, one), without_row(row.key, other)
        row.shifts.append(subtract(subtract(one, kept[0]), subtract(other, kept[1])))
        self._row = None
        try:
            return self._equal(*kept, facts, what, splits)
        finally:
            self._row = row

    def _same_unseen(self, scores: Sequence[Term], mask: Term, values: tuple[Term, Term], bound: Term, facts: Facts) -> bool:
        """Whether rows that see no key weigh all keys the same, or are alike."""
        unseen = (*facts, mask)
        every = arithmetic.every(bound, mask)
        row = (*facts, every)
        if not self.equal(*values, unseen, "value of a key that is not seen"):
            return False
        if self._are_level(scores, bound, row):
            return True
        if self.is_half and self._are_level(scores, bound, row, LEVELS_HALF):
            self.assumed.add("level-rows")
            return True
        return self.equal(absorbed(scores[0]), absorbed(scores[1]), (*row, mask), "score in a row that sees no key")

    def _are_level(self, scores: Sequence[Term], bound: Term, facts: Facts, largest: float = ABSORBS) -> bool:
        """Whether all keys of a row have one score, in both, where a number of `largest` or less leaves nothing of another."""
        return all(self._is_level(absorbed(score, largest), bound, facts) for score in scores)

    def _is_level(self, score: Term, bound: Term, facts: Facts) -> bool:
        parts = list(leaves(score, TRUE))
        if not any(leaf.op == "const" for leaf, _ in parts):
            return False
        found = {leaf for leaf, test in parts if not self.valid(negate(test), facts)}
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
        return any(self._takes_part(mask, bound, key, facts) for key in likely_keys(mask, bound))

    def _fails_at_a_key(self, condition: Term, facts: Facts) -> bool:
        """Whether a condition is one on all keys of a row, and one of those that come to mind does not meet it."""
        return condition.op == "all" and self._sees_a_key(condition.args[1], condition.args[0], facts)

    def _takes_part(self, mask: Term, bound: Term, key: Term, facts: Facts) -> bool:
        inside = conjoin(arithmetic.at_most(ZERO, key), arithmetic.below(key, bound.args[0]))
        return self.valid(conjoin(inside, negate(substitute(mask, {bound: key}))), facts)
