"""Emitting a mask as one additive bias of shape (b or 1, n or 1, s, t)."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, leaves, length, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, aligned
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.fully_masked import ABSORBS, Fills
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Axes4, Floored, Mask, MaskStep, Replaced, Scaled, step_gains
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import largest, type_name
from onnx_attnfuse.graph.uses import before
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.targets.gather_as_broadcast import DataLayout
from onnx_attnfuse.targets.half_masks import lowest_kept, narrowed

_UNKNOWN_GAIN = 1e9
"""A factor that is computed at run time is taken to be smaller than this where a mask is narrowed."""


def bias_emitter(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> BiasEmitter:
    """The emitter of an attention's mask: as its data lies, unless the mask turned out to be other than it was read."""
    assert spec.dtype is not None
    return BiasEmitter(context.builder, spec.axes, spec.dtype, None if meaning.is_distrusted else context.reader)


def full_bias(builder: Builder, axes: Axes4, compact: IndexedValue, *, broadcasts: bool = True) -> ir.Value:
    """A bias with both matrix axes at full length, as MultiHeadAttention demands.

    Args:
        builder: The builder.
        axes: The axes of the attention.
        compact: The bias.
        broadcasts: It may be broadcast over all entries or all heads; else it gets these axes at full length too.
    """
    dims, wanted = dims_of(builder, compact.value), (length(axes.i), length(axes.j))
    each = dims[:2] if broadcasts else (length(axes.b), length(axes.n))
    if dims == (*each, *wanted):
        return compact.value
    return builder.expand(compact.value, [*each, *wanted], [not broadcasts, not broadcasts, True, True])


def letters_of(bias: IndexedValue) -> str:
    """The axes of a bias for a reader, 1 for one that it is broadcast along."""
    return " ".join(letter if axis else "1" for letter, axis in zip("bnst", bias.axes, strict=True))


def is_infinite(mask: Mask, place: int) -> bool:
    """Whether a step replaces scores by -inf, and none after it holds them above a number."""
    step = mask[place]
    return isinstance(step, Replaced) and math.isinf(step.fill) and not any(isinstance(later, Floored) for later in mask[place:])


