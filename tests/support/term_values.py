"""The numbers that terms come to: a plain evaluator, to hold symbolic meanings against ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnx_attnfuse.certify.terms import Term

_FUNCTIONS = {
    "sqrt": math.sqrt, "exp": math.exp, "tanh": math.tanh, "log": math.log, "sin": math.sin, "cos": math.cos, "pow": math.pow,
    "inverse": lambda value: 1 / value, "floor": math.floor, "ceil": math.ceil, "erf": math.erf,
    "softplus": lambda value: math.log1p(math.exp(value)),
    "relu": lambda value: max(value, 0),
    "sigmoid": lambda value: 1 / (1 + math.exp(-value)),
}  # fmt: skip


class Values:
    """Values of sizes by their names, and of arrays by theirs."""

    def __init__(self, sizes: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
        self._sizes, self._arrays = sizes, arrays

    def of(self, term: Term, places: Mapping[Term, int] | None = None) -> Any:
        """The value of a term, with values for its free indices."""
        return self._of(term, dict(places or {}), {})

    def _of(self, term: Term, places: dict[Term, int], known: dict[Term, Any]) -> Any:
        if term not in known:
            known[term] = self._computed(term, places, known)
        return known[term]

    def _computed(self, term: Term, places: dict[Term, int], known: dict[Term, Any]) -> Any:
        if term.op == "const":
            return term.data if term.sort != "Real" else float(term.data)
        if term.op in {"ninf", "nan"}:
            return -math.inf if term.op == "ninf" else math.nan
        if term.op == "size":
            return self._sizes[term.data]
        if term.op == "index":
            return places[term]
        if term.op == "ite":
            return self._of(term.args[1 if self._of(term.args[0], places, known) else 2], places, known)
        if term.op in {"sum", "all", "max", "softmax"}:
            return self._over(term, places, known)
        values = [self._of(item, places, known) for item in term.args]
        return self._simple(term, values)

    def _simple(self, term: Term, values: list[Any]) -> Any:
        if term.op == "poly":
            place, total = 0, 0
            for count, factor in term.data:
                total += (float(factor) if term.sort == "Real" else factor) * math.prod(values[place : place + count])
                place += count
            return total
        if term.op == "element":
            value = self._arrays[term.data][tuple(values)]
            return value.item()
        if term.op == "function":
            return _FUNCTIONS[term.data](*values)
        if term.op == "times":
            return values[0] * values[1]
        simple = {
            "div": lambda: values[0] // values[1], "mod": lambda: values[0] % values[1], "not": lambda: not values[0],
            "and": lambda: all(values), "or": lambda: any(values), "le0": lambda: values[0] <= 0, "lt0": lambda: values[0] < 0,
            "eq0": lambda: values[0] == 0, "real": lambda: float(values[0]), "group": lambda: values[0],
        }  # fmt: skip
        return simple[term.op]()

    def _over(self, term: Term, places: dict[Term, int], known: dict[Term, Any]) -> Any:
        bound, body, *others = term.args
        count = self._of(bound.args[0], places, known)
        items = [self._of(body, {**places, bound: value}, {}) for value in range(count)]
        if term.op == "sum":
            return sum(items)
        if term.op in {"all", "max"}:
            return all(items) if term.op == "all" else max(items)
        more = [self._of(item, places, known) for item in others]
        top = max([*items, *more[1:]])
        total = sum(math.exp(item - top) for item in [*items, *more[1:]])
        return math.exp(items[more[0]] - top) / total
