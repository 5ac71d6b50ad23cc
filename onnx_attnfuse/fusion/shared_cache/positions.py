"""Positions of a decoder: how many there can be, whether all entries of a batch share them, and tables with a row for each.

Where the most positions there will be are known, cosines and sines of a rotation become such tables. A source computes them in
every step, of positions that it is handed. The same nodes on the positions 0, 1, 2 and so on depend on no input, so ONNX Runtime
computes them once, when a session starts; a step takes its rows.

A model that has no mask of its own gets one that tells lengths, and is judged with it. All ones, it says no more than a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, length, refined
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.mask_terms import elements_of, factors_of, value_of
from onnx_attnfuse.attention.spec import AttentionSpec, Rotary, Source, Table
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.fusion.packing.tokens import Tokens
from onnx_attnfuse.fusion.shared_cache.expansion import Expansion
from onnx_attnfuse.graph.along import Marks, others
from onnx_attnfuse.graph.build import Builder, dims_of, new_weight
from onnx_attnfuse.graph.constants import attribute, constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.scopes import all_names
from onnx_attnfuse.graph.uses import is_fed, sources
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.targets import rotary as rotating
from onnx_attnfuse.targets.rotary import key_of

_TABLE_RANK = 2
_COUNTS = ("Range", "CumSum")
_KEEPS = REARRANGES | REPEATS | SLICES | CASTS | {"Identity"}
_LOOKS_UP = ("Gather", "GatherElements")


@dataclasses.dataclass(frozen=True)
class Counting:
    """The inputs of a decoder that positions may be made of."""

    tokens: ir.Value | None
    positions: frozenset[ir.Value]
    """Position ids."""
    masks: frozenset[ir.Value]
    """The mask, whose running sum is a position."""
    shared: frozenset[ir.Value]
    """Those with positions for all entries alike."""


def context_length(graph: ir.Graph, counting: Counting, facts: Facts) -> int | None:
    """The most positions for which each table that is read by position has a row; None where there is none."""
    firsts, found = _Firsts(counting, facts), list[int]()
    for node in graph:
        data, index = (*node.inputs, None)[:2] if is_standard(node, *_LOOKS_UP) else (None, None)
        dims = None if data is None or facts.dtype(data) == ir.DataType.BOOL else facts.dims(data)
        if data is None or not dims or index is None or not facts.rank(index):
            continue
        axis: int = attribute(node, "axis", 0)
        rows, first = dims[axis], firsts.of(index)
        if isinstance(rows, int) and first is not None and _is_fixed(data):
            found.append(rows - first)
    return min(found, default=None)


def _is_fixed(value: ir.Value) -> bool:
    """Whether the elements of a value are those of constants, in whatever order."""
    made = _made_of(value)
    return not any(is_fed(item) or is_standard(item.producer(), *_COUNTS) for item in made)


class _Firsts:
    """The numbers that values have for position 0, of those that count positions from there."""

    def __init__(self, counting: Counting, facts: Facts) -> None:
        self._counting, self._facts = counting, facts
        self._known: dict[ir.Value | None, int | None] = {None: None}

    def of(self, value: ir.Value | None) -> int | None:
        """The number of a value; None: it may be anything, as a clipped position, a distance, or a table's entry for one."""
        if value not in self._known:
            assert value is not None
            self._known[value] = self._read(value, value.producer())
        return self._known[value]

    def _read(self, value: ir.Value, node: ir.Node | None) -> int | None:
        if node is None:
            return 0 if value in self._counting.positions | self._counting.shared else None
        given = node.inputs[0] if node.inputs else None
        if given is None or is_standard(node, *_KEEPS) or (is_standard(node, "Gather") and not _is_fixed(given)):
            return self.of(given)
        if is_standard(node, "Range"):
            return self._number(given) or 0
        if is_standard(node, "CumSum"):
            of_mask = not _made_of(given).isdisjoint(self._counting.masks)
            return (0 if attribute(node, "exclusive", 0) else 1) if of_mask else None
        if is_standard(node, "Where", "Mul", "Max"):
            return max((first for item in node.inputs if (first := self.of(item)) is not None), default=None)
        return (
            self._moved(given, node.inputs[1], 1 if is_standard(node, "Add") else -1) if is_standard(node, "Add", "Sub") else None
        )

    def _moved(self, left: ir.Value, right: ir.Value | None, sign: int) -> int | None:
        """The number of a position plus or minus other numbers."""
        assert right is not None
        if sign == 1 and self.of(left) is None:
            left, right = right, left
        first = self.of(left)
        if first is None or self.of(right) is not None or _marks(_made_of(right), self._counting):
            return None
        return first + sign * (self._number(right) or 0)

    def _number(self, value: ir.Value) -> int | None:
        found = self._facts.number(value)
        return None if found is None else int(found)


