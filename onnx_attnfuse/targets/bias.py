"""Emitting a mask as one additive bias of shape (b or 1, n or 1, s, t)."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.axes.arrange import arrange
from onnx_attnfuse.axes.factors import Axes, leaves, length, refined
from onnx_attnfuse.axes.views import Laid, aligned
from onnx_attnfuse.graph.build import Builder, largest
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import Axes4, Floor, Mask, Select, Term, Times, Total
from onnx_attnfuse.targets.narrowed import lowest_of, narrowed

_UNKNOWN_GAIN = 1e9
"""A factor that is computed at run time is taken to be smaller than this."""
ABSORBING = -1e12
"""Added in float32, a number this low swallows any score."""


class BiasEmitter:
    """Emits one mask's parts with the operators the source used, scores taken as zero."""

    def __init__(self, builder: Builder, axes: Axes4, dtype: ir.DataType) -> None:
        self._builder = builder
        self._axes = axes
        self._dtype = dtype

    def compact(self, mask: Mask) -> Laid:
        """The mask as (b or 1, n or 1, s or 1, t or 1)."""
        laid = self._canonical(self._emit(mask))
        dtype = self._builder.facts.dtype(laid.value)
        if dtype is not None and dtype != self._dtype:
            low = lowest_of(laid.value, self._dtype, ABSORBING, self._builder.facts) if _bits(dtype) > _bits(self._dtype) else 0.0
            if low is None:
                message = f"the mask is {dtype.name.lower()}, and MultiHeadAttention would take it as {self._dtype.name.lower()}"
                raise Refused("narrowed-mask", message)
            laid = Laid(narrowed(self._builder, laid.value, self._dtype, low), laid.axes)
        return laid

    def full(self, compact: Laid) -> ir.Value:
        """The same with both matrix axes at full length, as MultiHeadAttention demands."""
        wanted = length(self._axes.i), length(self._axes.j)
        dims = self._builder.facts.dims(compact.value)
        if dims is not None and dims[2:] == wanted:
            return compact.value
        assert dims is not None
        return self._builder.expand(compact.value, [*dims[:2], *wanted], [False, False, True, True])

    def _emit(self, mask: Mask, gain: float = 1.0) -> Laid:
        """Emits a part that is multiplied by `gain` further out."""
        if isinstance(mask, Term):
            return self._term(mask.laid.refined(), gain)
        if isinstance(mask, Total):
            return self._binary("Sub" if mask.negative else "Add", self._emit(mask.left, gain), self._emit(mask.right, gain))
        if isinstance(mask, Times):
            return self._times(mask, gain)
        if isinstance(mask, Select):
            return self._select(mask, gain)
        return self._floor(mask, gain)

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
            if kept == 0 and fill is not None and fill <= ABSORBING and axes is not None:
                return self._select(Select(Laid(condition, axes), keep_where, fill, None), gain)
        return laid

    def _times(self, mask: Times, gain: float) -> Laid:
        operator = "Div" if mask.divide else "Mul"
        if isinstance(mask.factor, Laid):
            return self._binary(operator, self._emit(mask.mask, _UNKNOWN_GAIN * gain), mask.factor.refined())
        inner = self._emit(mask.mask, abs(mask.factor) * gain)
        if mask.factor == 1.0:
            return inner
        return self._with_scalar(operator, inner, mask.factor)

    def _with_scalar(self, op: str, laid: Laid, number: float) -> Laid:
        dtype = self._builder.facts.dtype(laid.value)
        return Laid(self._builder.elementwise(op, [laid.value, self._builder.scalar(number, dtype)], dtype), laid.axes)

    def _lowest(self, dtype: ir.DataType, gain: float) -> ir.Value:
        """The lowest number that is still finite when it is multiplied by `gain`: it swallows any score."""
        return self._builder.scalar(-largest(dtype) / max(1.0, gain), dtype)

    def _select(self, mask: Select, gain: float) -> Laid:
        condition = mask.condition.refined()
        if mask.mask is None:
            kept, dtype = Laid(self._builder.scalar(0.0, self._dtype), ()), self._dtype
        else:
            kept = self._emit(mask.mask, gain)
            dtype = self._builder.facts.dtype(kept.value) or self._dtype
            condition, kept = self._alike(condition, kept)
        filled = self._builder.scalar(mask.fill, dtype) if math.isinf(mask.fill) else self._lowest(dtype, gain)
        chosen = [kept.value, filled] if mask.keep_where else [filled, kept.value]
        value = self._builder.elementwise("Where", [condition.value, *chosen], dtype)
        return Laid(value, _union(condition.axes, kept.axes))

    def _floor(self, mask: Floor, gain: float) -> Laid:
        """What falls to the floor becomes the lowest number, which swallows the score as the floor does."""
        inner = self._emit(mask.mask, gain)
        dtype = self._builder.facts.dtype(inner.value) or self._dtype
        low = self._builder.scalar(mask.low, dtype)
        above = self._builder.elementwise("Greater", [inner.value, low], ir.DataType.BOOL)
        lowest = self._lowest(dtype, gain)
        return Laid(self._builder.elementwise("Where", [above, inner.value, lowest], dtype), inner.axes)

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
