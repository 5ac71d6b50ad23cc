"""Keys and values that are computed from a cache, position by position, as a cache of keys and values.

    past ── Concat(past, new) ── f ── keys        is        Concat(f(past), f(new)), with f(past) in the cache

So are latents that are expanded (MLA), and heads that are repeated or joined. If f is a product with constants, a cache may stay
as it is, one head for all queries, and queries and results are multiplied instead, by f of the identity: q · (x K) is (q Kᵀ) · x,
and w (x V) is (w x) V. So it does if it is smaller than keys by more than products with it are larger. Keys and values of other
sizes, or of a size that a buffer cannot have, are padded with zeros, as queries are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, count_of, leaves, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.fusion.packing.tokens import Tokens, as_axes, read_marks
from onnx_attnfuse.fusion.shared_cache.decoder import POSITIONS
from onnx_attnfuse.fusion.shared_cache.expansion import Expansion
from onnx_attnfuse.fusion.shared_cache.laid_out import answer, exchange, new_input
from onnx_attnfuse.fusion.shared_cache.sites import with_shared_heads
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.along import Marks, others
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, is_standard, needed
from onnx_attnfuse.graph.edit import answer_shapes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import is_fed, label, producer_of, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.layout import cache_layout
from onnx_attnfuse.verify.decoder_feeds import OwnCache

_EIGHT = 8
"""The divisor of the sizes of heads in a buffer."""
_PARTS = 2
"""Keys and values."""
_WIDE = 256
"""Heads of more channels have no kernels on some providers."""


@dataclasses.dataclass(frozen=True)
class _Operand:
    """The keys, or the values, of one attention."""

    taken: IndexedValue
    """The keys or values as a product takes them."""
    source: Source
    """The value with one head for all that are alike, and the factor from there."""
    marks: Marks
    channels: Axis


def other_caches(graph: ir.Graph, facts: Facts, specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """The attentions with a cache of something else than keys and values of one size that a buffer may have."""
    found = [(facts.dims(value), attribute(node, "axis", 0)) for value, node in _grown(graph).items()]
    lengths: list[Dim] = [dims[axis] for dims, axis in found if dims is not None]

    def has_other(spec: AttentionSpec) -> bool:
        size, other = length(spec.axes.h), length(spec.axes.v)
        if length(spec.axes.j) not in lengths or length(spec.axes.i) == length(spec.axes.j):
            return False
        if not isinstance(size, int) or not isinstance(other, int):
            return False
        return spec.cache is None or size != other or size % _EIGHT != 0

    return [spec for spec in specs if has_other(spec)]


def derive(graph: ir.Graph, builder: Builder, specs: Sequence[AttentionSpec], *, wide_heads: bool) -> OwnCache:
    """Gives attentions with other caches those of keys and values, in place; those that they had are returned.

    Args:
        graph: The decoder.
        builder: Its builder.
        specs: All attentions.
        wide_heads: The operator takes heads of any number of channels.

    Raises:
        Refused: Something else reads an old one, or it is not read from products of matrices.
    """
    grown = _grown(graph)
    found = [_derived(with_shared_heads(spec), builder, grown) for spec in other_caches(graph, builder.facts, specs)]
    for item in found:
        item.rewrite(wide_heads=wide_heads)
    return _connect(graph, builder, found)


def _grown(graph: ir.Graph) -> dict[ir.Value, ir.Node]:
    """The outputs of the model that new positions are appended to an input for, each with the node that does."""
    nodes = [node for node in graph if is_standard(node, "Concat") and node.outputs[0].is_graph_output()]
    return {node.outputs[0]: node for node in nodes if len(node.inputs) == _PARTS and is_fed(node.inputs[0])}


def _derived(spec: AttentionSpec, builder: Builder, grown: Mapping[ir.Value, ir.Node]) -> Derived:
    """An attention whose cache is to be another one.

    Raises:
        Refused: It cannot be.
    """
    axes, size, other = spec.axes, count_of(spec.axes.h), count_of(spec.axes.v)
    key, value = (_operand(found, channels, spec) for found, channels in ((spec.key, axes.h), (spec.value, axes.v)))
    products = [[node for role, node in spec.roles if role == wanted] for wanted in ("scores", "result")]
    scores, result = (nodes[0] if len(nodes) == 1 and is_standard(nodes[0], "MatMul") else None for nodes in products)
    if length(axes.b) == 1:
        raise Refused("cache-kept", "keys and values that are computed from a cache are not read for one entry alone", spec.name)
    if key is None or value is None or scores is None or result is None:
        message = "a cache of keys and values cannot take the place of it, as they are not read from products of matrices"
        raise Refused("cache-kept", message, spec.name)

    def begins(value: ir.Value, marks: Marks) -> bool:
        axis: int = attribute(grown[value], "axis", 0) if value in grown else 0
        return value in grown and marks[axis] == "s" and "b" in marks

    expansion = Expansion(builder, Tokens(builder.facts, length(axes.b), length(axes.j)), begins)
    for operand in (key, value):
        expansion.read(operand.source.indexed.value, operand.marks)
    return Derived(spec, builder, expansion, (key, value), (scores, result), -(-max(size, other) // _EIGHT) * _EIGHT)


def _operand(found: Sequence[Source], channels: Axis, spec: AttentionSpec) -> _Operand | None:
    """The keys or values, read from the value furthest up that has all channels, and no others."""
    for source in reversed(found):
        axes = source.indexed.axes
        marks = read_marks(axes, spec.axes.b, spec.axes.j)
        is_whole = all(leaf.position is None for axis in axes for leaf in leaves(axis))
        if source.rotary is None and marks is not None and is_whole and _place(axes, channels) is not None:
            return _Operand(found[0].indexed, source, marks, channels)
    return None


def _place(axes: Axes, channels: Axis) -> int | None:
    """The axis of channels alone."""
    return next((place for place, axis in enumerate(axes) if leaves(axis) == leaves(channels)), None)


class Derived:
    """One attention on its way to a cache of keys and values."""

    def __init__(
        self,
        spec: AttentionSpec,
        builder: Builder,
        expansion: Expansion,
        operands: tuple[_Operand, _Operand],
        products: tuple[ir.Node, ir.Node],
        size: int,
    ) -> None:
        self.spec, self.expansion, self._builder, self._operands = spec, expansion, builder, operands
        self.products, self._size = products, size
        self.pasts: list[ir.Value] = []
        self.presents: list[ir.Value] = []
        self.shape = 0, 0
        """The heads and channels of a position in the new cache."""

    def rewrite(self, *, wide_heads: bool) -> None:
        """Multiplies by keys and values of another cache, whose heads may have any number of channels or no more than usual."""
        axes, appended = self.spec.axes, self.expansion.beginnings
        self._builder.at(self.products[0])
        widths = [self._width(value) for value in appended]
        found = {leaf for operand in self._operands for axis in operand.source.indexed.axes for leaf in leaves(axis)}
        own = tuple(leaf for leaf in axes.n if leaf in found)
        heads = own if own == axes.n[: len(own)] else axes.n
        count, numbers = sum(widths) if all(widths) else 0, length(heads)
        is_smaller = isinstance(numbers, int) and 0 < count * count < numbers * self._size * self._size
        if self.expansion.is_linear and is_smaller and (wide_heads or count <= _WIDE):
            self._absorb(-(-count // _EIGHT) * _EIGHT)
        else:
            self._expand(heads)

    def _width(self, value: ir.Value) -> int:
        """How many numbers of a position are appended; 0 where that is not known."""
        found = sizes.product(others(self.expansion.beginnings[value], dims_of(self._builder, value)))
        return found if isinstance(found, int) else 0

    def _expand(self, heads: Axis) -> None:
        """Caches what keys and values are computed to."""
        builder, axes = self._builder, self.spec.axes
        new, past = self._lengths()
        here, wide = (Factor(new),) if new != 1 else (), (Factor(self._size),)
        given = {value: self._in_a_row(value, new) for value in self.expansion.beginnings}
        seen: list[IndexedValue] = []
        for operand in self._operands:
            laid = self._of(operand, given, axes.b, here)
            part = arrange(builder, laid, cache_layout(self.spec, heads, here, operand.channels))
            part = _padded(builder, part, POSITIONS + 1, self._size)
            seen.append(self._appended(part, [length(axes.b), length(heads), past, self._size], heads, wide))
        query = self.spec.query[0].indexed
        self._multiply(
            _padded(builder, query.value, _place(query.axes, axes.h) or 0, self._size),
            seen,
            wide,
            lambda result, place: builder.slice(result, place, 0, length(axes.v)),
        )

    def _absorb(self, size: int) -> None:
        """Caches what is appended as it is, in one head of so many numbers, and multiplies queries and results instead."""
        builder, axes, appended = self._builder, self.spec.axes, self.expansion.beginnings
        new, past = self._lengths()
        wide, rows = (Factor(size),), list[ir.Value]()
        identity, start = np.eye(size, dtype=self._dtype.numpy()), 0
        given: dict[ir.Value, ir.Value] = {}
        for value, marks in appended.items():
            channels = others(marks, dims_of(builder, value))
            width = self._width(value)
            given[value] = builder.reshape(builder.constant(identity[:, start : start + width]), [size, *channels])
            rows.append(builder.reshape(self._in_a_row(value, new), [length(axes.b) * new, width]))
            start += width
        row = builder.node("Concat", rows, {"axis": 1}) if len(rows) > 1 else rows[0]
        row = _padded(builder, row, 1, size)
        part = builder.reshape(row, [length(axes.b), 1, new, size])
        seen = [self._appended(part, [length(axes.b), 1, past, size], (), wide) for _ in range(_PARTS)]
        keys, values = (self._of(operand, given, (), wide) for operand in self._operands)
        turned, mixing = arrange(builder, keys, (axes.n, axes.h, wide)), arrange(builder, values, (axes.n, wide, axes.v))
        builder.rearranged += turned, mixing
        query, whole = self.spec.query[0].indexed, (axes.b, axes.n, axes.i)
        product = builder.node("MatMul", [arrange(builder, query, (*whole, axes.h)), turned])
        layout = tuple(wide if leaves(axis) == leaves(axes.h) else axis for axis in query.axes)

        def finished(result: ir.Value, place: int) -> ir.Value:
            output = self.spec.output[0].axes
            laid = tuple(wide if at == place else axis for at, axis in enumerate(output))
            mixed = arrange(builder, IndexedValue(result, laid), (*whole, wide))
            return arrange(builder, IndexedValue(builder.node("MatMul", [mixed, mixing]), (*whole, axes.v)), output)

        self._multiply(arrange(builder, IndexedValue(product, (*whole, wide)), layout), seen, wide, finished)

    @property
    def _dtype(self) -> ir.DataType:
        dtype = self._builder.facts.dtype(self._operands[0].taken.value)
        if dtype is None:
            raise Refused("cache-kept", "the element type of the keys is not known", self.spec.name)
        return dtype

    def _lengths(self) -> tuple[Dim, Dim]:
        """How many positions are new, and how many earlier."""
        found: set[tuple[Dim, Dim]] = set()
        for value, marks in self.expansion.beginnings.items():
            past, new = (dims_of(self._builder, item)[marks.index("s")] for item in self._parts_of(value))
            found.add((new, past))
        if len(found) != 1:
            raise Refused("caches-differ", "keys and values are computed from caches of different lengths", self.spec.name)
        return found.pop()

    def given(self, value: ir.Value) -> ir.Value:
        """The input that is appended to."""
        return self._parts_of(value)[0]

    def _parts_of(self, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The value that is appended to, and the one that is appended."""
        node = producer_of(value)
        return needed(node, 0), needed(node, 1)

    def _in_a_row(self, value: ir.Value, new: Dim) -> ir.Value:
        """The new positions of what is appended, all of them in one axis in front of the channels."""
        builder, marks = self._builder, self.expansion.beginnings[value]
        part = self._parts_of(value)[1]
        axes, batch, positions = as_axes(marks, dims_of(builder, part), dataclasses.replace(self.expansion.whole, length=new))
        return arrange(builder, IndexedValue(part, axes), ((batch, positions), *others(marks, axes)))

    def _of(self, operand: _Operand, given: dict[ir.Value, ir.Value], batch: Axis, positions: Axis) -> IndexedValue:
        """Keys or values for other positions, which `given` has of what is appended."""
        source = operand.source.indexed
        return IndexedValue(
            self.expansion.computed(source.value, given), ((*batch, *positions), *others(operand.marks, source.axes))
        )

    def _appended(self, part: ir.Value, past: Sequence[Dim], heads: Axis, wide: Axis) -> IndexedValue:
        """Keys or values that new ones are appended to, in a cache of their own."""
        builder, spec, (value, *_) = self._builder, self.spec, self.expansion.beginnings
        given = new_input(builder, self.given(value), past)
        whole = [length(axis) for axis in cache_layout(spec, heads, spec.axes.j, wide)]
        self.shape = count_of(heads), count_of(wide)
        present = builder.node("Concat", [given, part], {"axis": POSITIONS}, dims=whole, dtype=builder.facts.dtype(part))
        self.pasts.append(given)
        self.presents.append(present)
        return IndexedValue(present, cache_layout(spec, heads, spec.axes.j, wide))

    def _multiply(
        self, query: ir.Value, seen: Sequence[IndexedValue], wide: Axis, finished: Callable[[ir.Value, int], ir.Value]
    ) -> None:
        """Puts products with other operands in the place of those of the source.

        Args:
            query: The queries, laid out as those that a product takes.
            seen: Keys and values.
            wide: The channels of all three.
            finished: The result from that of the product, whose axis of channels is given.
        """
        builder, spec = self._builder, self.spec
        new: dict[ir.Value, ir.Value] = {spec.query[0].indexed.value: query}
        for operand, indexed in zip(self._operands, seen, strict=True):
            layout = tuple(wide if leaves(axis) == leaves(operand.channels) else axis for axis in operand.taken.axes)
            new[operand.taken.value] = builder.times(arrange(builder, indexed, layout), operand.source.factor)
        place = _place(spec.output[0].axes, spec.axes.v)
        first, second = self.products
        if place is None or spec.output[0].value is not second.outputs[0] or not {*first.inputs, *second.inputs} & new.keys():
            raise Refused("cache-kept", "the operands of it are not read from products of matrices", spec.name)
        for node in self.products:
            old = node.outputs[0]
            builder.at(node)
            dims = [*dims_of(builder, old)]
            if node is second:
                dims[place] = length(wide)
            made = builder.node(
                "MatMul", [new.get(item, item) for item in node.inputs if item is not None], dims=dims, dtype=self._dtype
            )
            old.replace_all_uses_with(made if node is first else finished(made, place), replace_graph_outputs=True)


