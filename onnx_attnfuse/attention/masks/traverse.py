"""Traversal of mask expressions: their parts, the index factors they use, the elements they read."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_attnfuse.attention.axes.factors import Factor
from onnx_attnfuse.attention.masks.expression import (
    And,
    Apply,
    Choice,
    Compare,
    Element,
    Expression,
    Index,
    Linear,
    NonZero,
    Not,
    Or,
)


def walk(part: Expression) -> Iterator[Index | Element]:
    """Every index variable and read element, also inside the places where elements are read."""
    if isinstance(part, Linear):
        for atom, _ in part.terms:
            yield atom
            if isinstance(atom, Element):
                yield from (inner for item in atom.at for inner in walk(item))
    elif isinstance(part, Element):
        yield part
        yield from (inner for item in part.at for inner in walk(item))
    else:
        for inner in parts_of(part):
            yield from walk(inner)


def parts_of(part: Expression) -> tuple[Expression, ...]:
    """What an expression is made of, index and element apart."""
    if isinstance(part, NonZero):
        return (part.element,)
    if isinstance(part, Compare):
        return (part.form,)
    if isinstance(part, Not):
        return (part.inner,)
    if isinstance(part, Choice):
        return part.condition, part.chosen, part.other
    if isinstance(part, Apply):
        return part.arguments
    return part.parts if isinstance(part, (And, Or)) else ()


def index_factors(part: Expression) -> set[Factor]:
    """The factors whose index decides."""
    return {atom.factor for atom in walk(part) if isinstance(atom, Index)}


def elements_of(part: Expression) -> list[Element]:
    """Every element that is read, also those that say where others are."""
    return [atom for atom in walk(part) if isinstance(atom, Element)]