def is_by_place(bias: Term, counting: Counting) -> bool:
    """Whether a bias differs by the places of rows and keys, padding counted, and by no positions of each entry."""
    own = counting.positions | counting.masks
    return bool(factors_of(bias)) and all(_made_of(value_of(item)).isdisjoint(own) for item in elements_of(bias))


def counts_alike(graph: ir.Graph, counting: Counting, facts: Facts) -> bool:
    """Whether a table is read, or an angle taken, at positions that all entries of a batch share."""
    if any(
        is_standard(node, "Slice") and _is_table(node.inputs[0]) and constant_tensor(node.inputs[1]) is None for node in graph
    ):
        return True
    counted = [found for index in _lookups(graph) if _counts(found := _made_of(index), counting, facts)]
    angles = [_made_of(node.inputs[0]) for node in graph if is_standard(node, "Cos") and node.inputs[0] is not None]
    counted += [found for found in angles if counting.tokens not in found and _marks(found, counting)]
    return any(found.isdisjoint(counting.positions | counting.masks) for found in counted)


def _lookups(graph: ir.Graph) -> Iterator[ir.Value]:
    """The places of rows that are gathered from tables of floats."""
    for node in graph:
        if is_standard(node, "Gather") and _is_table(node.inputs[0]) and node.inputs[1] is not None:
            yield node.inputs[1]


def _is_table(value: ir.Value | None) -> bool:
    """Whether a value is a constant with rows of floats."""
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) == _TABLE_RANK


def _made_of(value: ir.Value) -> set[ir.Value]:
    """A value, and all that its elements are computed from; a size depends on no element."""
    return set(sources([value], lambda _, node: not is_standard(node, *ASKS_SHAPE)))


def _counts(found: set[ir.Value], counting: Counting, facts: Facts) -> bool:
    """Whether an index with these sources is a position: it is counted, and of neither tokens nor floats."""
    of_floats = any((dtype := facts.dtype(item)) is not None and dtype.is_floating_point() for item in found)
    return counting.tokens not in found and not of_floats and _marks(found, counting)


def _marks(found: set[ir.Value], counting: Counting) -> bool:
    """Whether a position, a range or a running sum is among the sources."""
    counted = any(is_standard(item.producer(), *_COUNTS) for item in found)
    return counted or not found.isdisjoint(counting.positions | counting.masks | counting.shared)


LEAST_ROWS = 512
"""The rows with which a decoder is judged, which computes all of them in each step then; `lengthen` gives it those it needs."""
_INT = ir.DataType.INT64
_TAKES_ROWS = {"Gather", rotary_embedding.INFO.name, group_query_attention.INFO.name}
"""Operators that read tables, or positions that there are rows for, by positions of their own."""


_Rows: TypeAlias = tuple[ir.Value, ir.Value, ir.Value]
"""Cosines and sines as tables (position, pair), and the positions (b, s) of which rows are taken."""


