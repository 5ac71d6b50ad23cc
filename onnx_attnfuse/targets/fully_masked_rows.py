"""Fully masked rows: their results in the source, kept beside the fused operator.

Four cases need care, all measured (docs/targets.md): a source that guards NaN gives 0 there, one that zeroes masked weights
gives 0 there, one that replaces scores gives weights that no longer depend on them, and a float16 source whose mask is finite
gives the plain mean of the values, which no kernel that adds in float32 does.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning, kept_where
from onnx_attnfuse.attention.masks.fully_masked import Fills, MaskedKeys, choose_fills, masked_keys, takes_rows_level
from onnx_attnfuse.attention.masks.seen_keys import implied, sees_a_key
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Floored, Replaced, RowRule
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.thresholds import ABSORBS, ABSORBS_HALF, LEAST_EXPONENT, LEVELS_HALF, ROUNDS_HALF
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext, MaskEncoding
from onnx_attnfuse.targets.bias import BiasEmitter, bias_emitter, is_infinite
from onnx_attnfuse.targets.half_masks import adds_in_float32, check_half_sums, check_narrowed_sums, lowest_of, rounds_to_half
from onnx_attnfuse.targets.masked_rows import Refill, at_zero, chosen_above, chosen_in, level_rows, no_key, raised_in


@dataclasses.dataclass(frozen=True)
class Rows:
    """Corrections around a fused operator for fully masked rows; each test is laid out (b or 1, n or 1, s or 1, 1)."""

    bias: IndexedValue | None
    """The compact bias to use."""
    zero_query: IndexedValue | None = None
    """Rows whose scores must all be equal."""
    keeps_nan: bool = False
    """Their scores are NaN where they were: a number is added to some of them."""
    by_tables: bool = False
    """Whether the tables that rotate queries make them zero where they can: nothing reads and writes all queries once more."""
    refills: tuple[Refill, ...] = ()
    """Rows of the result that become a number."""
    assumes: tuple[AssumptionName, ...] = ()
    """Assumptions about rows without a key."""


def read_rows(
    spec: AttentionSpec,
    meaning: Meaning,
    encoding: MaskEncoding,
    context: BuildContext,
    *,
    zeroes: bool = False,
) -> Rows:
    """Emits the bias, if one is to be passed, and decides on corrections of fully masked rows.

    An encoding that is exact for some batches only, in which every row has a key, needs nothing.

    Args:
        spec: The attention.
        meaning: Its mask, understood.
        encoding: The form in which the mask is passed.
        context: The builder and its facts.
        zeroes: The operator gives 0 to rows that -inf or the lowest number of their type masks throughout.

    Raises:
        Refused: The source gives such rows something that cannot be expressed.
    """
    if encoding.when != "always":
        return Rows(None)
    if meaning.nan is not None:
        raise Refused(meaning.nan.code, meaning.nan.message)
    if spec.unshifted and any(context.bounds.of_term(bias)[0] < LEAST_EXPONENT for bias in meaning.biases):
        message = "a bias may be so low that exponentials lose their last digits, as no maximum is subtracted first"
        raise Refused("unshifted-exponentials", message)
    emitter = bias_emitter(spec, meaning, context) if spec.mask and encoding.mask == "bias" else None
    has_key = spec.sink is not None or sees_a_key(meaning, context.bounds)
    rules = [rule for rule in spec.row_rules if rule.condition is not None]
    fills: Fills = "lowest"
    assumes: tuple[AssumptionName, ...] = ()
    masked: MaskedKeys | None = None
    if emitter is not None and not has_key and not spec.unshifted:
        check_narrowed_sums(spec, context)
        absorbs = ABSORBS_HALF if rounds_to_half(spec, context) else ABSORBS  # from here down it leaves nothing of a score
        masked = masked_keys(spec.mask, context.reader, context.bounds, absorbs, spec)
        fills = choose_fills(masked, absorbs)
        assumes = _levels(masked, absorbs, context)
    if emitter is not None and spec.sink is None:
        check_half_sums(spec, context)
    compact = None if emitter is None else emitter.compact(spec.mask, fills)
    by_tables = "emptied-rotations" in context.device.provider.pays
    keeps_nan = not all(isinstance(step, Replaced) for step in spec.mask)
    rows = Rows(compact, assumes=assumes, keeps_nan=keeps_nan, by_tables=by_tables)
    if compact is not None and emitter is not None and not has_key:
        rows = _with_dead_rows(rows, compact, emitter, spec, fills, context, zeroes=zeroes)
        if masked is not None and context.device.provider.computes_in_float16:
            rows = _as_in_float32(rows, compact, masked, fills, spec, context)
    for rule in rules:
        assert rule.condition is not None
        if (
            rule.is_product
            and not has_key
            and len(rules) == len(spec.row_rules)
            and (spec.unshifted or lowest_of(spec, context) == -math.inf)
        ):
            raise Refused("weights-zeroed", "weights are multiplied by a mask, which leaves those of rows without a key NaN")
        if not (has_key and implied(meaning.allowed, kept_where(rule, context.reader))):
            rows = _refilled(rows, _kept_rows(rule, rule.condition, spec, meaning, context))
    return rows


def _with_dead_rows(
    rows: Rows,
    compact: IndexedValue,
    emitter: BiasEmitter,
    spec: AttentionSpec,
    fills: Fills,
    context: BuildContext,
    *,
    zeroes: bool,
) -> Rows:
    """Corrections for rows in which every number of the bias masks."""
    if spec.unshifted:
        if not spec.voided:
            message = "exponentials of a whole row may be 0, as no maximum is subtracted first"
            raise Refused("unshifted-exponentials", message)
        between = context.bounds.masked_from / 2  # a bias may be added to masked and to other scores
        return _refill_dead_rows(rows, compact, between, math.nan, context)
    if fills == "exact" or _leaves_scores(spec, context):
        rows = _zeroing(rows, emitter.replaced_rows(spec.mask), context.builder)
    if spec.dtype is not None and _is_floored_elsewhere(-largest(spec.dtype), spec, context):
        rows = _level_dead_rows(rows, compact, -largest(spec.dtype), context)
    guards = [rule for rule in spec.row_rules if rule.condition is None]
    bound = max((rule.lowest for rule in guards), default=-math.inf)
    lowest = lowest_of(spec, context)
    if zeroes:
        return _unless_zero(rows, compact, spec, fills, context)
    if lowest <= bound and (guards or not context.device.provider.keeps_nan_rows):
        rows = _refill_dead_rows(rows, compact, bound, 0.0 if guards else math.nan, context)
    levelled = _levelled_below(spec, lowest, context)
    return rows if levelled is None else _level_dead_rows(rows, compact, levelled, context)


def _levels(masked: MaskedKeys, absorbs: float, context: BuildContext) -> tuple[AssumptionName, ...]:
    """The assumption under which scores of rows without a key are absorbed by the masking number.

    Raises:
        Refused: It may not be.
    """
    if not takes_rows_level(masked, absorbs):
        return ()
    if not context.bounds.level_rows:
        raise Refused("rounded-mask", "rows without a key keep the part of their scores that the masking number leaves")
    return ("level-rows",)


def _is_floored_elsewhere(lowest: float, spec: AttentionSpec, context: BuildContext) -> bool:
    """Whether masked scores are held at a number that leaves nothing of them, where the lowest of a half type would."""
    reached = context.bounds.lowest(spec.mask)
    floors = [step.low for step in spec.mask if isinstance(step, Floored) and reached <= step.low]
    return lowest > ABSORBS and any(-math.inf < low < lowest or low > LEVELS_HALF for low in floors)


def _leaves_scores(spec: AttentionSpec, context: BuildContext) -> bool:
    """Whether the lowest number of the operator's type leaves something of scores that the source replaces."""
    finite = any(isinstance(step, Replaced) and not is_infinite(spec.mask, place) for place, step in enumerate(spec.mask))
    if not finite or spec.dtype is None or -largest(spec.dtype) <= ABSORBS:
        return False
    return _levelled_below(spec, lowest_of(spec, context), context) is None


