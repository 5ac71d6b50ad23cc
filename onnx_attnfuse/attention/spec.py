"""The specification of one attention: its meaning, apart from its form in the graph.

An `AttentionSpec` is enough to compute the attention without its nodes:

    output[b, n, i, :] = softmax over j of (scale · q[b, n, i] · k[b, n, j] + mask[b, n, i, j])  @  v[b, n, j, :]

All operands are values of the graph together with their axes (`axes.factors`): which axis is a head is data, not position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, count_of, leaves, named
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.roundings import Rounding
from onnx_attnfuse.graph.sizes import Dim

Role: TypeAlias = Literal[
    "scores", "scale", "softcap", "mask", "mask_input", "softmax", "guard", "result", "rotary", "rounding", "view", "attention"
]
"""The role of a node: the product of queries and keys; a factor of scores, operands or weights; a soft cap; the mask, where it
meets the scores; a node that computes that mask; the softmax; a guard of rows without a key; the product with the values; a
rotary embedding; half of a rounding; a view or cast, operands and result included; a whole attention."""
Roles: TypeAlias = tuple[tuple[Role, ir.Node], ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Cosines or sines of a rotary embedding: a column for each pair of channels, a row for each position."""

    indexed: IndexedValue
    """The table, over rows and batch of the rotated value; a cache that positions point into has axes of its own."""
    axis: int
    """The axis of its columns."""
    start: int = 0
    """The column of the first pair."""
    step: int = 1
    """How far it is from there to the next pair's."""
    negative: bool = False
    """The numbers are the negatives of those in it."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotation of pairs of channels: `(cos · x - sin · y, cos · y + sin · x)` in the place of each pair `(x, y)`."""

    cos: Table
    sin: Table
    channels: Axis
    """The channels of a head."""
    width: int
    """How many channels are rotated, from the first on; the others stay."""
    interleaved: bool
    """Channels 2i and 2i + 1 are a pair; else i and i + width / 2 are."""
    positions: IndexedValue | None = None
    """The rows of the tables to take: one for each row, or the first of them in a single number; None: all in turn."""
    nodes: tuple[ir.Node, ...] = ()
    """The nodes that rotate now, without those that make the tables."""

    @property
    def is_decomposed(self) -> bool:
        """Whether the rotation takes more nodes than one operator."""
        return len(self.nodes) > 1

    def values(self) -> Iterator[ir.Value]:
        """Every value of the graph that the rotation names."""
        yield from (self.cos.indexed.value, self.sin.indexed.value)
        if self.positions is not None:
            yield self.positions.value


@dataclasses.dataclass(frozen=True)
class Source:
    """A value that an operand is a view of, times a number, rotated."""

    indexed: IndexedValue
    factor: float = 1.0
    rotary: Rotary | None = None
    """The operation between the value and one that the operand is a view of; scaling and rotating can change places."""


@dataclasses.dataclass(frozen=True)
class Added:
    """A value that is added to the scores, or subtracted from them."""

    indexed: IndexedValue
    negative: bool = False


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Scores that are masked already, multiplied or divided by a number or by a value computed at run time."""

    factor: float | IndexedValue
    divide: bool = False


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Scores that become `fill` where `condition` is not `keep_where`."""

    condition: IndexedValue
    keep_where: bool
    """The truth value of `condition` that keeps the score."""
    fill: float


@dataclasses.dataclass(frozen=True)
class Floored:
    """Scores that are held at or above `low`."""

    low: float


MaskStep: TypeAlias = Added | Scaled | Replaced | Floored
Mask: TypeAlias = tuple[MaskStep, ...]
"""Everything that happens to scaled scores before Softmax, first step first; empty: nothing is masked and nothing added."""


@dataclasses.dataclass(frozen=True)
class Gain:
    """The factor that later steps of a mask multiply a step's number by."""

    number: float = 1.0
    values: tuple[Scaled, ...] = ()
    """Factors that are computed at run time."""


