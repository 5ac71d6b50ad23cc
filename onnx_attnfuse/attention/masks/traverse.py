"""Traversal of mask expressions: their parts, the index factors they use, the elements they read."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks import expression as ex
from onnx_attnfuse.attention.masks.expression import Element, Expression, Index


def walk(part: Expression) -> Iterator[Index | Element]:
    """Every index variable and read element, also inside the places where elements are read."""
    match part:
        case ex.Linear(terms):
            for atom, _ in terms:
                if isinstance(atom, Element):
                    yield from walk(atom)
                else:
                    yield atom
        case Element(_, at):
            yield part
            yield from (inner for item in at for inner in walk(item))
        case _:
            yield from (inner for item in parts_of(part) for inner in walk(item))


def parts_of(part: Expression) -> tuple[Expression, ...]:
    """The operands of an expression; none for an index form, a read element, a number or a truth value."""
    match part:
        case ex.NonZero(inner) | ex.Compare(inner) | ex.Not(inner):
            return (inner,)
        case ex.Choice(condition, chosen, other):
            return condition, chosen, other
        case ex.Apply(_, parts) | ex.And(parts) | ex.Or(parts):
            return parts
        case _:
            return ()


def index_factors(part: Expression) -> set[Factor]:
    """The factors whose index decides."""
    return {atom.factor for atom in walk(part) if isinstance(atom, Index)}


def elements_of(part: Expression) -> list[Element]:
    """Every element that is read, also those that say where others are."""
    return [atom for atom in walk(part) if isinstance(atom, Element)]