def _levelled_below(spec: AttentionSpec, lowest: float, context: BuildContext) -> float | None:
    """The number that a float16 source gives the plain mean from, down; None if it never does, or the operator does the same."""
    if spec.dtype != ir.DataType.FLOAT16:
        return None
    if adds_in_float32(spec, context.builder.facts):
        return -largest(spec.dtype) / 2 if lowest <= ABSORBS else None  # the lowest number, plus other addends
    return LEVELS_HALF if rounds_to_half(spec, context) and lowest <= LEVELS_HALF else None


def _refilled(rows: Rows, refill: Refill) -> Rows:
    return dataclasses.replace(rows, refills=(*rows.refills, refill))


def _refill_dead_rows(rows: Rows, compact: IndexedValue, bound: float, number: float, context: BuildContext) -> Rows:
    """Rows without a number above `bound`: finite before the operator, given their number after it.

    The number is 0 where the source guards, and NaN where it does not: GPU kernels differ in their results for such rows.
    """
    test = no_key(compact, bound, context)
    bias, builder = rows.bias or compact, context.builder
    seen = chosen_above(compact, bound, context) if bias is compact else None
    bias = at_zero(bias, test.value, builder) if seen is None else chosen_in(compact, seen, test, builder)
    return _refilled(dataclasses.replace(rows, bias=bias), Refill(test, True, number))