def step_gains(mask: Mask) -> tuple[Gain, ...]:
    """For each step of a mask what the steps after it multiply."""
    gain, found = Gain(), list[Gain]()
    for step in reversed(mask):
        found.append(gain)
        if not isinstance(step, Scaled):
            continue
        if isinstance(step.factor, IndexedValue):
            gain = dataclasses.replace(gain, values=(step, *gain.values))
        else:
            gain = dataclasses.replace(gain, number=gain.number * step.factor)
    return tuple(reversed(found))


@dataclasses.dataclass(frozen=True)
class RowRule:
    """Rows of the result that the source sets to zero."""

    condition: IndexedValue | None
    """Where a row is kept; None: it depends on the mask alone."""
    keep_where: bool = True
    is_product: bool = False
    """Weights are multiplied by the condition as 0 or 1, which leaves NaN as it is."""
    lowest: float = -math.inf
    """Without a condition: a row that this number or lower ones mask throughout is zero, not only one of -inf."""


@dataclasses.dataclass(frozen=True)
class ScaleValue:
    """A factor that is computed at run time or differs by row."""

    indexed: IndexedValue
    divide: bool


@dataclasses.dataclass(frozen=True)
class Layouts:
    """How operands and result are brought into a fused operator's layout, as einops expressions; None: as they are."""

    query: str | None = None
    key: str | None = None
    value: str | None = None
    output: str | None = None


@dataclasses.dataclass(frozen=True)
class Axes4:
    """Batch, heads, rows, columns and channels of one attention, each as its factors."""

    b: Axis
    n: Axis
    i: Axis
    j: Axis
    h: Axis
    v: Axis

    @property
    def num_heads(self) -> int:
        """Number of heads; the heads' factors have known sizes."""
        return count_of(self.n)

    @property
    def scores(self) -> Axes:
        """The layout of scores and masks."""
        return self.b, self.n, self.i, self.j

    def names(self) -> dict[Factor, str]:
        """Names for einops expressions."""
        return named("bnsthv", (self.b, self.n, self.i, self.j, self.h, self.v))


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of earlier positions, which the new ones are appended to."""

    past: tuple[IndexedValue, IndexedValue]
    """Keys and values of earlier positions."""
    new: tuple[tuple[Source, ...], tuple[Source, ...]]
    """The new ones, each with the value that it is a view of."""
    present: tuple[IndexedValue, IndexedValue]
    """Keys and values of earlier and new positions together."""
    past_axis: Axis
    new_axis: Axis

    def frontier(self) -> Iterator[ir.Value]:
        """The values that a cached attention starts from: the past, and the new keys and values at their earliest source."""
        yield from (indexed.value for indexed in self.past)
        yield from (operand[-1].indexed.value for operand in self.new)


@dataclasses.dataclass(frozen=True)
class Renormalization:
    """Weights that a mask after the softmax keeps, divided by their sum."""

    total: IndexedValue
    """The sum."""
    least: float
    """From here up it has all its digits, also beside a number that keeps it from being 0."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The meaning of one attention site."""

    name: str
    """Name of the Softmax or attention node."""
    query: tuple[Source, ...]
    """The operand, then the values that it is a view of, ever further from the site; the same for key and value."""
    key: tuple[Source, ...]
    value: tuple[Source, ...]
    output: tuple[IndexedValue, ...]
    """The result, then views of it that are its only users."""
    batch_axis: Axis
    """All factors that are neither rows nor columns nor channels; which of them are heads is for the plan to choose."""
    query_axis: Axis
    key_axis: Axis
    head_axis: Axis
    v_head_axis: Axis
    heads: Axis
    """The factors of `batch_axis` that are heads as the source lays them out."""
    scale: float
    scale_values: tuple[ScaleValue, ...]
    softcap: float | None
    mask: Mask
    causal: bool
    """Row i sees keys j <= i only, counted from the start of both, besides what `mask` says."""
    row_rules: tuple[RowRule, ...]
    result_scales: tuple[ScaleValue, ...]
    """Factors of the result, the same for all keys and channels."""
    dtype: ir.DataType | None
    output_dtype: ir.DataType | None
    nodes: tuple[ir.Node, ...]
    """The nodes of the source that compute it, in topological order."""
    cache: Cache | None = None
    """How keys and values come about where they are appended to earlier ones."""
    sink: IndexedValue | None = None
    """One more score in each row, which takes weight and has no value; it is neither scaled nor masked."""
    unshifted: bool = False
    """Exponentials are taken without the row's maximum subtracted first."""
    renormalized: Renormalization | None = None
    """How weights are masked after the softmax and divided by the rest of their sum; None where all of it is left."""
    voided: bool = False
    """So a fully masked row is NaN; else, where `unshifted`, it depends on the form."""
    roundings: tuple[Rounding, ...] = ()
    """The roundings of a quantised model, inside and right beside the attention."""
    roles: Roles = ()
    """Nodes of the source by their role in this attention, those of its mask included."""
    wider: tuple[tuple[Dim, Dim], ...] = ()
    """Lengths of the scores, each with that of a mask or factor along the same axis, taken to be no longer: it is 1 or the same.
    Where it is longer, as the scores' is 1 at run time, the source repeats the scores and the operator ends in an error."""

    @property
    def axes(self) -> Axes4:
        """The axes in terms of factors that are not split (yet), heads apart from the rest of the batch."""
        heads = leaves(self.heads)
        batch = tuple(leaf for leaf in leaves(self.batch_axis) if leaf not in heads)
        roles = (self.query_axis, self.key_axis, self.head_axis, self.v_head_axis)
        return Axes4(batch, heads, *(leaves(axis) for axis in roles))

    def operands(self) -> tuple[tuple[Source, ...], tuple[Source, ...], tuple[Source, ...]]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def unrotated(self) -> AttentionSpec:
        """The attention with operands that are rotated already: operators before a rotation are not looked at."""
        query, key, value = (tuple(source for source in operand if source.rotary is None) for operand in self.operands())
        cache = self.cache
        if cache is not None:
            new = tuple(source for source in cache.new[0] if source.rotary is None), cache.new[1]
            cache = dataclasses.replace(cache, new=new)
        return dataclasses.replace(self, query=query, key=key, value=value, cache=cache)

    def values(self) -> Iterator[ir.Value]:
        """Every value of the graph that the spec names."""
        for operand in (*self.operands(), *(self.cache.new if self.cache is not None else ())):
            yield from (source.indexed.value for source in operand)
            yield from (value for source in operand if source.rotary is not None for value in source.rotary.values())
        if self.cache is not None:
            yield from (indexed.value for indexed in self.cache.past)
        if self.sink is not None:
            yield self.sink.value
        yield from (indexed.value for indexed in self.output)
        yield from (scale.indexed.value for scale in (*self.scale_values, *self.result_scales))
        yield from (rule.condition.value for rule in self.row_rules if rule.condition is not None)
        yield from mask_values(self.mask)


