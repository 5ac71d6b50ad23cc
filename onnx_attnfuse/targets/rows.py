"""Rows that see no key: what the source makes of them, kept beside the fused operator.

Three cases need care, all measured (docs/targets.md): a source that guards NaN gives 0 there, one that zeroes masked weights
gives 0 there, and a float16 source whose mask is finite gives the plain mean of the values, which no kernel that adds in
float32 does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import onnx_ir as ir

from onnx_attnfuse.axes.arrange import arrange
from onnx_attnfuse.axes.factors import Axes, Axis, leaves, length
from onnx_attnfuse.axes.views import Laid
from onnx_attnfuse.graph.build import Builder, largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.masks.bounds import Bounds
from onnx_attnfuse.masks.meaning import Meaning, kept_where
from onnx_attnfuse.masks.walk import elements_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import FORBIDS, AttentionSpec, Axes4, Mask, RowRule, ScaleValue, Select
from onnx_attnfuse.targets.bias import ABSORBING
from onnx_attnfuse.targets.emitted import Workbench

_LOWEST = -3.4028234663852886e38
_KEEPS, _SWALLOWS = -2e4, -1e9
"""Between these, adding the number rounds a float32 score visibly but does not swallow it."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What to do around the operator; each test is laid out (b or 1, n or 1, s or 1, 1)."""

    bias: Laid | None
    """The compact bias to use."""
    zero_query: Laid | None = None
    """Rows whose scores must all be equal."""
    refills: tuple[Refill, ...] = ()
    """Rows of the result that become a number."""


@dataclasses.dataclass(frozen=True)
class Refill:
    """Rows of the result that become `number` where `test` is `where`."""

    test: Laid
    where: bool
    number: float = 0.0


def read_rows(spec: AttentionSpec, meaning: Meaning, compact: Laid | None, bench: Workbench, *, zeroes: bool = False) -> Rows:
    """Decides what rows without a legal key need, and emits the tests for it.

    Args:
        spec: The attention.
        meaning: Its mask, understood.
        compact: The bias that is to be handed over, if one is.
        bench: What to build with.
        zeroes: The operator gives 0 to rows that -inf or the lowest number of their type masks throughout.

    Raises:
        Refused: The source gives such rows something that cannot be expressed.
    """
    builder, bounds = bench.builder, bench.bounds
    rows = Rows(compact)
    if (spec.sink is not None or _see_a_key(meaning, bench)) and all(rule.condition is None for rule in spec.row_rules):
        return rows
    lowest = bounds.lowest(spec.mask)
    _check_fills(spec.mask, bounds)
    _check_rounding(meaning)
    for rule in spec.row_rules:
        if rule.condition is not None:
            rows = _refilled(rows, _kept_rows(rule, rule.condition, spec, meaning, bench))
    if compact is None:
        return rows
    guards = [rule for rule in spec.row_rules if rule.condition is None]
    lowest_counts = any(rule.lowest_counts for rule in guards)
    if zeroes:
        return _unless_zero(rows, compact, spec, meaning, bench)
    if lowest <= (_LOWEST if lowest_counts else -math.inf) and (guards or bench.device.ep == "cuda"):
        rows = _refill_dead_rows(rows, compact, lowest_counts, 0.0 if guards else math.nan, builder)
    levelled = _levelled_below(spec, lowest, bench)
    return rows if levelled is None else _level_dead_rows(rows, compact, levelled, builder)


def _levelled_below(spec: AttentionSpec, lowest: float, bench: Workbench) -> float | None:
    """The number that a float16 source gives the plain mean from, down; None if it never does, or the operator does the same."""
    if spec.dtype != ir.DataType.FLOAT16:
        return None
    if _adds_in_float32(spec, bench.builder.facts):
        return -largest(spec.dtype) / 2 if lowest <= ABSORBING else None  # the lowest number, plus what else is added
    return FORBIDS if bench.device.rounds_float16 and lowest <= FORBIDS else None


def _adds_in_float32(spec: AttentionSpec, facts: Facts) -> bool:
    """Whether the scores of a half type are float32, and so is what is added to them."""
    softmax = [node.inputs[0] for node in spec.nodes if node.op_type == "Softmax"]
    return any(value is not None and facts.dtype(value) == ir.DataType.FLOAT for value in softmax)