class PositionTables:
    """The tables of a decoder: one for all rotations that are the same, in whatever layer.

    Args:
        builder: The builder; the nodes of a table are at the anchor of the first attention that takes rows of it.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._made: dict[tuple[object, ...], _Rows] = {}

    def within(self, spec: AttentionSpec) -> AttentionSpec:
        """An attention with a cache whose rotations take rows of tables; itself where none depends on positions alone."""

        def turned(operand: tuple[Source, ...]) -> tuple[Source, ...]:
            return tuple(
                item if item.rotary is None else dataclasses.replace(item, rotary=known(item.rotary)) for item in operand
            )

        def known(rotary: Rotary) -> Rotary:
            return self._of(rotary, spec.axes.b) or rotary

        assert spec.cache is not None
        new_keys, new_values = spec.cache.new
        cache = dataclasses.replace(spec.cache, new=(turned(new_keys), new_values))
        counted = dataclasses.replace(spec, query=turned(spec.query), key=turned(spec.key), cache=cache)
        return spec if counted == spec else counted

    def _of(self, rotary: Rotary, batch: Axis) -> Rotary | None:
        """The rotation by rows of tables, or None where they depend on anything but the position of their row."""
        cos, sin = (None if rotary.positions is not None else _marks_of(table, batch) for table in (rotary.cos, rotary.sin))
        if cos is None or sin is None:
            return None
        axes = refined(rotary.cos.indexed.axes)
        along = axes[cos.index("b")], axes[cos.index("s")]
        tokens = Tokens(self._builder.facts, *map(length, along))
        key, row, columns = key_of(rotary), (Factor(LEAST_ROWS),), (Factor(rotary.width // 2),)
        rows = self._made.get(key) or _rows(rotary, (cos, sin), tokens, self._builder)
        if rows is None:
            return None
        self._made[key] = rows
        tables = [Table(IndexedValue(value, (row, columns)), 1) for value in rows[:2]]
        return dataclasses.replace(rotary, cos=tables[0], sin=tables[1], positions=IndexedValue(rows[2], along))


def counted(builder: Builder) -> ir.Value:
    """The positions that tables have rows for, of which a Gather takes none that there is not."""
    return builder.counting(LEAST_ROWS)


def lengthen(model: ir.Model, name: str, positions: int) -> None:
    """Gives tables a row for each position, in place; a later one ends in an error when the model runs.

    Args:
        model: The decoder.
        name: The name of the positions that tables have rows for.
        positions: How many there will be at most, counted from 0.
    """
    node = next(item for item in model.graph if item.outputs[0].name == name)
    if positions <= LEAST_ROWS:
        return
    node.replace_input_with(1, new_weight(model.graph, f"{name}_end", ir.tensor(np.asarray(positions))))
    pending = [node.outputs[0]]
    for value in pending:
        if value.shape is not None:
            value.shape = ir.Shape([positions, *value.shape[1:]])
        for user in dict.fromkeys(user for user, _ in value.uses() if user.op_type not in _TAKES_ROWS):
            shape = constant_tensor(user.inputs[1]) if is_standard(user, "Reshape") else None
            if shape is not None:
                longer = np.concatenate([[positions], shape.numpy()[1:]])
                user.replace_input_with(1, new_weight(model.graph, f"{user.outputs[0].name}_shape", ir.tensor(longer)))
            pending += [output for output in user.outputs if output not in pending]


def _marks_of(table: Table, batch: Axis) -> Marks | None:
    """The marks of cosines or sines that differ along entries and positions alone, besides channels."""
    axes = refined(table.indexed.axes)
    along = [place for place, axis in enumerate(axes) if place != table.axis and axis]
    if len(along) != 2 or leaves(axes[along[0]]) != leaves(batch):
        return None
    return tuple("bs"[along.index(place)] if place in along else "" for place in range(len(axes)))


def _rows(rotary: Rotary, marks: tuple[Marks, Marks], tokens: Tokens, builder: Builder) -> _Rows | None:
    """The tables of a rotation, or None where they depend on anything but the position of their row."""
    facts, row, tables = builder.facts, (Factor(LEAST_ROWS),), (rotary.cos, rotary.sin)

    def begins(value: ir.Value, own: Marks) -> bool:
        dtype = facts.dtype(value)
        return own == ("b", "s") and dtype is not None and dtype.is_integer() and tokens.is_full(value, own)

    expansion = Expansion(builder, tokens, begins)
    try:
        for table, own in zip(tables, marks, strict=True):
            expansion.read(table.indexed.value, own)
    except Refused:
        return None
    if len(expansion.beginnings) != 1:
        return None
    (positions,) = expansion.beginnings
    given = {positions: builder.cast(counted(builder), facts.dtype(positions) or _INT)}
    found = list[Table]()
    for table, own in zip(tables, marks, strict=True):
        axes = (row, *others(own, refined(table.indexed.axes)))
        indexed = IndexedValue(expansion.computed(table.indexed.value, given), axes)
        found.append(dataclasses.replace(table, indexed=indexed, axis=1 + own[: table.axis].count("")))
    values = rotating.tables(builder, dataclasses.replace(rotary, cos=found[0], sin=found[1]), (), row, None)[:2]
    return *values, builder.node("Gather", [counted(builder), positions])


PAST_LENGTH = "past_sequence_length"
"""The name of the input, (1) int32, that onnxruntime-genai has for it by default."""


def with_past_length(model: ir.Model, decoder: ServedDecoder) -> ServedDecoder:
    """Gives a decoder the number of earlier positions in the place of its mask, and drops inputs that nobody reads; in place.

    Args:
        model: The decoder, with an input (b, past + s) that tells lengths only.
        decoder: Its interface.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    mask, facts = inputs[decoder.attention_mask], Facts(graph)
    builder = Builder(graph, facts, model.opset_imports[""], all_names(model))
    builder.at(next(iter(graph)))
    name = builder.name(PAST_LENGTH)
    past = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT32))
    facts.record(past, [1], ir.DataType.INT32)
    batch, new, *_ = dims_of(builder, inputs[decoder.input_ids or decoder.inputs_embeds])
    total = builder.elementwise("Add", [builder.cast(past, ir.DataType.INT64), builder.shape([new])])
    whole = builder.node("Concat", [builder.shape([batch]), total], {"axis": 0})
    one = builder.constant(np.asarray(1, np.int64))
    ones = builder.node("Expand", [one, whole], dims=facts.dims(mask), dtype=ir.DataType.INT64)
    mask.replace_all_uses_with(ones)
    unread = {name for name in decoder.others if not inputs[name].uses()}
    kept = [past if value is mask else value for value in graph.inputs if value.name not in unread]
    graph.inputs[:] = kept
    graph.sort()
    return dataclasses.replace(
        decoder, attention_mask="", past_length=name, others=tuple(item for item in decoder.others if item not in unread)
    )