def mask_values(mask: Mask) -> Iterator[ir.Value]:
    """Every value of the graph that a mask is made of."""
    return (indexed.value for indexed in mask_operands(mask))


def mask_operands(mask: Mask) -> Iterator[IndexedValue]:
    """Every value that a mask is made of, with its axes."""
    for step in mask:
        match step:
            case Added(indexed) | Scaled(IndexedValue() as indexed) | Replaced(indexed):
                yield indexed
            case Scaled() | Floored():
                pass


def plain_masks(spec: AttentionSpec) -> dict[ir.Value, ir.Value]:
    """For each rounded mask what it is before it is rounded, however often that is."""
    found: dict[ir.Value, ir.Value] = {}
    for item in spec.roundings:
        if item.place == "mask":
            found[item.pair.after] = found.get(item.pair.before, item.pair.before)
    return found


def with_plain_mask(spec: AttentionSpec) -> AttentionSpec:
    """The attention with the summands of its scores before they are rounded."""
    plain = plain_masks(spec)

    def bare(indexed: IndexedValue) -> IndexedValue:
        return dataclasses.replace(indexed, value=plain.get(indexed.value, indexed.value))

    steps = (dataclasses.replace(step, indexed=bare(step.indexed)) if isinstance(step, Added) else step for step in spec.mask)
    return dataclasses.replace(spec, mask=tuple(steps))