def _see_a_key(meaning: Meaning, bench: Workbench) -> bool:
    """Whether every row certainly sees a key: the predicates leave one, and nothing that is added can forbid it."""
    added = [item.value for bias in meaning.biases for item in elements_of(bias)]
    return meaning.rows_alive and all(bench.bounds.of(value)[0] > FORBIDS for value in added)


def _refilled(rows: Rows, refill: Refill) -> Rows:
    return dataclasses.replace(rows, refills=(*rows.refills, refill))


def _has_key(compact: Laid, operator: str, bound: float, builder: Builder) -> ir.Value:
    """Rows in which some mask value compares to `bound` as `operator` says.

    Compared first and reduced after: on a GPU the maximum of a row of -inf may come out as the lowest number.
    """
    wide = builder.cast(compact.value, ir.DataType.FLOAT)
    seen = builder.elementwise(operator, [wide, builder.scalar(bound, ir.DataType.FLOAT)], ir.DataType.BOOL)
    return builder.cast(builder.reduce("ReduceMax", builder.cast(seen, ir.DataType.FLOAT), [3]), ir.DataType.BOOL)


def _refill_dead_rows(rows: Rows, compact: Laid, lowest_counts: bool, number: float, builder: Builder) -> Rows:
    """Rows of -inf only (or of the lowest number): made finite before the operator, given their number after it.

    The number is 0 where the source guards, and NaN where it does not: GPU kernels differ in what they make of such rows.
    """
    alive = _has_key(compact, "Greater" if lowest_counts else "GreaterOrEqual", _LOWEST, builder)
    dead = builder.elementwise("Not", [alive], ir.DataType.BOOL)
    test = Laid(dead, (*compact.axes[:3], ()))
    return _refilled(dataclasses.replace(rows, bias=_finite(rows.bias or compact, dead, builder)), Refill(test, True, number))


