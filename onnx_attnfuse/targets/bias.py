"""Emitting a mask as one additive bias of shape (b or 1, n or 1, s, t)."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.axes.arrange import arrange
from onnx_attnfuse.axes.factors import Axes, leaves, length, refined
from onnx_attnfuse.axes.views import Laid, aligned
from onnx_attnfuse.graph.build import Builder, largest
from onnx_attnfuse.masks.fully_masked import ABSORBS, Fills
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import Added, Axes4, Floored, Mask, Replaced, Scaled, step_gains
from onnx_attnfuse.targets.narrowed import lowest_of, narrowed

_UNKNOWN_GAIN = 1e9
"""A factor that is computed at run time is taken to be smaller than this where a mask is narrowed."""


class BiasEmitter:
    """Emits the steps of one mask with the operators the source used, scores taken as zero."""

    def __init__(self, builder: Builder, axes: Axes4, dtype: ir.DataType) -> None:
        self._builder = builder
        self._axes = axes
        self._dtype = dtype

    def compact(self, mask: Mask, fills: Fills = "lowest") -> Laid:
        """The mask as (b or 1, n or 1, s or 1, t or 1).

        Args:
            mask: Its steps, at least one.
            fills: What replaced scores become.

        Raises:
            Refused: It is of a wider type than the operator, and would lose something.
        """
        laid = self._canonical(self._emit(mask) if fills == "lowest" else self._emit_exactly(mask))
        dtype = self._builder.facts.dtype(laid.value)
        if dtype is not None and dtype != self._dtype:
            low = lowest_of(laid.value, self._dtype, ABSORBS, self._builder.facts) if _bits(dtype) > _bits(self._dtype) else 0.0
            if low is None:
                message = f"the mask is {dtype.name.lower()}, and MultiHeadAttention would take it as {self._dtype.name.lower()}"
                raise Refused("narrowed-mask", message)
            laid = Laid(narrowed(self._builder, laid.value, self._dtype, low), laid.axes)
        return laid

    def replaced_rows(self, mask: Mask) -> Laid:
        """Rows in which every score is replaced, (b or 1, n or 1, s or 1, 1)."""
        kept = [step for step in mask if isinstance(step, Replaced)]
        together: Laid | None = None
        for step in kept:
            condition = self._keeps(step)
            together = condition if together is None else self._binary("And", together, condition)
        assert together is not None
        together = self._canonical(together)
        builder, number = self._builder, ir.DataType.FLOAT
        some = builder.cast(builder.reduce("ReduceMax", builder.cast(together.value, number), [3]), ir.DataType.BOOL)
        return Laid(builder.elementwise("Not", [some], ir.DataType.BOOL), (*together.axes[:3], ()))

    def full(self, compact: Laid) -> ir.Value:
        """The same with both matrix axes at full length, as MultiHeadAttention demands."""
        wanted = length(self._axes.i), length(self._axes.j)
        dims = self._builder.facts.dims(compact.value)
        if dims is not None and dims[2:] == wanted:
            return compact.value
        assert dims is not None
        return self._builder.expand(compact.value, [*dims[:2], *wanted], [False, False, True, True])

    def _emit(self, mask: Mask) -> Laid:
        """The steps in order, replaced scores last: these become the lowest number, or -inf."""
        total: Laid | None = None
        for step, gain in zip(mask, step_gains(mask), strict=True):
            if isinstance(step, Added):
                size = _UNKNOWN_GAIN if gain.values else abs(gain.number)
                total = self._sum(total, self._term(step.laid.refined(), size), negative=step.negative)
            elif isinstance(step, Scaled) and total is not None:
                total = self._scaled(total, step)
            elif isinstance(step, Floored) and total is not None:
                total = self._floored(total, step.low, "lowest")
        for step in mask:
            if isinstance(step, Replaced):
                total = self._filled(total, step, -math.inf if math.isinf(step.fill) else None)
        assert total is not None
        return total

    def _emit_exactly(self, mask: Mask) -> Laid:
        """The steps in order, replaced scores as the source fills them."""
        total: Laid | None = None
        for step in mask:
            match step:
                case Added(laid, negative):
                    total = self._sum(total, laid.refined(), negative=negative)
                case Scaled() if total is not None:
                    total = self._scaled(total, step)
                case Replaced():
                    fill = step.fill
                    if math.isfinite(fill) and abs(fill) > largest(self._dtype):
                        raise Refused(
                            "weak-fill", f"scores are replaced by {fill:g}, which {self._dtype.name.lower()} does not have"
                        )
                    total = self._filled(total, step, fill)
                case Floored(low) if total is not None:
                    total = self._floored(total, low, "exact")
                case _:
                    pass
        assert total is not None
        return total

    def _sum(self, total: Laid | None, term: Laid, *, negative: bool) -> Laid:
        if total is not None:
            return self._binary("Sub" if negative else "Add", total, term)
        return self._with_scalar("Mul", term, -1.0) if negative else term

    def _scaled(self, total: Laid, step: Scaled) -> Laid:
        operator = "Div" if step.divide else "Mul"
        if isinstance(step.factor, Laid):
            return self._binary(operator, total, step.factor.refined())
        return self._with_scalar(operator, total, step.factor)

    def _keeps(self, step: Replaced) -> Laid:
        """Where a replacement leaves the score."""
        condition = step.condition.refined()
        value = self._builder.cast(condition.value, ir.DataType.BOOL)
        if not step.keep_where:
            value = self._builder.elementwise("Not", [value], ir.DataType.BOOL)
        return Laid(value, condition.axes)

    def _term(self, laid: Laid, gain: float) -> Laid:
        """A mask in a wider type that only chooses between 0 and a fill is made anew in the operator's type."""
        facts = self._builder.facts
        dtype, node = facts.dtype(laid.value), laid.value.producer()
        while node is not None and node.op_type in {"Cast", "Identity"} and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        if dtype is None or _bits(dtype) <= _bits(self._dtype) or node is None or node.op_type != "Where":
            return laid
        condition, chosen, other = node.inputs
        if condition is None or chosen is None or other is None:
            return laid
        numbers = facts.number(chosen), facts.number(other)
        axes = aligned(condition, laid.axes, facts)
        for kept, fill, keep_where in ((*numbers, True), (*numbers[::-1], False)):
            if kept == 0 and fill is not None and fill <= ABSORBS and axes is not None:
                low = -math.inf if math.isinf(fill) else -largest(self._dtype) / max(1.0, gain)
                return self._filled(None, Replaced(Laid(condition, axes), keep_where, fill), low)
        return laid

    def _with_scalar(self, op: str, laid: Laid, number: float) -> Laid:
        dtype = self._builder.facts.dtype(laid.value)
        return Laid(self._builder.elementwise(op, [laid.value, self._builder.scalar(number, dtype)], dtype), laid.axes)

    def _filled(self, total: Laid | None, step: Replaced, fill: float | None) -> Laid:
        """A mask with a number, by default the lowest, where scores are replaced."""
        condition = step.condition.refined()
        kept = Laid(self._builder.cast(condition.value, ir.DataType.BOOL), condition.axes)
        if total is None:
            dtype = self._dtype
            total = Laid(self._builder.scalar(0.0, dtype), ())
        else:
            dtype = self._builder.facts.dtype(total.value) or self._dtype
            kept, total = self._alike(kept, total)
        number = self._builder.scalar(-largest(dtype) if fill is None else fill, dtype)
        chosen = [total.value, number] if step.keep_where else [number, total.value]
        return Laid(self._builder.elementwise("Where", [kept.value, *chosen], dtype), _union(kept.axes, total.axes))

    def _floored(self, total: Laid, low: float, fills: Fills) -> Laid:
        """A mask whose numbers at a floor or below become the floor, or the lowest number, which leaves nothing of a score."""
        dtype = self._builder.facts.dtype(total.value) or self._dtype
        floor = self._builder.scalar(low, dtype)
        above = self._builder.elementwise("Greater", [total.value, floor], ir.DataType.BOOL)
        number = self._builder.scalar(-largest(dtype), dtype) if fills == "lowest" else floor
        return Laid(self._builder.elementwise("Where", [above, total.value, number], dtype), total.axes)

    def _binary(self, op: str, left: Laid, right: Laid) -> Laid:
        left, right = self._alike(left, right)
        dtypes = [self._builder.facts.dtype(laid.value) for laid in (left, right)]
        if dtypes[0] != dtypes[1] and None not in dtypes:
            wider = max((dtype for dtype in dtypes if dtype is not None), key=_bits)
            left, right = (Laid(self._builder.cast(laid.value, wider), laid.axes) for laid in (left, right))
            dtypes = [wider]
        value = self._builder.elementwise(op, [left.value, right.value], dtypes[0])
        return Laid(value, _union(left.axes, right.axes))

    def _alike(self, left: Laid, right: Laid) -> tuple[Laid, Laid]:
        """Both in layouts that broadcast against each other."""
        pairs = zip(reversed(left.axes), reversed(right.axes), strict=False)
        if all(not a or not b or leaves(a) == leaves(b) for a, b in pairs) and not _crossed(left.axes, right.axes):
            return left, right
        return self._canonical(left), self._canonical(right)

    def _canonical(self, laid: Laid) -> Laid:
        axes = refined(laid.axes)
        present = {leaf for axis in axes for leaf in axis}
        target = tuple(axis if present & set(axis) else () for axis in self._axes.scores)
        if axes == target:
            return Laid(laid.value, axes)
        return Laid(arrange(self._builder, Laid(laid.value, axes), target), target)


def _union(left: Axes, right: Axes) -> Axes:
    rank = max(len(left), len(right))
    first, second = ((),) * (rank - len(left)) + left, ((),) * (rank - len(right)) + right
    return tuple(a or b for a, b in zip(first, second, strict=True))


def _crossed(left: Axes, right: Axes) -> bool:
    """Whether a factor stands at different places in the two."""
    places: dict[object, int] = {}
    for axes in (left, right):
        for place, axis in enumerate(reversed(axes)):
            for leaf in leaves(axis):
                if places.setdefault(leaf, place) != place:
                    return True
    return False


def _bits(dtype: ir.DataType) -> float:
    return {ir.DataType.DOUBLE: 64, ir.DataType.FLOAT: 32, ir.DataType.FLOAT16: 16, ir.DataType.BFLOAT16: 16.5}.get(dtype, 0)