def _unless_zero(rows: Rows, compact: IndexedValue, spec: AttentionSpec, fills: Fills, context: BuildContext) -> Rows:
    """Rows to which the operator gives 0: NaN, or the plain mean, where the source gives that."""
    builder, lowest = context.builder, lowest_of(spec, context)
    assert spec.dtype is not None
    guards = [rule for rule in spec.row_rules if rule.condition is None]
    if any(rule.lowest > -math.inf for rule in guards):
        return rows
    if lowest == -math.inf and not guards:
        rows = _refill_dead_rows(rows, compact, -math.inf, math.nan, context)
    replaced = [math.isinf(step.fill) for step in spec.mask if isinstance(step, Replaced)]
    if fills == "lowest" and (False in replaced or any(isinstance(step, Floored) for step in spec.mask)):
        lowest = min(lowest, -largest(spec.dtype))
    highest = LEVELS_HALF if rounds_to_half(spec, context) else -largest(spec.dtype)
    if lowest <= highest and not (len(replaced) == len(spec.mask) and all(replaced)):
        level = level_rows(compact, highest, context)
        raised = raised_in(rows.bias or compact, level.value, builder)
        rows = dataclasses.replace(rows if _keeps_scores(spec, context) else _zeroing(rows, level, builder), bias=raised)
    return rows


def _keeps_scores(spec: AttentionSpec, context: BuildContext) -> bool:
    """Whether the source, which adds in float32, leaves something of scores beside the lowest number of the operator's type."""
    lowest = context.bounds.lowest(spec.mask)
    return (
        lowest > ABSORBS and all(isinstance(step, Added) for step in spec.mask) and adds_in_float32(spec, context.builder.facts)
    )


def _level_dead_rows(rows: Rows, compact: IndexedValue, highest: float, context: BuildContext) -> Rows:
    """Rows of finite numbers up to `highest` only: all scores of such a row become 0, and the bias alone counts."""
    return _zeroing(rows, level_rows(compact, highest, context), context.builder)


