"""Proof that every row sees its own key, for masks such as documents, where it follows from the rule and not from its kind."""

from __future__ import annotations

from onnx_attnfuse.attention.axes.factors import Factor, leaves
from onnx_attnfuse.attention.masks.expression import (
    TRUE,
    And,
    Compare,
    Element,
    Expression,
    Index,
    Linear,
    NonZero,
    Not,
    Or,
    at_most_zero,
    combine,
    conjunction,
    constant,
    disjunction,
    index,
    is_zero,
    negation,
    scaled,
)
from onnx_attnfuse.attention.masks.fully_masked import implied
from onnx_attnfuse.attention.spec import AttentionSpec


def rows_see_themselves(allowed: Expression, spec: AttentionSpec, given: Expression = TRUE) -> bool:
    """Whether key i is certainly seen in row i, of as many keys as rows.

    Args:
        allowed: Where a key is seen.
        spec: The attention.
        given: Known facts about key i.
    """
    rows, keys = leaves(spec.query_axis), leaves(spec.key_axis)
    if [leaf.size for leaf in rows] != [leaf.size for leaf in keys]:
        return False
    places = dict(zip(keys, rows, strict=True))
    seen = _substituted(allowed, places)
    return seen == TRUE or implied(_substituted(given, places), seen)


def _substituted(part: Expression, places: dict[Factor, Factor]) -> Expression:
    """An expression with other index variables in it, simplified."""
    match part:
        case Linear(terms, offset):
            total = constant(offset)
            for atom, coefficient in terms:
                total = combine(total, scaled(_atom(atom, places), coefficient))
            return total
        case Element(value, at):
            return Element(value, tuple(_substituted(item, places) for item in at))
        case Compare(form, equal):
            inner = _substituted(form, places)
            assert isinstance(inner, Linear)
            return is_zero(inner) if equal else at_most_zero(inner)
        case NonZero(element):
            inner = _substituted(element, places)
            assert isinstance(inner, Element)
            return NonZero(inner)
        case Not(inner):
            return negation(_substituted(inner, places))
        case And(parts):
            return conjunction(_substituted(item, places) for item in parts)
        case Or(parts):
            return disjunction(_substituted(item, places) for item in parts)
        case _:
            return part


def _atom(atom: Index | Element, places: dict[Factor, Factor]) -> Linear:
    if isinstance(atom, Index):
        return index(places.get(atom.factor, atom.factor))
    inner = _substituted(atom, places)
    assert isinstance(inner, Element)
    return Linear(((inner, 1),))
