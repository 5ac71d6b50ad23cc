"""Integer arithmetic on terms: quotients, remainders and comparisons, simplified by facts about sizes and indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from onnx_attnfuse.certify.interned import PROOF
from onnx_attnfuse.certify.magnitudes import absorbed, rest_is_small
from onnx_attnfuse.certify.terms import (
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Number,
    Polynomial,
    Term,
    add,
    bind,
    conjoin,
    disjoin,
    free,
    from_polynomial,
    ite,
    make,
    multiply,
    negate,
    number,
    polynomial,
    size,
    subtract,
    truth,
)
from onnx_attnfuse.graph.thresholds import MASKS_ANY_SCORE

_MAX_STEPS = 24


def is_nonnegative(term: Term) -> bool:
    """Whether an integer is shown to be at least 0 by its form: sizes are, and an index is below its length."""
    if "nonnegative" not in term.memo:
        term.memo["nonnegative"] = _is_nonnegative(term, _MAX_STEPS)
    if term.memo["nonnegative"] and term.op != "const":
        PROOF.noted[term] = None
    return bool(term.memo["nonnegative"])


def name(quotients: Mapping[Term, Term]) -> None:
    """Has quotients be called otherwise from here on; without any, no more."""
    PROOF.names.update(quotients)
    if not quotients:
        PROOF.names.clear()


def taken(earlier: Iterable[Term] = ()) -> tuple[Term, ...]:
    """The integers that were taken to be at least 0 since `noted` was asked, and those that something earlier rests on."""
    PROOF.noted.update(dict.fromkeys(earlier))
    return tuple(PROOF.noted)


def noted() -> list[Term]:
    """The integers that were taken to be at least 0 since this was asked before: side conditions of simplifications."""
    found = [make("le0", "Bool", (multiply(number(-1), term),)) for term in PROOF.noted]
    PROOF.noted.clear()
    return found


def _is_nonnegative(term: Term, steps: int) -> bool:
    parts = polynomial(term)
    if all(factor >= 0 and all(map(_is_natural, atoms)) for atoms, factor in parts.items()):
        return True
    if steps == 0:
        return False
    for atom in sorted({atom for atoms in parts for atom in atoms}):
        if atom.op == "size" and atom.args:
            return _is_nonnegative(_with(parts, atom, add(size(atom.data), ONE)), steps - 1)
        if atom.op == "ite":
            return all(_is_nonnegative(_with(parts, atom, part), steps - 1) for part in atom.args[1:])
    for atom in sorted({atom for atoms in parts for atom in atoms}):
        upper = _upper(atom)
        if upper is None:
            continue
        slope = _slope(parts, atom)
        if slope is None:
            continue
        if _is_nonnegative(slope, steps - 1):
            return _is_nonnegative(_with(parts, atom, ZERO), steps - 1)
        if _is_nonnegative(multiply(number(-1), slope), steps - 1):
            return _is_nonnegative(_with(parts, atom, upper), steps - 1)
    return False


def _is_natural(atom: Term) -> bool:
    if atom.op in {"size", "index"}:
        return True
    if atom.op in {"div", "mod"}:
        return is_nonnegative(atom.args[0]) and is_nonnegative(atom.args[1])
    return atom.op == "ite" and all(map(is_nonnegative, atom.args[1:]))


def _upper(atom: Term) -> Term | None:
    """The largest that an index or a remainder can be."""
    if atom.op == "index":
        return subtract(atom.args[0], ONE)
    if atom.op == "mod" and _is_natural(atom):
        return subtract(atom.args[1], ONE)
    if atom.op == "div" and atom.args[0].op == "index" and atom.args[1].op == "const" and atom.args[1].data > 0:
        return divide(subtract(atom.args[0].args[0], ONE), atom.args[1])
    return None


def _slope(parts: Polynomial, atom: Term) -> Term | None:
    """The factor of an atom that occurs once in each of its monomials."""
    found: dict[tuple[Term, ...], Number] = {}
    for atoms, factor in parts.items():
        if atom in atoms:
            rest = list(atoms)
            rest.remove(atom)
            if atom in rest:
                return None
            found[tuple(rest)] = factor
    return from_polynomial(found, "Int")


def _with(parts: Polynomial, atom: Term, value: Term) -> Term:
    total = ZERO
    for atoms, factor in parts.items():
        item = number(factor)
        for part in atoms:
            item = multiply(item, value if part is atom else part)
        total = add(total, item)
    return total


def exact_quotient(term: Term, divisor: Term) -> Term | None:
    """The quotient where the division leaves nothing, whatever the sizes; None elsewhere."""
    quotient, rest = _split(term, divisor)
    return quotient if rest is ZERO else None


def _split(term: Term, divisor: Term) -> tuple[Term, Term]:
    """A term as quotient · divisor + rest, with as much in the quotient as comes out even."""
    lead, *_ = sorted(polynomial(divisor).items(), key=lambda item: (-len(item[0]), [atom.digest for atom in item[0]])) or [
        ((), 0)
    ]
    quotient, rest = ZERO, term
    for _ in range(_MAX_STEPS):
        found = _even(rest, lead)
        if found is None:
            return quotient, rest
        quotient, rest = add(quotient, found), subtract(rest, multiply(found, divisor))
    return ZERO, term


def _even(term: Term, lead: tuple[tuple[Term, ...], Number]) -> Term | None:
    wanted, times = lead
    for atoms, factor in polynomial(term).items():
        if not times or factor % times:
            continue
        rest = list(atoms)
        if all(_taken(rest, atom) for atom in wanted):
            return from_polynomial({tuple(rest): factor // times}, "Int")
    return None


def _taken(rest: list[Term], atom: Term) -> bool:
    if atom not in rest:
        return False
    rest.remove(atom)
    return True


def _parts(term: Term, divisor: Term) -> tuple[Term, Term, bool]:
    """Quotient and rest, and whether the rest is known to be a remainder."""
    quotient, rest = _split(term, divisor)
    if divisor.op == "const" and divisor.data > 0:  # a number in the rest is at least 0 and below the divisor
        whole = number(polynomial(rest).get((), 0) // divisor.data)
        quotient, rest = add(quotient, whole), subtract(rest, multiply(whole, divisor))
    if rest is ZERO:  # a division by 0 has no value in the model before either
        return quotient, rest, True
    for first, second in ((quotient, rest), (ZERO, term)):
        if is_nonnegative(second) and is_nonnegative(subtract(subtract(divisor, second), ONE)):
            return first, second, True
    return (quotient, rest, False) if is_nonnegative(subtract(divisor, ONE)) else (ZERO, term, False)


def divide(term: Term, divisor: Term) -> Term:
    """The quotient of integers, rounded down; of a positive divisor."""
    if divisor is ONE:
        return term
    if term.op == "const" and divisor.op == "const" and divisor.data:
        return number(term.data // divisor.data)
    quotient, rest, known = _parts(term, divisor)
    if known:
        return quotient
    whole = _whole(term, divisor)
    if whole is not None:
        return divide(*whole)
    if rest.op == "div" and is_nonnegative(rest.args[1]) and is_nonnegative(divisor):
        return add(quotient, divide(rest.args[0], multiply(rest.args[1], divisor)))
    found = make("div", "Int", (rest, divisor))
    return add(quotient, PROOF.names.get(found, found))


def _whole(term: Term, divisor: Term) -> tuple[Term, Term] | None:
    """Term and divisor without a number that both are divided by, of which the term leaves a rest."""
    parts = polynomial(divisor)
    if len(parts) != 1 or divisor.op == "const":
        return None
    ((atoms, factor),) = parts.items()
    if factor <= 1:
        return None
    quotient, _, known = _parts(term, number(factor))
    return (quotient, from_polynomial({atoms: 1}, "Int")) if known else None


def modulo(term: Term, divisor: Term) -> Term:
    """The remainder of integers, of the divisor's sign."""
    if term.op == "const" and divisor.op == "const" and divisor.data:
        return number(term.data % divisor.data)
    _, rest, known = _parts(term, divisor)
    if known or divisor is ONE:
        return ZERO if divisor is ONE else rest
    if rest.op == "mod" and exact_quotient(rest.args[1], divisor) is not None and is_nonnegative(divisor):
        return modulo(rest.args[0], divisor)
    return make("mod", "Int", (rest, divisor))


