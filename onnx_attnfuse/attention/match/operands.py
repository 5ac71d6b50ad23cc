"""Operands as views of other values, and the result as others view it: the places where a fused operator may be connected.

Keys and values may be appended to those of earlier positions: `present = concat(past, new)` along the keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, is_short, uncast, upward
from onnx_attnfuse.attention.match.rotary import read_rotary
from onnx_attnfuse.attention.spec import Cache, Rotary, Source, Table
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given, has_unknown_attribute, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32, HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import origin, viewers

_MAX_VIEW_CHAIN = 24
"""Views are followed this far; longer chains do not occur and would only cost time."""


def sources(operand: IndexedValue, facts: Facts, channels: Axis = (), *, plain: bool = False) -> tuple[Source, ...]:
    """The operand and everything it is a view of, nearest first.

    Args:
        operand: The operand.
        facts: Shapes of the graph.
        channels: The channels that queries and keys may be rotated in; none for values.
        plain: Stop where it is multiplied; else factors that are plain numbers are gathered on the way.
    """
    found = [Source(operand)]
    while len(found) < _MAX_VIEW_CHAIN:
        further = _further(found[-1], facts, channels, plain=plain)
        if further is None:
            break
        found.append(further)
    return tuple(found)


def _further(source: Source, facts: Facts, channels: Axis, *, plain: bool) -> Source | None:
    """The source one step further up: after a view, or after a scaling or rotation that a fused operator can do itself."""
    if is_short(source.indexed, facts):
        return None
    view = upward(source.indexed, facts, selecting=True) or _widened(source.indexed, facts)
    if view is not None:
        return dataclasses.replace(source, indexed=view)
    return (None if plain else _scaled(source, facts)) or _rotated(source, facts, channels)


def _rotated(source: Source, facts: Facts, channels: Axis) -> Source | None:
    """The source that a rotary embedding rotates, with that embedding; None if `source` has one already."""
    if source.rotary is not None or not channels:
        return None
    found = read_rotary(source.indexed, channels, facts) or read_rotary_node(source.indexed, channels, facts)
    return None if found is None else dataclasses.replace(source, indexed=found[0], rotary=found[1])


def _widened(indexed: IndexedValue, facts: Facts) -> IndexedValue | None:
    """The half-precision value that was cast to float32, which loses nothing."""
    narrow = origin(indexed.value, "Cast")
    if narrow is None or facts.dtype(indexed.value) != ir.DataType.FLOAT or facts.dtype(narrow) not in HALVES:
        return None
    return IndexedValue(narrow, indexed.axes)


def _scaled(source: Source, facts: Facts) -> Source | None:
    scaling = read_scaling(source.indexed.value.producer(), facts)
    if scaling is None or facts.rank(scaling.tensor) != len(source.indexed.axes):
        return None
    indexed = IndexedValue(scaling.tensor, source.indexed.axes)
    return dataclasses.replace(source, indexed=indexed, factor=scaling.of(source.factor))


def readings(result: IndexedValue, facts: Facts) -> tuple[IndexedValue, ...]:
    """The result and the views of it that alone look at it."""
    found = [result]
    while len(found) < _MAX_VIEW_CHAIN:
        last = found[-1]
        followers = viewers(last.value)
        if last.value.is_graph_output() or len(followers) != 1:
            break
        view = downward(followers[0], last.axes, facts)
        if view is None:
            break
        found.append(view)
    return tuple(found)


_Caches = tuple[Table, Table, IndexedValue]


def read_rotary_node(indexed: IndexedValue, channels: Axis, facts: Facts) -> tuple[IndexedValue, Rotary] | None:
    """The input of a RotaryEmbedding node, laid out like its result, and the rotation; None for other nodes."""
    node, size = indexed.value.producer(), length(channels)
    if not (is_standard(node, "RotaryEmbedding") or is_contrib(node, "RotaryEmbedding")) or has_unknown_attribute(node):
        return None
    if facts.dtype(indexed.value) not in FLOATS_TO_32 or not _has_heads(indexed, channels, node):
        return None
    source = given(node, 0)
    caches = _caches(node, (indexed.axes[0], indexed.axes[-2]), facts)
    if source is None or caches is None or attribute(node, "scale", 1.0) != 1.0 or attribute(node, "is_packed_batching", 0):
        return None
    cos, sin, positions = caches
    width: int | None = attribute(node, "rotary_embedding_dim", 0) or (size if isinstance(size, int) else None)
    if width is None or any(length(table.indexed.axes[1]) * 2 != width for table in (cos, sin)):
        return None
    interleaved = bool(attribute(node, "interleaved", 0))
    return IndexedValue(source, indexed.axes), Rotary(cos, sin, leaves(channels), width, interleaved, positions, (node,))


def _has_heads(indexed: IndexedValue, channels: Axis, node: ir.Node) -> bool:
    """Whether the node takes the innermost axis as a head's channels, as the attention does."""
    own, inner = leaves(indexed.axes[-1]), leaves(channels)
    if len(indexed.axes) == 4:
        return own == inner
    heads: int = attribute(node, "num_heads", 0)
    return len(indexed.axes) == 3 and own[-len(inner) :] == inner and (not heads or length(own) == length(inner) * heads)