class BiasEmitter:
    """Emits the steps of one mask with the operators the source used, scores taken as zero."""

    def __init__(self, builder: Builder, axes: Axes4, dtype: ir.DataType, reader: Reader | None = None) -> None:
        """Emits with `builder`; a gathered mask is broadcast from its data, where a reader is given."""
        self._builder = builder
        self._axes = axes
        self._dtype = dtype
        self._layout = None if reader is None else DataLayout(builder, reader)

    def compact(self, mask: Mask, fills: Fills = "lowest") -> IndexedValue:
        """The mask as (b or 1, n or 1, s or 1, t or 1).

        Args:
            mask: Its steps, at least one.
            fills: The fills of replaced scores.

        Raises:
            Refused: It is of a wider type than the operator, and would lose something.
        """
        mask = self._as_data_lies(mask)
        indexed = self._canonical(self._emit(mask) if fills == "lowest" else self._emit_exactly(mask))
        dtype = self._builder.facts.dtype(indexed.value)
        if dtype is not None and dtype != self._dtype:
            low = (
                lowest_kept(indexed.value, self._dtype, ABSORBS, self._builder.facts)
                if _bits(dtype) > _bits(self._dtype)
                else 0.0
            )
            if low is None:
                message = f"the mask is {type_name(dtype)}, and MultiHeadAttention would take it as {type_name(self._dtype)}"
                raise Refused("narrowed-mask", message)
            indexed = IndexedValue(narrowed(self._builder, indexed.value, self._dtype, low), indexed.axes)
        return indexed

    def replaced_rows(self, mask: Mask) -> IndexedValue:
        """Rows in which every score is replaced, (b or 1, n or 1, s or 1, 1)."""
        kept = [step for step in self._as_data_lies(mask) if isinstance(step, Replaced)]
        together: IndexedValue | None = None
        for step in kept:
            condition = self._keeps(step)
            together = condition if together is None else self._binary("And", together, condition)
        assert together is not None
        together = self._canonical(together)
        some = self._builder.holds_along(together.value, [3])
        return IndexedValue(self._builder.elementwise("Not", [some]), (*together.axes[:3], ()))

    def _as_data_lies(self, mask: Mask) -> Mask:
        """The steps with their addends, and where they replace, made of the data as it lies."""
        return mask if self._layout is None else tuple(_laid(step, self._layout) for step in mask)

    def _emit(self, mask: Mask) -> IndexedValue:
        """The steps in order, replaced and floored scores last: these become the lowest number, or -inf."""
        total: IndexedValue | None = None
        held: list[IndexedValue] = []
        for step, gain in zip(mask, step_gains(mask), strict=True):
            if isinstance(step, Added):
                size = _UNKNOWN_GAIN if gain.values else abs(gain.number)
                total = self._sum(total, self._term(step.indexed.refined(), size), negative=step.negative)
            elif isinstance(step, Scaled) and total is not None:
                total = self._scaled(total, step)
            elif isinstance(step, Floored) and total is not None:
                held.append(self._above(total, step.low))
        for above in held:
            total = self._filled(total, above, True)
        for place, step in enumerate(mask):
            if isinstance(step, Replaced):
                infinite = is_infinite(mask, place)
                total = self._filled(total, step.condition, step.keep_where, -math.inf if infinite else None)
        assert total is not None
        return total

    def _emit_exactly(self, mask: Mask) -> IndexedValue:
        """The steps in order, replaced scores as the source fills them."""
        total: IndexedValue | None = None
        for step in mask:
            match step:
                case Added(indexed, negative):
                    total = self._sum(total, indexed.refined(), negative=negative)
                case Scaled() if total is not None:
                    total = self._scaled(total, step)
                case Replaced():
                    fill = step.fill
                    if math.isfinite(fill) and abs(fill) > largest(self._dtype):
                        raise Refused(
                            "weak-fill", f"scores are replaced by {fill:g}, which {type_name(self._dtype)} does not have"
                        )
                    total = self._filled(total, step.condition, step.keep_where, fill)
                case Floored(low) if total is not None:
                    total = self._floored(total, low)
                case _:
                    pass
        assert total is not None
        return total

    def _sum(self, total: IndexedValue | None, term: IndexedValue, *, negative: bool) -> IndexedValue:
        if total is not None:
            return self._binary("Sub" if negative else "Add", total, term)
        return self._with_scalar("Mul", term, -1.0) if negative else term

    def _scaled(self, total: IndexedValue, step: Scaled) -> IndexedValue:
        operator = "Div" if step.divide else "Mul"
        if isinstance(step.factor, IndexedValue):
            return self._binary(operator, total, step.factor.refined())
        return self._with_scalar(operator, total, step.factor)

    def _keeps(self, step: Replaced) -> IndexedValue:
        """Where a replacement leaves the score."""
        condition = step.condition.refined()
        value = self._builder.cast(condition.value, ir.DataType.BOOL)
        if not step.keep_where:
            value = self._builder.elementwise("Not", [value])
        return IndexedValue(value, condition.axes)

    def _term(self, indexed: IndexedValue, gain: float) -> IndexedValue:
        """A mask in a wider type that only chooses between 0 and a fill is made anew in the operator's type."""
        facts = self._builder.facts
        dtype, node = facts.dtype(indexed.value), before(indexed.value, "Cast", "Identity").producer()
        if dtype is None or _bits(dtype) <= _bits(self._dtype) or node is None or node.op_type != "Where":
            return indexed
        condition, chosen, other = node.inputs
        if condition is None or chosen is None or other is None:
            return indexed
        numbers = facts.number(chosen), facts.number(other)
        chooses = aligned(condition, indexed.axes, facts)
        for kept, fill, keep_where in ((*numbers, True), (*numbers[::-1], False)):
            if kept == 0 and fill is not None and fill <= ABSORBS and chooses is not None:
                low = -math.inf if math.isinf(fill) else -largest(self._dtype) / max(1.0, gain)
                return self._filled(None, chooses, keep_where, low)
        return indexed

    def _with_scalar(self, op: str, indexed: IndexedValue, number: float) -> IndexedValue:
        dtype = self._builder.facts.dtype(indexed.value)
        return IndexedValue(self._builder.elementwise(op, [indexed.value, self._builder.scalar(number, dtype)]), indexed.axes)

    def _filled(
        self, total: IndexedValue | None, condition: IndexedValue, keep_where: bool, fill: float | None = None
    ) -> IndexedValue:
        """A mask with a number, by default the lowest, wherever a condition is not `keep_where`."""
        condition = condition.refined()
        kept = IndexedValue(self._builder.cast(condition.value, ir.DataType.BOOL), condition.axes)
        if total is None:
            dtype = self._dtype
            total = IndexedValue(self._builder.scalar(0.0, dtype), ())
        else:
            dtype = self._builder.facts.dtype(total.value) or self._dtype
            kept, total = self._alike(kept, total)
        number = self._builder.scalar(-largest(dtype) if fill is None else fill, dtype)
        chosen = [total.value, number] if keep_where else [number, total.value]
        return IndexedValue(self._builder.elementwise("Where", [kept.value, *chosen]), _union(kept.axes, total.axes))

    def _above(self, total: IndexedValue, low: float) -> IndexedValue:
        """Where a mask lies above a floor."""
        dtype = self._builder.facts.dtype(total.value) or self._dtype
        above = self._builder.elementwise("Greater", [total.value, self._builder.scalar(low, dtype)])
        return IndexedValue(above, total.axes)

    def _floored(self, total: IndexedValue, low: float) -> IndexedValue:
        """A mask whose numbers at a floor or below become the floor."""
        dtype = self._builder.facts.dtype(total.value) or self._dtype
        chosen = [self._above(total, low).value, total.value, self._builder.scalar(low, dtype)]
        return IndexedValue(self._builder.elementwise("Where", chosen), total.axes)

    def _binary(self, op: str, left: IndexedValue, right: IndexedValue) -> IndexedValue:
        left, right = self._alike(left, right)
        dtypes = [self._builder.facts.dtype(indexed.value) for indexed in (left, right)]
        if dtypes[0] != dtypes[1] and None not in dtypes:
            wider = max((dtype for dtype in dtypes if dtype is not None), key=_bits)
            left, right = (IndexedValue(self._builder.cast(indexed.value, wider), indexed.axes) for indexed in (left, right))
            dtypes = [wider]
        value = self._builder.elementwise(op, [left.value, right.value])
        return IndexedValue(value, _union(left.axes, right.axes))

    def _alike(self, left: IndexedValue, right: IndexedValue) -> tuple[IndexedValue, IndexedValue]:
        """Two masks in layouts that broadcast against each other."""
        pairs = zip(reversed(left.axes), reversed(right.axes), strict=False)
        if all(not a or not b or leaves(a) == leaves(b) for a, b in pairs) and not _crossed(left.axes, right.axes):
            return left, right
        return self._canonical(left), self._canonical(right)

    def _canonical(self, indexed: IndexedValue) -> IndexedValue:
        axes = refined(indexed.axes)
        present = {leaf for axis in axes for leaf in axis}
        target = tuple(axis if present & set(axis) else () for axis in self._axes.scores)
        if axes == target:
            return IndexedValue(indexed.value, axes)
        return IndexedValue(arrange(self._builder, IndexedValue(indexed.value, axes), target), target)


def _laid(step: MaskStep, layout: DataLayout) -> MaskStep:
    match step:
        case Added(indexed):
            return dataclasses.replace(step, indexed=layout.of(indexed.refined()))
        case Replaced(condition):
            return dataclasses.replace(step, condition=layout.of(condition.refined()))
        case _:
            return step


def _union(left: Axes, right: Axes) -> Axes:
    rank = max(len(left), len(right))
    first, second = ((),) * (rank - len(left)) + left, ((),) * (rank - len(right)) + right
    return tuple(a or b for a, b in zip(first, second, strict=True))


def _crossed(left: Axes, right: Axes) -> bool:
    """Whether a factor is at different places in two sequences of axes."""
    places: dict[object, int] = {}
    for axes in (left, right):
        for place, axis in enumerate(reversed(axes)):
            for leaf in leaves(axis):
                if places.setdefault(leaf, place) != place:
                    return True
    return False


def _bits(dtype: ir.DataType) -> float:
    return {ir.DataType.DOUBLE: 64, ir.DataType.FLOAT: 32, ir.DataType.FLOAT16: 16, ir.DataType.BFLOAT16: 16.5}.get(dtype, 0)
