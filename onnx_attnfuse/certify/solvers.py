"""Obligations in SMT-LIB 2, and the solvers that decide them: z3 and cvc5, both from PyPI, each asked by the same text.

An obligation is the facts and the opposite of the goal, which is proved if no solver finds values for them. Names are given in
the order in which they occur, so that obligations that differ in names only are one text. Sums and softmaxes are uninterpreted
functions of their free indices: facts that hold for all such functions hold for these.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from onnx_attnfuse.certify.terms import BINDERS, TRUE, Term, free, number
from onnx_attnfuse.errors import MissingDependencyError, OptionError

Answer = Literal["unsat", "sat", "unknown"]
SolverName = Literal["z3", "cvc5"]
STEPS: Mapping[SolverName, int] = {"z3": 3_000_000, "cvc5": 300_000}
"""How much a solver may do for one obligation, in its own units: the same on every machine; about a second."""
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


@dataclasses.dataclass(eq=False)
class Solver:
    """A solver with its earlier answers, by text."""

    name: SolverName = "z3"
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(SolverName):
            raise OptionError(f"there is no solver {self.name!r}; choose {' or '.join(get_args(SolverName))}")
        try:
            self._module: Any = importlib.import_module(self.name)
        except ImportError as error:
            raise MissingDependencyError(f"{self.name} is not installed; run pip install 'onnx-attnfuse[proof]'") from error
        self._limit = STEPS[self.name] if self.steps is None else self.steps
        self._answers: dict[str, Answer] = {}
        self._context: Any = None
        """Of z3: all that it needs, made once, as that takes longer than most obligations."""

    def decide(self, text: str) -> Answer:
        """Whether there are values for which all assertions of the text hold."""
        found = self._answers.get(text)
        if found is None:
            found = self._answers[text] = self._z3(text) if self.name == "z3" else self._cvc5(text)
        return found

    def proves(self, asked: Obligation) -> bool:
        """Whether an obligation holds, as far as the solver can say."""
        return self.decide(asked.text) == "unsat"

    def values(self, text: str, wanted: list[str]) -> dict[str, int] | None:
        """Values of integer constants for which all assertions hold; None if z3 finds none."""
        z3: Any = self._module if self.name == "z3" else importlib.import_module("z3")
        context = z3.Context()
        solver = z3.Solver(ctx=context)
        solver.set("rlimit", STEPS["z3"])
        solver.set("smt.arith.nl.grobner", False)
        solver.from_string(text)
        if solver.check() != z3.sat:
            return None
        model = solver.model()
        found = {str(item.name()): model[item] for item in model.decls() if item.arity() == 0 and str(item.name()) in wanted}
        return {name: value.as_long() for name, value in found.items() if z3.is_int_value(value)}

    def _z3(self, text: str) -> Answer:
        z3 = self._module
        if self._context is None:
            self._context = z3.Context()
        answer: Answer = self._z3_in(self._context, text)
        return self._z3_in(z3.Context(), text) if answer == "unknown" else answer  # where a limit is met, nothing before counts

    def _z3_in(self, context: Any, text: str) -> Answer:
        z3 = self._module
        solver = z3.Solver(ctx=context)
        solver.set("rlimit", self._limit)
        solver.set("smt.arith.nl.grobner", False)  # which counts no steps, and may go on for hours
        solver.from_string(text)
        answer = solver.check()
        return "unsat" if answer == z3.unsat else "sat" if answer == z3.sat else "unknown"

    def _cvc5(self, text: str) -> Answer:
        cvc5 = self._module
        manager = cvc5.TermManager()
        solver = cvc5.Solver(manager)
        solver.setLogic("ALL")
        solver.setOption("rlimit-per", str(self._limit))
        parser = cvc5.InputParser(solver)
        parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "obligation")
        symbols = parser.getSymbolManager()
        while True:
            command = parser.nextCommand()
            if command.isNull():
                break
            command.invoke(solver, symbols)
        answer = solver.checkSat()
        return "unsat" if answer.isUnsat() else "sat" if answer.isSat() else "unknown"


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
