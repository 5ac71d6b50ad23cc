"""Logarithms in formulas: of what is positive whatever the operands are, and exponentials of them."""

from __future__ import annotations

from onnx_attnfuse.certify.arrays import Array, Index, Unsupported, elementwise
from onnx_attnfuse.certify.meanings.elements import inverse
from onnx_attnfuse.certify.softmaxes import function, is_minus_infinity
from onnx_attnfuse.certify.terms import FALSE, Term, add, multiply, polynomial, subtract


def logarithm(data: Array) -> Array:
    """The logarithm of each element.

    Raises:
        Unsupported: An element may be 0 or less.
    """
    return elementwise([data], data.dtype, _logarithm)


def exponential(data: Array, plain: Array) -> Array:
    """The exponential of each element; a logarithm that is added or subtracted becomes a factor or a divisor.

    Args:
        data: What is exponentiated.
        plain: Its exponential, for elements without a logarithm.
    """

    def read(at: Index) -> Term:
        return _factors(data.at(*at)) or plain.at(*at)

    return Array(data.shape, data.dtype, read)


def _logarithm(term: Term) -> Term:
    if not _is_positive(term):
        raise Unsupported("a logarithm of what may be 0")
    return function("log", term)


def _is_positive(term: Term) -> bool:
    """Whether a number is positive: made of exponentials of numbers by sums and products alone. No axis of a formula is empty."""
    parts = polynomial(term)
    return bool(parts) and all(factor > 0 and all(map(_is_positive_atom, atoms)) for atoms, factor in parts.items())


def _is_positive_atom(atom: Term) -> bool:
    if atom.op == "sum":
        return _is_positive(atom.args[1])
    return atom.op == "function" and atom.data == "exp" and is_minus_infinity(atom.args[0]) is FALSE


def _factors(term: Term) -> Term | None:
    """exp(x ± log(y)) as exp(x) times or over y; None where there is no logarithm."""
    if term.sort != "Real":
        return None
    found = [
        (atoms[0], factor)
        for atoms, factor in polynomial(term).items()
        if len(atoms) == 1 and atoms[0].op == "function" and atoms[0].data == "log" and factor in {1, -1}
    ]
    if not found:
        return None
    rest = term
    for atom, factor in found:
        rest = subtract(rest, atom) if factor == 1 else add(rest, atom)
    result = function("exp", rest)
    for atom, factor in found:
        result = multiply(result, atom.args[0] if factor == 1 else inverse(atom.args[0]))
    return result
