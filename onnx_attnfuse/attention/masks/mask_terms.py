"""Masks as terms of certificates: an element of a mask is a function of its place.

Integers are linear forms over indices and read elements, with sizes as factors, so that `j - i <= 0` looks the same however it
was written. Truth values have their negations inside: comparisons of such forms, read elements, `and` and `or`. Floats are
numbers, choices between numbers, and operators (`apply`) in the order in which they were written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves
from onnx_attnfuse.attention.masks.operators import branches, float_of, is_measure, is_nonzero
from onnx_attnfuse.certify import arithmetic, terms
from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.terms import ONE, TRUE, ZERO, Term, add, conjoin, make, multiply, number, subtract
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim, Size

_JOINED = frozenset(["and", "or"])
_OPERATORS = frozenset(["apply", "eq0", "ite", "le0", "not"])


class Name(str):
    """A name in terms that knows what it is of: the value that an element is read from, or the factor of an index."""

    of: Any

    def __new__(cls, text: str, of: ir.Value | ir.Node | Factor) -> Name:
        """A name by its text."""
        found = super().__new__(cls, text)
        found.of = of
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self.of is other.of

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.of)


def name_of(value: ir.Value) -> Name:
    """The name of a value in terms."""
    return Name(f"value {value.name}", value)


def value_of(element: Term) -> ir.Value:
    """The value that an element is read from.

    Raises:
        Unsupported: It is of none, as a place that only a run shows.
    """
    found = element.data.of if isinstance(element.data, Name) else None
    if not isinstance(found, ir.Value):
        raise Unsupported(f"the value of {element.data}")
    return found


def factor_of(index: Term) -> Factor:
    """The factor that an index runs over."""
    found: Factor = index.data.of
    return found


def element_of(value: ir.Value, at: Iterable[Term], dtype: ir.DataType | None) -> Term:
    """The element of a value at an index."""
    is_whole = dtype is not None and dtype.is_integer()
    return terms.element(name_of(value), "Bool" if dtype == ir.DataType.BOOL else "Int" if is_whole else "Real", at)


def index(factor: Factor) -> Term:
    """The index of a factor."""
    return terms.index(Name(f"x{factor.serial}", factor), size(factor.size))


def position(axis: Axis) -> Term:
    """The position along an axis, of the indices of its factors."""
    total = ZERO
    for factor in leaves(axis):
        total = add(multiply(total, size(factor.size)), index(factor))
    return total


def size(dim: Dim) -> Term:
    """A size as a term; one that is neither a symbol nor a sum is a measure of its own."""
    if isinstance(dim, int):
        return number(dim)
    result = number(dim.factor)
    for atom in dim.atoms:
        if atom.evaluate is sum:
            item = add(*map(size, atom.parts))
        else:
            item = terms.size(atom.key) if atom.evaluate is None else make("measure", "Int", (), atom)
        result = multiply(result, item)
    return result


def dim_of(term: Term) -> Dim:
    """The size that a term is."""
    if term.op == "size":
        return sizes.symbol(term.data)
    if term.op == "measure":
        return Size(1, (term.data,))
    if term.op == "div":
        return sizes.floor_quotient(*map(dim_of, term.args))
    total: Dim = 0
    for atoms, factor in terms.polynomial(term).items():
        total = total + sizes.product([int(factor), *map(dim_of, atoms)])
    return total


def linear(form: Term) -> tuple[Sequence[tuple[Term, Dim]], Dim]:
    """The indices and elements of a form, each with its factor, in an order that does not depend on the run; and the rest."""
    if "linear" not in form.memo:
        found: dict[Term, Dim] = {}
        rest: Dim = 0
        for atoms, factor in terms.polynomial(form).items():
            coefficient = sizes.product([int(factor), *(dim_of(atom) for atom in atoms if is_measure(atom))])
            places = [bare(atom) for atom in atoms if not is_measure(atom)]
            if places:
                found[places[0]] = found.get(places[0], 0) + coefficient
            else:
                rest = rest + coefficient
        form.memo["linear"] = [(atom, found[atom]) for atom in sorted(found, key=_rank) if found[atom] != 0], rest
    result: tuple[Sequence[tuple[Term, Dim]], Dim] = form.memo["linear"]
    return result


def _rank(atom: Term) -> tuple[bool, str, list[int]]:
    is_read = atom.op != "index"
    return is_read, str(atom.data) if is_read else "", sorted(factor.serial for factor in factors_of(atom))


def bare(term: Term) -> Term:
    """A number without its conversion from or to an integer."""
    return term.args[0] if term.op in {"real", "whole"} else term


def constant_of(term: Term) -> float | None:
    """The number that an integer or a float is, if it is known."""
    return float(term.data) if term.op == "const" and term.sort == "Int" else float_of(term)


def normal(term: Term) -> Term:
    """A term with negations of truth values inside, and without comparisons that others imply."""
    if "normal" not in term.memo:
        term.memo["normal"] = _normal(term)
        term.memo["normal"].memo["normal"] = term.memo["normal"]
    result: Term = term.memo["normal"]
    return result


def _normal(term: Term) -> Term:
    if term.op in _JOINED:
        return (conjoin if term.op == "and" else disjunction)(*map(normal, term.memo["written"]))
    if not term.args or term.op == "index":
        return term
    if term.op == "eq0":
        inner = normal(bare(term.args[0] if term.args[0].op == "apply" else term.memo["written"]))
        atoms = list(itertools.chain(*terms.polynomial(inner)))
        is_read = len(atoms) == len(terms.polynomial(inner)) == 1 and bare(atoms[0]).op == "element"
        return arithmetic.is_zero(bare(atoms[0]) if is_read else inner)
    args = tuple(map(normal, term.args))
    if term.op == "not":
        return negation(args[0])
    if term.op == "ite" and term.sort == "Bool":
        return disjunction(conjoin(args[0], args[1]), conjoin(negation(args[0]), args[2]))
    return term if args == term.args else terms.rebuilt(term, args)


def negation(part: Term) -> Term:
    """The opposite of a truth value, negations pushed inwards."""
    if part.op == "le0":
        return arithmetic.at_most_zero(subtract(ONE, part.args[0]))
    if part.op in _JOINED:
        return (disjunction if part.op == "and" else conjoin)(*map(negation, part.memo["written"]))
    return terms.negate(part)


def disjunction(*parts: Term) -> Term:
    """Any of `parts`, without those that imply others, and what holds wherever one of the others does not."""
    found = terms.disjoin(*parts)
    if found.op != "or":
        return found
    kept: tuple[Term, ...] = found.memo["written"]
    shorter = tuple(_where_others_fail(part, kept) for part in kept)
    if shorter != kept:
        return disjunction(*shorter)
    return terms.disjoin(*(part for part in kept if not any(_implies(part, other) for other in kept if other is not part)))


def _where_others_fail(part: Term, others: Sequence[Term]) -> Term:
    """`a or (not a and b)` is `a or b`: a part without what holds wherever one of the others does not."""
    if part.op != "and":
        return part
    failing = [negation(other) for other in others if is_comparison(other)]
    return conjoin(*(item for item in part.memo["written"] if not any(_implies(fails, item) for fails in failing)))


def is_comparison(part: Term) -> bool:
    """Whether a truth value is `form <= 0` or `form == 0`, and no read element."""
    return part.op == "le0" or (part.op == "eq0" and part.args[0].op not in {"element", "apply"})


def compared(part: Term) -> tuple[Sequence[tuple[Term, Dim]], Dim]:
    """The linear form that a comparison compares with 0, an equality's with the sign that it was written with."""
    return linear(part.args[0] if part.op == "le0" else part.memo["written"])


