"""Reads the element of a mask at index (b, n, i, j): executes the graph above the mask to a term.

The term becomes an expression over the index variables and the values that are read. It is exact, not a guess: it holds for
every index and size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.execution import MaskExecution
from onnx_attnfuse.attention.masks.expression import (
    Apply,
    Element,
    Expression,
    Index,
    Linear,
    NonZero,
    Not,
    Number,
    Truth,
    at_most_zero,
    choice,
    combine,
    conjunction,
    constant,
    disjunction,
    is_zero,
    negation,
    scaled,
)
from onnx_attnfuse.attention.masks.operators import float_of, is_measure
from onnx_attnfuse.attention.masks.traverse import index_factors
from onnx_attnfuse.certify import terms
from onnx_attnfuse.certify.arrays import Unsupported, sort_of
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import Term, polynomial
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim

At: TypeAlias = "tuple[Expression, ...]"
"""A place, one integer expression for each axis."""


class Reader:
    """Reads elements of values of one graph.

    Args:
        facts: Shapes, types and contents of its values.
        end: A value that is not looked into.
    """

    def __init__(self, facts: Facts, end: ir.Value | None = None) -> None:
        self.facts, self._end = facts, end
        self._known: dict[tuple[ir.Value, At], Expression] = {}
        self._runs: dict[frozenset[Dim], _Run] = {}

    def element(self, value: ir.Value, at: At) -> Expression:
        """The element of `value` at an index given as one integer expression per axis."""
        key = (value, at)
        if key not in self._known:
            present = frozenset(factor.size for item in at for factor in index_factors(item))
            if present not in self._runs:
                self._runs[present] = _Run(self.facts, present, self._end)
            self._known[key] = self._runs[present].read(value, at)
        return self._known[key]


class _Run:
    """One execution, with its terms as expressions."""

    def __init__(self, facts: Facts, present: frozenset[Dim], end: ir.Value | None) -> None:
        self._execution = MaskExecution(facts, present, end)
        self._facts = facts
        self._factors: dict[Term, Factor] = {}
        self._written: dict[Term, Expression] = {}

    def read(self, value: ir.Value, at: At) -> Expression:
        with aside():
            try:
                term = self._execution.array(value).at(*map(self._term, at))
            except Unsupported:
                return Element(value, at)
            return self._element(term) if term.op == "element" else self._expression(term)

    def _term(self, part: Expression) -> Term:
        """An index as a term."""
        match part:
            case Linear(forms, offset):
                total = self._execution.length(offset)
                for atom, coefficient in forms:
                    total = terms.add(total, terms.multiply(self._execution.length(coefficient), self._atom(atom)))
                return total
            case Element():
                return self._atom(part)
            case _:
                raise Unsupported("an index that is no form")

    def _atom(self, atom: Index | Element) -> Term:
        if isinstance(atom, Element):
            dtype = self._facts.dtype(atom.value)
            if dtype is None:
                raise Unsupported("an unknown element type")
            return terms.element(self._execution.name(atom.value), sort_of(dtype), map(self._term, atom.at))
        found = terms.index(f"x{atom.factor.serial}", self._execution.length(atom.factor.size))
        self._factors[found] = atom.factor
        return found

    def _expression(self, term: Term) -> Expression:
        if term not in self._written:
            self._written[term] = self._write(term)
        return self._written[term]

    def _write(self, term: Term) -> Expression:
        number = float_of(term)
        if number is not None:
            return Number(number)
        if term.sort == "Bool":
            return self._truth(term)
        match term.op:
            case "element":
                return self._element(term)
            case "real":
                return self._expression(term.args[0])
            case "apply":
                return Apply(term.data, tuple(map(self._expression, term.args)))
            case "ite":
                return choice(*map(self._expression, term.args))
            case _:
                return self._form(term)

    def _truth(self, term: Term) -> Expression:
        match term.op:
            case "element":
                return NonZero(self._element(term))
            case "apply":
                return Apply(term.data, tuple(map(self._expression, term.args)))
            case "ite":
                condition, then, other = map(self._expression, term.args)
                return disjunction([conjunction([condition, then]), conjunction([negation(condition), other])])
            case "not":
                return negation(self._expression(term.args[0]))
            case "and" | "or":
                return (conjunction if term.op == "and" else disjunction)(map(self._expression, term.memo["written"]))
            case "eq0":
                form = term.args[0]  # without the sign of the written term
                return self._is_zero(form if form.op == "apply" else term.memo["written"])
            case "le0":
                return at_most_zero(self._form(term.args[0]))
            case _:
                return Truth(term.data)

    def _is_zero(self, term: Term) -> Expression:
        if term.op == "apply":
            return Apply("Equal", (self._expression(term), Number(0.0)))
        return Not(NonZero(self._element(term))) if term.op == "element" else is_zero(self._form(term))

    def _element(self, term: Term) -> Element:
        return Element(self._execution.values[term.data], tuple(map(self._expression, term.args)))

    def _form(self, term: Term) -> Linear:
        parts: list[tuple[list[int], Linear]] = []
        for atoms, factor in polynomial(term).items():
            coefficient: Dim = int(factor)
            item = constant(1)
            for atom in atoms:
                if is_measure(atom):
                    coefficient = coefficient * self._size(atom)
                elif atom.op == "index":
                    item = Linear(((Index(self._factors[atom]), 1),))
                else:
                    item = Linear(((self._element(atom.args[0] if atom.op == "whole" else atom), 1),))
            parts.append((self._order(atoms), scaled(item, coefficient)))
        return functools.reduce(combine, (part for _, part in sorted(parts, key=operator.itemgetter(0))), constant(0))

    def _order(self, atoms: Sequence[Term]) -> list[int]:
        """A stable key of monomials of elements of one value: the order of the indices that they are read at."""
        return sorted(self._factors[item].serial for atom in atoms for item in terms.free(atom))

    def _size(self, term: Term) -> Dim:
        if term.op == "size":
            return sizes.symbol(term.data)
        if term.op == "measure":
            return self._execution.measures[term.data]
        if term.op == "div":
            return sizes.floor_quotient(*map(self._size, term.args))
        total: Dim = 0
        for atoms, factor in polynomial(term).items():
            total = total + sizes.product([int(factor), *map(self._size, atoms)])
        return total