def _unless_zero(rows: Rows, compact: Laid, spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Rows:
    """Rows to which the operator gives 0: NaN, or the plain mean, where the source gives that."""
    builder, lowest = bench.builder, bench.bounds.lowest(spec.mask)
    assert spec.dtype is not None
    guards = [rule for rule in spec.row_rules if rule.condition is None]
    if any(rule.lowest_counts for rule in guards):
        return rows
    if lowest == -math.inf and not guards:
        rows = _refill_dead_rows(rows, compact, False, math.nan, builder)
    infinite = meaning.fills <= {-math.inf} and not meaning.biases
    wide = _adds_in_float32(spec, builder.facts)
    rounded = spec.dtype == ir.DataType.FLOAT16 and bench.device.rounds_float16 and not wide
    highest = FORBIDS if rounded else -largest(spec.dtype)
    if lowest <= highest and not infinite:
        rows = _level_dead_rows(rows, compact, highest, builder)
    return rows


def _finite(compact: Laid, dead: ir.Value, builder: Builder) -> Laid:
    dtype = builder.facts.dtype(compact.value)
    zero = builder.scalar(0.0, dtype)
    return Laid(builder.elementwise("Where", [dead, zero, compact.value], dtype), compact.axes)


def _level_dead_rows(rows: Rows, compact: Laid, highest: float, builder: Builder) -> Rows:
    """Rows of finite numbers up to `highest` only: all scores of such a row become 0."""
    alive = _has_key(compact, "Greater", highest, builder)
    finite = _has_key(compact, "GreaterOrEqual", _LOWEST, builder)
    dead = builder.elementwise("And", [finite, builder.elementwise("Not", [alive], ir.DataType.BOOL)], ir.DataType.BOOL)
    bias = _finite(rows.bias or compact, dead, builder)
    return dataclasses.replace(rows, bias=bias, zero_query=Laid(dead, (*compact.axes[:3], ())))


def _kept_rows(rule: RowRule, condition: Laid, spec: AttentionSpec, meaning: Meaning, bench: Workbench) -> Refill:
    """The rows that a zeroing of weights leaves nothing of: those without a key, if it zeroes exactly what the mask forbids."""
    builder = bench.builder
    condition = condition.refined()
    columns = set(leaves(spec.key_axis))
    if not any(columns & set(axis) for axis in condition.axes):
        return Refill(condition, not rule.keep_where)
    if kept_where(rule, bench.reader) != meaning.allowed:
        name = condition.value.name
        raise Refused("weights-zeroed", f"the weights are set to 0 by '{name}', which is not the mask of the scores")
    value = builder.cast(condition.value, ir.DataType.BOOL)
    if not rule.keep_where:
        value = builder.elementwise("Not", [value], ir.DataType.BOOL)
    number = builder.cast(value, ir.DataType.FLOAT)
    place = next(index for index, axis in enumerate(condition.axes) if columns & set(axis))
    kept = builder.cast(builder.reduce("ReduceMax", number, [place]), ir.DataType.BOOL)
    axes = tuple(() if index == place else axis for index, axis in enumerate(condition.axes))
    return Refill(Laid(kept, axes), False)


def _check_fills(mask: Mask | None, bounds: Bounds, outer: float = 0.0) -> None:
    """A fill that does not swallow the score is exact only where nothing else forbids keys."""
    if isinstance(mask, Select):
        others = min(bounds.lowest(mask.mask), outer)
        if mask.fill > ABSORBING and others <= FORBIDS:
            raise Refused("weak-fill", f"scores are replaced by {mask.fill:g} and masked again; rows without a key would differ")
        _check_fills(mask.mask, bounds, min(outer, mask.fill))
        return
    for name in ("mask", "left", "right"):
        inner: Mask | None = getattr(mask, name, None)
        other = {"left": "right", "right": "left"}.get(name)
        if inner is not None:
            _check_fills(inner, bounds, min(outer, bounds.lowest(getattr(mask, other))) if other else outer)


def _check_rounding(meaning: Meaning) -> None:
    """A row filled with a large number keeps its scores rounded to it, and so depends on the order of additions."""
    rounding = [fill for fill in meaning.fills if _SWALLOWS < fill < _KEEPS]
    if rounding and meaning.biases:
        raise Refused("rounded-mask", f"with {rounding[0]:g} added, rows without a key depend on the order of float32 additions")


def apply_rows(builder: Builder, value: ir.Value, channels: Axis, refill: Refill, axes: Axes4) -> ir.Value:
    """`value` of shape (b, s, n·channels) with the number of `refill` in its rows."""
    number = builder.scalar(refill.number, builder.facts.dtype(value))

    def fill(value: ir.Value, test: ir.Value) -> ir.Value:
        chosen = [number, value] if refill.where else [value, number]
        return builder.elementwise("Where", [test, *chosen], builder.facts.dtype(value))

    return by_rows(builder, value, channels, refill.test, axes, fill)


def scale_rows(builder: Builder, value: ir.Value, channels: Axis, scale: ScaleValue, axes: Axes4) -> ir.Value:
    """`value` of shape (b, s, n·channels) times a scale that is no plain number."""

    def multiply(value: ir.Value, factor: ir.Value) -> ir.Value:
        dtype = builder.facts.dtype(value)
        factor = factor if dtype is None else builder.cast(factor, dtype)
        return builder.elementwise("Div" if scale.divide else "Mul", [value, factor], dtype)

    return by_rows(builder, value, channels, scale.laid, axes, multiply)


def by_rows(
    builder: Builder,
    value: ir.Value,
    channels: Axis,
    operand: Laid,
    axes: Axes4,
    combine: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Combines `value` of shape (b, s, n·channels) with an operand that has no channels, head by head if it differs by head."""
    operand = operand.refined()
    present = {leaf for axis in operand.axes for leaf in axis}
    batch, rows = (axis if present & set(axis) else () for axis in (axes.b, axes.i))
    dims = [length(axes.b), length(axes.i)]
    target: Axes = (batch, rows, ())
    if present & set(axes.n):
        value = builder.reshape(value, [*dims, length(axes.n), length(channels)])
        target = (batch, rows, axes.n, ())
    result = combine(value, operand.value if not operand.axes else arrange(builder, operand, target))
    builder.facts.copy(value, result)
    return builder.reshape(result, [*dims, length((*axes.n, *channels))])