def at_most_zero(term: Term) -> Term:
    """Whether a number is at most 0."""
    if term.op == "const":
        return truth(term.data <= 0)
    if term.sort == "Int":
        if is_nonnegative(multiply(number(-1), term)):
            return TRUE
        if is_nonnegative(subtract(term, ONE)):
            return FALSE
        term = _without_common(term)
    if term.sort == "Real" and abs(polynomial(term).get((), 0)) >= -MASKS_ANY_SCORE and rest_is_small(term):
        return truth(polynomial(term)[()] < 0)
    if term.op == "real" or (term.op == "sum" and _is_count(term.args[1])):
        return is_zero(term) if term.op == "sum" else at_most_zero(term.args[0])
    lifted = _lifted(term, at_most_zero)
    return make("le0", "Bool", (term,)) if lifted is None else lifted


def _without_common(term: Term) -> Term:
    """An integer that is at most 0 where another is: divided by what all its factors but the number are multiples of."""
    parts = polynomial(term)
    common = math.gcd(*(int(factor) for atoms, factor in parts.items() if atoms))
    return term if common < 2 else from_polynomial({atoms: -(-int(factor) // common) for atoms, factor in parts.items()}, "Int")


def below_zero(term: Term) -> Term:
    """Whether a number is below 0."""
    if term.sort == "Int":
        return at_most_zero(add(term, ONE))
    if term.op == "const":
        return truth(term.data < 0)
    parts = polynomial(term)
    if term.sort == "Real" and abs(parts.get((), 0)) >= -MASKS_ANY_SCORE and rest_is_small(term):
        return truth(parts[()] < 0)
    if len(parts) == 1:  # a negative count, as in 0 < count
        ((atoms, factor),) = parts.items()
        if len(atoms) == 1 and factor < 0 and atoms[0].op in {"sum", "real"}:
            return negate(at_most_zero(atoms[0]))
    lifted = _lifted(term, below_zero)
    return make("lt0", "Bool", (term,)) if lifted is None else lifted


def is_zero(term: Term) -> Term:
    """Whether a number is 0."""
    if term.op == "const":
        return truth(term.data == 0)
    if term.sort == "Int" and (is_nonnegative(subtract(term, ONE)) or is_nonnegative(subtract(multiply(number(-1), term), ONE))):
        return FALSE
    if term.op == "real":
        return is_zero(term.args[0])
    if term.op == "sum" and _is_count(term.args[1]):
        return every(term.args[0], is_zero(term.args[1]))
    lifted = _lifted(term, is_zero)
    if lifted is not None:
        return lifted
    lead = min(polynomial(term).items(), key=lambda item: [atom.digest for atom in item[0]])
    found = make("eq0", "Bool", (term if lead[1] > 0 else multiply(number(-1, term.sort), term),))
    found.memo.setdefault("written", term)
    return found


def _is_count(body: Term) -> bool:
    """Whether summands are choices between constants of which none is negative."""
    if body.op == "ite":
        return all(map(_is_count, body.args[1:]))
    return body.op == "const" and body.data >= 0


def _lifted(term: Term, ask: Callable[[Term], Term]) -> Term | None:
    """The answer drawn into a choice between constants; None if the term is none."""
    if term.op == "ite" and term.sort == "Real":
        return ite(term.args[0], ask(term.args[1]), ask(term.args[2]))
    parts = polynomial(term)
    choices = [atoms[0] for atoms in parts if len(atoms) == 1 and atoms[0].op == "ite"]
    if len(choices) != 1 or any(choices[0] in atoms for atoms in parts if len(atoms) > 1):
        return None
    factor = number(parts[choices[0],], term.sort)
    rest = from_polynomial({atoms: times for atoms, times in parts.items() if atoms != (choices[0],)}, term.sort)
    condition, then, other = choices[0].args
    if term.sort == "Int" and ask is at_most_zero:
        extreme = _extreme(condition, then, other)
        if extreme is not None:
            both = ask(add(multiply(factor, then), rest)), ask(add(multiply(factor, other), rest))
            return conjoin(*both) if (factor.data > 0) == (extreme is larger) else disjoin(*both)
    return ite(condition, ask(add(multiply(factor, then), rest)), ask(add(multiply(factor, other), rest)))


def _extreme(condition: Term, then: Term, other: Term) -> Callable[[Term, Term], Term] | None:
    """`larger` or `smaller`, if a choice between integers is that of both; None elsewhere."""
    if condition.op != "le0" or condition.args[0].sort != "Int":
        return None
    for gap, extreme in ((subtract(then, other), smaller), (subtract(other, then), larger)):
        if at_most_zero(gap) is condition or at_most_zero(add(gap, ONE)) is condition:
            return extreme
    return None


def at_most(left: Term, right: Term) -> Term:
    """Whether one number is at most the other."""
    return _compared(left, right, at_most_zero, equal=True)


def below(left: Term, right: Term) -> Term:
    """Whether one number is below the other."""
    return _compared(left, right, below_zero, equal=False)


def _compared(left: Term, right: Term, ask: Callable[[Term], Term], *, equal: bool) -> Term:
    for one, other, first in ((left, right, True), (right, left, False)):
        if one.op == "ite" and _is_special(one):
            pairs = [(part, other) if first else (other, part) for part in one.args[1:]]
            return ite(one.args[0], *(_compared(*pair, ask, equal=equal) for pair in pairs))
    if "nan" in {left.op, right.op}:
        return FALSE
    if left.op == "ninf":
        return truth(equal) if right.op == "ninf" else TRUE
    return FALSE if right.op == "ninf" else ask(_difference(left, right))


def _is_special(term: Term) -> bool:
    """Whether minus infinity or no number is in a choice."""
    return term.op in {"ninf", "nan"} or (term.op == "ite" and any(map(_is_special, term.args[1:])))


def equals(left: Term, right: Term) -> Term:
    """Whether two terms of one sort are equal; minus infinity equals itself, NaN does not."""
    if left.sort == "Bool":
        return conjoin(negate(conjoin(left, negate(right))), negate(conjoin(negate(left), right)))
    for one, other in ((left, right), (right, left)):
        if one.op == "ite" and _is_special(one):
            return ite(one.args[0], equals(one.args[1], other), equals(one.args[2], other))
    if {"nan", "ninf"} & {left.op, right.op}:
        return truth(left is right and left.op == "ninf")
    return is_zero(_difference(left, right))


def _difference(left: Term, right: Term) -> Term:
    """The difference that a comparison holds against 0, of real numbers as floats have them."""
    return subtract(absorbed(left), absorbed(right)) if left.sort == "Real" else subtract(left, right)


def larger(left: Term, right: Term) -> Term:
    """The larger of two numbers."""
    return ite(at_most(left, right), right, left)


def smaller(left: Term, right: Term) -> Term:
    """The smaller of two numbers."""
    return ite(at_most(left, right), left, right)


def every(bound: Term, body: Term) -> Term:
    """Whether something holds for all values of an index."""
    if body is TRUE:
        return TRUE
    if bound not in free(body):
        return disjoin(body, at_most_zero(bound.args[0]))
    return bind("all", bound, body, "Bool")
