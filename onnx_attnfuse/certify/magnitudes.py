"""How large numbers are: beside a number that masks, ordinary ones leave nothing in floats, and possible masks are left in."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.certify.terms import MASKLIKE, NINF, Number, Term, ite, number, polynomial
from onnx_attnfuse.graph.dtypes import integers
from onnx_attnfuse.graph.thresholds import ABSORBS, ORDINARY

_BEYOND = {ir.DataType.FLOAT: -3.4028235677973366e38, ir.DataType.FLOAT16: -65520.0, ir.DataType.BFLOAT16: -3.3961775292304601e38}
"""Numbers from here down are rounded to minus infinity."""
_WIDE = frozenset([ir.DataType.INT64, ir.DataType.INT32])
"""Integers that are taken not to overflow."""
_UNBOUNDED = frozenset(["exp", "pow", "log"])


def is_small(term: Term) -> bool:
    """Whether a real number is known to be no more than an ordinary score: made of activations, and of no mask, input or fill."""
    if "small" not in term.memo:
        term.memo["small"] = _is_small(term)
    return bool(term.memo["small"])


def _is_small(term: Term) -> bool:
    if term.op == "const":
        return abs(term.data) <= ORDINARY
    if term.op == "element":
        return not str(term.data).startswith(MASKLIKE)
    if term.op in {"real", "softmax"}:
        return True
    if term.op in {"sum", "max"}:
        return (term.op == "sum" and _is_product(term.args[1])) or is_small(term.args[1])
    if term.op == "ite":
        return all(map(is_small, term.args[1:]))
    if term.op == "poly":
        return all(are_small(atoms, factor) for atoms, factor in polynomial(term).items())
    return term.op in {"group", "function"} and term.data not in _UNBOUNDED and all(map(is_small, term.args))


def _is_product(body: Term) -> bool:
    """Whether the summands are made of products of arrays, as a score is: under `bounded-scores` it is no more than ordinary."""
    if body.op == "ite":
        return all(map(_is_product, body.args[1:]))
    arrays = ({"element", "ite"}.intersection(atom.op for atom in atoms) and len(atoms) > 1 for atoms in polynomial(body))
    return all(arrays) and all(abs(factor) <= ORDINARY for factor in polynomial(body).values())


def are_small(atoms: tuple[Term, ...], factor: Number) -> bool:
    """Whether a product is known to be no more than an ordinary score."""
    return abs(factor) <= ORDINARY and all(map(is_small, atoms))


def rest_is_small(term: Term) -> bool:
    """Whether all of a sum but its constant is known to be no more than an ordinary score."""
    if "rest is small" not in term.memo:
        term.memo["rest is small"] = all(are_small(atoms, factor) for atoms, factor in polynomial(term).items() if atoms)
    return bool(term.memo["rest is small"])


def absorbed(term: Term, largest: float = ABSORBS) -> Term:
    """A number to which one of `largest` or less was added, which leaves nothing of it, as that one."""
    if term.op == "ite":
        return ite(term.args[0], absorbed(term.args[1], largest), absorbed(term.args[2], largest))
    if term.op != "poly":
        return term
    lowest = polynomial(term).get((), 0)
    return number(lowest, "Real") if lowest <= largest and rest_is_small(term) else term


def as_float(term: Term, dtype: ir.DataType) -> Term:
    """A sum as floats have it: without ordinary numbers beside one that masks, and infinite below all numbers of the type."""
    if term.sort == "Int":
        return fitting(term, dtype)
    if term.sort != "Real":
        return term
    if term.op == "ite":
        return ite(term.args[0], as_float(term.args[1], dtype), as_float(term.args[2], dtype))
    found = absorbed(term)
    return NINF if found.op == "const" and is_below_all(found, dtype) else found


def is_below_all(term: Term, dtype: ir.DataType = ir.DataType.FLOAT) -> bool:
    """Whether a constant is minus infinity in a type."""
    return dtype in _BEYOND and term.data <= _BEYOND[dtype]


def fitting(term: Term, dtype: ir.DataType) -> Term:
    """An integer as a type of few bits, or without a sign, has it.

    Raises:
        ArithmeticError: It is no constant, so that it may be too large, or below 0.
    """
    if dtype in _WIDE or term.sort != "Int":
        return term
    if term.op == "ite":
        return ite(term.args[0], fitting(term.args[1], dtype), fitting(term.args[2], dtype))
    if term.op != "const":
        raise ArithmeticError(f"an integer that may not fit into {dtype}")
    lowest, most = integers(dtype)
    return number((int(term.data) - lowest) % (most - lowest + 1) + lowest)
