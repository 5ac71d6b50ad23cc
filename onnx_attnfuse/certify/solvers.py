"""The solvers that decide obligations: z3 and cvc5, both from PyPI, each asked by the same text."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from onnx_attnfuse.certify.smt import Obligation
from onnx_attnfuse.errors import MissingDependencyError, OptionError

Answer = Literal["unsat", "sat", "unknown"]
SolverName = Literal["z3", "cvc5"]
STEPS: Mapping[SolverName, int] = {"z3": 3_000_000, "cvc5": 300_000}
"""How much a solver may do for one obligation, in its own units: the same on every machine; about a second."""


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
