"""Rearranging axes by an einops expression, `b s (n h) -> b n s h`, on the factors of `axes`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Factor
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_NAME = re.compile(r"[a-zA-Z_]\w*")


def rearranged(builder: Builder, value: ir.Value, expression: str, given: Mapping[str, int]) -> ir.Value:
    """`value` with its axes rearranged.

    Raises:
        OptionError: The expression cannot be read.
        Refused: The shape of `value` does not fit it.
    """
    left, right = _sides(expression)
    dims = builder.facts.dims(value)
    if dims is None or len(dims) != len(left):
        raise Refused("unknown-rank", f"'{value.name}' is not known to have the {len(left)} axes of '{expression}'")
    lengths: dict[str, Dim] = dict(given)
    for group, dim in zip(left, dims, strict=True):
        _settle(group, dim, lengths, expression)
    factors = {name: Factor(lengths[name]) for group in left for name in group}
    for group in right:
        for name in group:
            if name not in factors:
                if name not in given:
                    raise OptionError(f"'{expression}' repeats along {name}, which has no length; give {name}=")
                factors[name] = Factor(given[name])
    source, target = (_laid(side, factors) for side in (left, right))
    return arrange(builder, IndexedValue(value, source), target)


def _laid(side: list[list[str]], factors: Mapping[str, Factor]) -> Axes:
    return tuple(tuple(factors[name] for name in group) for group in side)


def _sides(expression: str) -> tuple[list[list[str]], list[list[str]]]:
    left, arrow, right = expression.partition("->")
    sides = [[(inner or outer).split() for inner, outer in _GROUP.findall(side)] for side in (left, right)]
    sides = [[[name for name in group if name != "1"] for group in side] for side in sides]
    names = [[name for group in side for name in group] for side in sides]
    odd = [name for side in names for name in side if not _NAME.fullmatch(name)]
    if not arrow or odd or any(len(set(side)) < len(side) for side in names) or set(names[0]) - set(names[1]):
        raise OptionError(f"{expression!r} is no rearrangement; write each axis once on both sides, as in 'b s (n h) -> b n s h'")
    return sides[0], sides[1]


def _settle(group: list[str], dim: Dim, lengths: dict[str, Dim], expression: str) -> None:
    """The lengths of the factors of one axis, of which one may be open."""
    unknown = [name for name in group if name not in lengths]
    rest: Dim | None = dim
    for name in group:
        if name in lengths and rest is not None:
            rest = sizes.exact_quotient(rest, lengths[name])
    if len(unknown) > 1 or rest is None or (not unknown and rest != 1):
        raise Refused("unknown-heads", f"an axis of length {dim} is not known to be ({' '.join(group)}) of '{expression}'")
    if unknown:
        lengths[unknown[0]] = rest