def _as_in_float32(
    rows: Rows, compact: IndexedValue, masked: MaskedKeys, fills: Fills, spec: AttentionSpec, context: BuildContext
) -> Rows:
    """Rows without a key as float32 adds them, for a provider that adds in float16.

    Where float32 leaves nothing of any score, float16 leaves the large ones: the scores become 0, and so does a bias of one
    number, as float16 leaves something of what else is added to it. In float16 models float32 keeps scores that float16 rounds:
    the bias is raised until its largest number is 0, which softmax does not see.
    """
    builder, bias = context.builder, rows.bias or compact
    if spec.dtype == ir.DataType.FLOAT16:
        return dataclasses.replace(rows, bias=raised_in(bias, level_rows(compact, ROUNDS_HALF, context).value, builder))
    written = context.bounds.of(compact.value)[0]  # numbers below a floor are the lowest number there
    dead = _absorbed(masked, fills) | ({written} if -math.inf < written <= ABSORBS else set[float]())
    if spec.dtype != ir.DataType.FLOAT or not dead or rows.refills:
        return rows
    test = no_key(compact, ABSORBS, context)
    edited = at_zero if all(number == written for number in dead) else raised_in
    rows = _zeroing(rows, test, builder)
    bias = edited(bias, test.value, builder)
    return dataclasses.replace(rows, bias=bias)


def are_as_in_float32(spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> bool:
    """Whether a provider that adds in float16 gives rows without a key as float32 adds them, or there are none."""
    if not spec.mask or spec.sink is not None or sees_a_key(meaning, context.bounds):
        return True
    if spec.dtype == ir.DataType.FLOAT16:
        return context.bounds.lowest(spec.mask) > ROUNDS_HALF
    return not _absorbed(masked_keys(spec.mask, context.reader, context.bounds), "lowest")


def _absorbed(masked: MaskedKeys, fills: Fills) -> frozenset[float]:
    """Numbers of a bias in rows without a key that leave nothing of a score in float32; none if all of them are -inf."""
    lowest = -largest(ir.DataType.FLOAT)
    kept = [key.scored or fills == "exact" or key.high == -math.inf for key in masked.keys]
    numbers = [(key.low, key.high) if keep else (lowest, lowest) for key, keep in zip(masked.keys, kept, strict=True)]
    found = frozenset(number for pair in numbers if pair[0] <= ABSORBS for number in pair)
    return frozenset() if found <= {-math.inf} else found


def _zeroing(rows: Rows, fully_masked: IndexedValue, builder: Builder) -> Rows:
    """Further rows whose queries are set to zero; all tests are laid out alike."""
    if rows.zero_query is not None:
        axes = tuple(one or other for one, other in zip(rows.zero_query.axes, fully_masked.axes, strict=True))
        fully_masked = IndexedValue(builder.elementwise("Or", [rows.zero_query.value, fully_masked.value]), axes)
    return dataclasses.replace(rows, zero_query=fully_masked)


def _kept_rows(rule: RowRule, condition: IndexedValue, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> Refill:
    """The rows that a zeroing of weights leaves nothing of: those without a key, if it zeroes exactly the masked keys."""
    builder = context.builder
    condition = condition.refined()
    columns = set(leaves(spec.key_axis))
    if not any(columns & set(axis) for axis in condition.axes):
        return Refill(condition, not rule.keep_where)
    if any(map(context.bounds.may_mask, meaning.biases)) or kept_where(rule, context.reader) != meaning.allowed:
        name = condition.value.name
        raise Refused("weights-zeroed", f"the weights are set to 0 by '{name}', which is not the mask of the scores")
    value = builder.cast(condition.value, ir.DataType.BOOL)
    if not rule.keep_where:
        value = builder.elementwise("Not", [value])
    place = next(index for index, axis in enumerate(condition.axes) if columns & set(axis))
    kept = builder.holds_along(value, [place], by=context.device.provider.any_by)
    axes = tuple(() if index == place else axis for index, axis in enumerate(condition.axes))
    return Refill(IndexedValue(kept, axes), False)
