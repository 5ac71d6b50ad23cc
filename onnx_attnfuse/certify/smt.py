"""Obligations in SMT-LIB 2: the facts and the opposite of the goal, which is proved if no solver finds values for them.

Names are given in the order in which they occur, so that obligations that differ in names only are one text. Sums and softmaxes
are uninterpreted functions of their free indices: facts that hold for all such functions hold for these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from onnx_attnfuse.certify.terms import BINDERS, TRUE, Term, free

_OPERATORS: Mapping[str, str] = {
    "ite": "ite",
    "not": "not",
    "and": "and",
    "or": "or",
    "div": "div",
    "mod": "mod",
    "real": "to_real",
}
_TESTS: Mapping[str, str] = {"le0": "<=", "lt0": "<", "eq0": "="}


@dataclasses.dataclass(frozen=True)
class Obligation:
    """One obligation: `text` is unsatisfiable where the goal holds."""

    text: str
    names: Mapping[str, Term] = dataclasses.field(compare=False, repr=False)
    """The meaning of each name in the text: a size, an index, or one element."""


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Term] = {}
        self._known: dict[Term, str] = {}
        self._functions: dict[tuple[object, ...], str] = {}

    def write(self, term: Term) -> str:
        pending = [(term, False)]
        while pending:
            item, ready = pending.pop()
            if item in self._known:
                continue
            parts = self._parts(item)
            if ready or not parts:
                self._known[item] = self._written(item, parts)
                continue
            pending.append((item, True))
            pending.extend((part, False) for part in reversed(parts))
        return self._known[term]

    def _parts(self, term: Term) -> Sequence[Term]:
        """The terms that must be written before one; of a sum only the indices that are free in it."""
        if term.op in BINDERS:
            return sorted(free(term), key=lambda item: str(item.data))
        return term.args

    def _written(self, term: Term, parts: Sequence[Term]) -> str:
        if term.op == "const":
            return _constant(term)
        if term.op in {"size", "index", "ninf", "nan"}:
            return self._declared(term)
        names = [self._known[part] for part in parts]
        if term.op in {"element", "function", "times"} or term.op in BINDERS:
            key = (term.op, term.data) if term.op not in BINDERS else ("bound", term)
            return self._applied((*key, len(names)), term, parts, names)
        if term.op == "poly":
            return self._shared(_polynomial(term, names), term)
        if term.op == "group":
            return names[0]
        if term.op in _TESTS:
            zero = "0" if term.args[0].sort == "Int" else "0.0"
            return f"({_TESTS[term.op]} {names[0]} {zero})"
        return self._shared(f"({_OPERATORS[term.op]} {' '.join(names)})", term)

    def _shared(self, text: str, term: Term) -> str:
        if len(text) < 60:
            return text
        name = f"t{len(self._known)}"
        self.lines.append(f"(define-fun {name} () {term.sort} {text})")
        return name

    def _declared(self, term: Term) -> str:
        prefix = {"size": "n", "index": "i"}.get(term.op, "special")
        name = f"{prefix}{len(self.names)}"
        self.names[name] = term
        self.lines.append(f"(declare-const {name} {term.sort})")
        if term.op == "size":
            self.lines.append(f"(assert (<= {1 if term.args else 0} {name}))")
        if term.op == "index":
            self.lines.append(f"(assert (and (<= 0 {name}) (< {name} {self._known[term.args[0]]})))")
        return name

    def _applied(self, key: tuple[object, ...], term: Term, parts: Sequence[Term], names: Sequence[str]) -> str:
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = f"f{len(self._functions)}"
            sorts = " ".join(part.sort for part in parts)
            self.lines.append(f"(declare-fun {function} ({sorts}) {term.sort})")
        text = f"({function} {' '.join(names)})" if names else function
        self.names.setdefault(text, term)
        return self._shared(text, term)


def _constant(term: Term) -> str:
    if term.sort == "Bool":
        return "true" if term.data else "false"
    if term.sort == "Int":
        return str(term.data) if term.data >= 0 else f"(- {-term.data})"
    value = Fraction(term.data)
    text = f"{abs(value.numerator)}.0" if value.denominator == 1 else f"(/ {abs(value.numerator)}.0 {value.denominator}.0)"
    return text if value >= 0 else f"(- {text})"


def _polynomial(term: Term, names: Sequence[str]) -> str:
    from onnx_attnfuse.certify.terms import number

    place, items = 0, list[str]()
    for count, factor in term.data:
        parts = list(names[place : place + count])
        place += count
        if factor != 1 or not parts:
            parts.insert(0, _constant(number(factor, term.sort)))
        items.append(parts[0] if len(parts) == 1 else f"(* {' '.join(parts)})")
    return items[0] if len(items) == 1 else f"(+ {' '.join(items)})"


def obligation(facts: Iterable[Term], goal: Term) -> Obligation:
    """The obligation that `goal` holds wherever `facts` do."""
    writer = _Writer()
    asserted = [f"(assert {writer.write(fact)})" for fact in facts if fact is not TRUE]
    asserted.append(f"(assert (not {writer.write(goal)}))")
    text = "\n".join([*writer.lines, *asserted])
    return Obligation(text + "\n", writer.names)