def _padded(builder: Builder, value: ir.Value, axis: int, size: int) -> ir.Value:
    """A value with zeros after its last channels, up to so many."""
    own = dims_of(builder, value)[axis]
    return builder.pad(value, axis, 0, size - own if isinstance(own, int) else 0)


def _connect(graph: ir.Graph, builder: Builder, found: Sequence[Derived]) -> OwnCache:
    """Gives the model the new caches for the old ones, which are returned.

    Raises:
        Refused: Something else needs an old one.
    """
    inputs, outputs = dict[ir.Value, list[ir.Value]](), dict[ir.Value, list[ir.Value]]()
    parts: list[tuple[str, str, int]] = []
    for item in found:
        old = [value for value in graph.outputs if value in item.expansion.beginnings]
        if any(value in outputs for value in old):
            raise Refused("caches-differ", "two attentions compute keys or values from the same cache", item.spec.name)
        for value in old:
            inputs[item.given(value)], outputs[value] = [], []
            parts.append((item.given(value).name or "", value.name or "", item.expansion.beginnings[value].index("s")))
        places = [*range(len(old))] if len(old) == _PARTS else [0] * _PARTS
        for place, past, present in zip(places, item.pasts, item.presents, strict=True):
            inputs[item.given(old[place])].append(past)
            outputs[old[place]].append(present)
    exchange(graph, inputs, outputs)
    for item in found:
        for value in (output for node in item.expansion.nodes for output in node.outputs):
            answer_shapes(value, builder)
        sweep([node.outputs[0] for node in item.products])
    _drop([*outputs, *inputs], builder)
    graph.sort()
    return OwnCache(tuple(parts), {past.name or "": item.shape for item in found for past in item.pasts})


def _drop(old: Sequence[ir.Value], builder: Builder) -> None:
    """Drops caches that nothing but their sizes is read of.

    Raises:
        Refused: Something else is.
    """
    for value in old:
        answer(value, builder)
        if readers := viewers(value):
            message = f"'{value.name}' is read besides for the keys and values of an attention, which are cached in its place"
            raise Refused("cache-used", message, label(readers[0]))
        sweep([value])