def _caches(node: ir.Node, axes: Axes, facts: Facts) -> _Caches | None:
    order = (1, 2, 3) if is_standard(node) else (2, 3, 1)
    cos, sin, positions = (given(node, place) for place in order)
    dims = facts.dims(positions)
    if cos is None or sin is None or positions is None or dims is None:
        return None
    tables: list[Table] = []
    for value in (cos, sin):
        shape = facts.dims(value)
        if shape is None or len(shape) != 2:
            return None
        tables.append(Table(IndexedValue(value, ((Factor(shape[0]),), (Factor(shape[1]),))), 1))
    if len(dims) == 2:
        places = tuple(() if dim == 1 else axis for dim, axis in zip(dims, axes, strict=True))
        return tables[0], tables[1], IndexedValue(positions, places)
    return (tables[0], tables[1], IndexedValue(positions, ((),))) if dims == (1,) else None


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
    if not any(one in facts.shorter(other) for one, other in itertools.permutations({size, *lengths}, 2)):
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
            if axis and leaves(axis) != leaves(key_axis) and length(axis) in facts.shorter(dim):
                found[length(axis), dim] = None
    return tuple(found)


def read_cache(
    key: tuple[Source, ...], value: tuple[Source, ...], query_axis: Axis, key_axis: Axis, channels: Axis, facts: Facts
) -> Cache | None:
    """How keys and values are put together if both are, of as many new positions, and then of as many earlier ones of that type.

    Args:
        key: The keys and the values that they are views of.
        value: The values and those that they are views of.
        query_axis: The positions of the queries; if they are as many as all keys, two streams are joined, as of text and image.
        key_axis: The positions of keys and values.
        channels: The channels of a head of the keys, which may be rotated before they are put to the earlier ones.
        facts: Shapes and types.
    """
    if length(query_axis) == length(key_axis):
        return None
    keys, values = (_appended(operand[-1], key_axis, facts) for operand in (key, value))
    if keys is None or values is None or any(is_short(operand[-1].indexed, facts) for operand in (key, value)):
        return None
    past_key, new_key, axis = keys
    past_value, new_value, value_axis = values
    pairs = ((key[0], past_key), (value[0], past_value))
    if any(facts.dtype(read.indexed.value) != facts.dtype(past.value) for read, past in pairs):
        return None
    earlier, new, same = (_length(*part, facts) for part in ((past_key, axis), (new_key, axis), (new_value, value_axis)))
    if earlier is None or new is None or new != same or sizes.least(new) < 1:
        return None  # operators that append fail where there is nothing new
    past_axis, new_axis = (Factor(earlier),), () if new == 1 else (Factor(new),)
    return Cache(
        past=(_along(past_key, axis, past_axis), _along(past_value, value_axis, past_axis)),
        new=(
            new_sources(_along(new_key, axis, new_axis), key[-1].factor, channels, facts),
            new_sources(_along(new_value, value_axis, new_axis), value[-1].factor, (), facts),
        ),
        present=(key[-1].indexed, value[-1].indexed),
        past_axis=past_axis,
        new_axis=new_axis,
    )


def appending(present: ir.Value, facts: Facts) -> ir.Node | None:
    """The node that keys or values with the new ones are from, but for casts to their own type of what nothing else reads.

    TorchScript writes such casts, where a module converts its keys to the type of its hidden states.
    """
    return uncast(present, facts, alone=True).producer()


def _appended(source: Source, key_axis: Axis, facts: Facts) -> tuple[IndexedValue, IndexedValue, int] | None:
    """The two parts of a Concat along the keys, laid out as it is, and its axis; none that is rotated as a whole."""
    node, axes = appending(source.indexed.value, facts), source.indexed.axes
    if not is_standard(node, "Concat") or len(node.inputs) != 2:
        return None
    if source.rotary is not None:
        return None
    past, new = node.inputs
    axis: int = attribute(node, "axis", 0) % len(axes)
    if past is None or new is None or leaves(axes[axis]) != leaves(key_axis):
        return None
    if facts.dtype(past) != facts.dtype(new):
        return None
    return IndexedValue(past, axes), IndexedValue(new, axes), axis


def new_sources(indexed: IndexedValue, factor: float, channels: Axis, facts: Facts) -> tuple[Source, ...]:
    """New keys or values and the views after them; the factor comes after the concatenation, so the cache is not scaled."""
    found = sources(indexed, facts, channels, plain=True)
    return tuple(dataclasses.replace(source, factor=factor) for source in found)


def _length(indexed: IndexedValue, axis: int, facts: Facts) -> Dim | None:
    dims = facts.dims(indexed.value)
    return None if dims is None or len(dims) != len(indexed.axes) else dims[axis]


def _along(indexed: IndexedValue, place: int, axis: Axis) -> IndexedValue:
    """An indexed value whose axis at `place` runs over other positions."""
    return IndexedValue(indexed.value, replaced(indexed.axes, place, axis))
