"""The lengths of the axes of an attention, where its operands may differ: a length of 1 at run time is repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim


def unify_lengths(
    query: IndexedValue, key: IndexedValue, value: IndexedValue, key_axis: Axis, channels: Axis, facts: Facts, *, enforced: bool
) -> None:
    """Gives each factor the length that the products of queries, keys and values come to.

    Summands of the scores do not count: their own lengths are repeated to these. A number does, as it is certain.

    Args:
        query: Queries as the product takes them.
        key: Keys likewise.
        value: Values likewise.
        key_axis: The positions of keys and values.
        channels: The channels of queries and keys, along which no product repeats.
        facts: Shapes; repeated lengths are recorded in them.
        enforced: There are as many columns as values, or the product fails; else one value serves for all.
    """
    columns, fixed = leaves(key_axis), set(leaves(channels))
    found: dict[Factor, list[Dim]] = {}
    for indexed in (query, key):
        for factor, dim in _lengths(indexed, facts):
            if factor not in fixed:
                found.setdefault(factor, []).append(dim)
    for factor, dim in _lengths(value, facts):
        if enforced and (factor,) == columns:
            _rename(factor, factor.size if isinstance(factor.size, int) else dim, [dim, *found.pop(factor, [])], facts)
            facts.enforce(dim, factor.size)
        else:
            found.setdefault(factor, []).append(dim)
    for factor, lengths in found.items():
        _rename(factor, _repeated(factor.size, lengths, facts), lengths, facts)


def _lengths(indexed: IndexedValue, facts: Facts) -> list[tuple[Factor, Dim]]:
    """The factors that have an axis of their own, each with its length."""
    pairs = zip(map(leaves, indexed.axes), facts.dims(indexed.value) or (), strict=False)
    return [(axis[0], dim) for axis, dim in pairs if len(axis) == 1]


def _rename(factor: Factor, size: Dim, lengths: Sequence[Dim], facts: Facts) -> None:
    """Gives a factor its length; lengths equal to one of its other lengths equal this one."""
    before, factor.size = factor.size, size
    if size != before or len(set(lengths)) > 1:
        met = {dim for length in (before, *lengths) for dim in facts.shorter(length)}
        for dim in (*met, *lengths):
            facts.spread(dim, size)


def _repeated(size: Dim, lengths: Sequence[Dim], facts: Facts) -> Dim:
    """The broadcast length of an axis that operands share; `size` itself where a view and not a product made it another."""
    if not any(facts.is_shorter(one, other) for one, other in itertools.permutations({size, *lengths}, 2)):
        return size
    different = [dim for place, dim in enumerate(lengths) if not any(facts.same(dim, other) for other in lengths[:place])]
    return sizes.broadcast([*different, *([size] if isinstance(size, int) else [])])


def wider(operands: Iterable[IndexedValue], key_axis: Axis, facts: Facts) -> tuple[tuple[Dim, Dim], ...]:
    """Lengths of the scores, each with the length that a mask or a factor has there, which repeats the scores if they are 1.

    Along the keys that cannot be: there are as many as values.
    """
    found: dict[tuple[Dim, Dim], None] = {}
    for indexed in operands:
        for dim, axis in zip(facts.dims(indexed.value) or (), indexed.axes, strict=False):
            if axis and leaves(axis) != leaves(key_axis) and facts.is_shorter(length(axis), dim):
                found[length(axis), dim] = None
    return tuple(found)