def _implies(one: Term, other: Term) -> bool:
    """Whether the second holds wherever the first does: it is the same, or a comparison of no more."""
    if one is other or one.op != "le0" or other.op != "le0":
        return one is other
    return arithmetic.at_most_zero(subtract(other.args[0], one.args[0])) is TRUE


def truth(part: Term) -> Term:
    """A number as a truth value: not zero."""
    return normal(is_nonzero(part))


def nonzero(part: Term) -> Term | None:
    """The element of which a truth value says that it is true, or not zero; None where it says something else."""
    if part.op == "not" and part.args[0].op == "eq0":
        part = part.args[0].args[0]
    elif part.sort != "Bool":
        return None
    return part if part.op == "element" else None


def conjuncts(part: Term) -> tuple[Term, ...]:
    """The truth values that all have to hold, in the order in which they were written."""
    found: tuple[Term, ...] = part.memo["written"] if part.op == "and" else (part,)
    return found


def zero_or(part: Term) -> float | None:
    """The one number that a number certainly is where it is not 0; 1 for a truth value, None if that is not known."""
    numbers = {1.0} if is_binary(part) else set(map(float_of, branches(part))) - {0.0}
    value = numbers.pop() if len(numbers) == 1 else None
    return value if value is not None and math.isfinite(value) else None


def is_binary(part: Term) -> bool:
    """Whether a number is certainly 0 or 1."""
    return all(branch.sort == "Bool" or constant_of(branch) in {0.0, 1.0} for branch in branches(part))


def parts_of(part: Term) -> tuple[Term, ...]:
    """The operands of a truth value or float; none for an index form, a read element, a number or true and false."""
    found: tuple[Term, ...] = part.memo["written"] if part.op in _JOINED else part.args if part.op in _OPERATORS else ()
    return found


def elements_of(part: Term) -> list[Term]:
    """Every element that is read, also those that say where others are."""
    if part.op in {"index", "const", "size"}:
        return []
    own, form = [part] if part.op == "element" else [], [atom for atom, _ in linear(part)[0]] if part.op == "poly" else part.args
    return [*own, *(inner for item in parts_of(part) or form for inner in elements_of(item))]


def factors_of(part: Term) -> set[Factor]:
    """The factors whose index decides."""
    return set(map(factor_of, terms.free(part)))
