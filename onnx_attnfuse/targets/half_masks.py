"""Masks of half types: masks of float32 that lose nothing in one, and numbers that a sum in float16 or bfloat16 rounds away.

Sources that add their masks in float32, as mixed precision does, make them of numbers of the half type and of fills. A number is
itself in the half type; a fill that swallows any score becomes the lowest number, and what rows without a key need is seen to
elsewhere (`fully_masked_rows`). A sum in a half type may also go beyond its range.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import split_added, understand
from onnx_attnfuse.attention.masks.fully_masked import SUMMED_IN_HALF
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import parts_of
from onnx_attnfuse.attention.masks.rounded_sums import lowest_sum
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Gain, Scaled
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, constant_array, is_standard
from onnx_attnfuse.graph.dtypes import HALVES, largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import REARRANGES, REPEATS
from onnx_attnfuse.graph.thresholds import ABSORBS, MASKS, MASKS_APART, ROUNDS_HALF
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext

_VIEWS = REARRANGES | REPEATS | {"Gather", "Slice"}
_JOINING = frozenset(["Add", "Concat", "Max", "Min"])
_MAX_VALUES_SEEN = 64


def lowest_kept(value: ir.Value, dtype: ir.DataType, swallows: float, facts: Facts) -> float | None:
    """How low a wider value may be, if all it is made of is numbers of a half type, or low enough to swallow any score.

    Args:
        value: The value to narrow.
        dtype: The half type.
        swallows: From here down a number swallows any score.
        facts: Facts about the graph.

    Returns:
        How low it may be at least, as far as constants and sums tell, 0 or less; None if something else is in it.
    """
    low, pending, seen = 0.0, [value], {value}
    for item in pending:
        if len(seen) > _MAX_VALUES_SEEN:
            return None
        read = _read(item, dtype, facts)
        if read is None:
            numbers = _numbers(item, facts)
            if numbers is None or not _are_of(numbers, dtype, swallows):
                return None
            low = min(low, float(numbers.min(initial=0)))
            continue
        node = item.producer()
        if read and node is not None and node.op_type == "Add":
            low = min(low, -2 * largest(dtype))
        fresh = [part for part in read if part not in seen]
        seen.update(fresh)
        pending.extend(fresh)
    return low


def _read(value: ir.Value, dtype: ir.DataType, facts: Facts) -> list[ir.Value] | None:
    """The values that a value takes its numbers from; none if it is of the half type already, None if unknown or constant."""
    node = value.producer()
    if facts.dtype(value) == dtype:
        return []
    if not is_standard(node):
        return None
    parts = [part for part in node.inputs if part is not None]
    if node.op_type == "Cast":
        source = facts.dtype(parts[0])
        return [] if source in {dtype, ir.DataType.BOOL} else [parts[0]] if source == ir.DataType.FLOAT else None
    if node.op_type == "Where":
        return parts[1:]
    if node.op_type in _JOINING:
        return parts
    return parts[:1] if node.op_type in _VIEWS else None


def _numbers(value: ir.Value, facts: Facts) -> Array | None:
    array = constant_array(value)
    number = facts.number(value) if array is None else None
    return np.asarray(number) if number is not None else array


def _are_of(numbers: Array, dtype: ir.DataType, swallows: float) -> bool:
    kept = numbers[numbers > swallows].astype(np.float64)
    return bool((kept.astype(dtype.numpy()).astype(np.float64) == kept).all())


def narrowed(builder: Builder, value: ir.Value, dtype: ir.DataType, low: float) -> ir.Value:
    """The value in the half type; numbers below it become its lowest, -inf stays.

    Args:
        builder: The builder.
        value: A value that `lowest_kept` has an answer for.
        dtype: The half type.
        low: That answer.
    """
    wide = builder.facts.dtype(value)
    if low >= -largest(dtype) or wide is None:
        return builder.cast(value, dtype)
    bounded = builder.elementwise("Max", [value, builder.scalar(-largest(dtype), wide)])
    finite = builder.elementwise("GreaterOrEqual", [value, builder.scalar(-largest(wide), wide)])
    return builder.cast(builder.elementwise("Where", [finite, bounded, value]), dtype)


def check_narrowed_sums(spec: AttentionSpec, context: BuildContext) -> None:
    """Rows without a key depend on digits of a float32 mask that a half type does not keep.

    Beside a mask number it keeps nothing of a bias, and what lies below its range is no lower than its lowest number.

    Raises:
        Refused: The source adds such a mask.
    """
    sums = [step for step in spec.mask if isinstance(step, Added)]
    types = {context.builder.facts.dtype(step.indexed.value) for step in sums}
    if spec.dtype is None or spec.dtype not in HALVES or ir.DataType.FLOAT not in types:
        return
    parts = [split_added(step, Gain(), context.reader, MASKS) for step in sums]
    biases = [bias for part in parts for bias in part.biases]
    numbers = {fill for part in parts for fill in part.fills}
    finite = sorted(number for number in numbers if number > ABSORBS)
    inside = next(filter(None, (_mask_beside_bias(bias, context.bounds) for bias in biases)), None)
    beside = finite[0] if finite and biases else inside
    if beside is not None:
        message = f"a bias and {beside:g} are summed in float32, of which a half type keeps nothing in rows without a key"
        raise Refused("narrowed-mask", message)
    lowest = sum(lowest_sum(step, context.reader, context.bounds) for step in sums)
    below = any(context.bounds.of_term(bias)[0] < -largest(spec.dtype) for bias in biases)
    if below or (finite and min(finite[0], lowest) < MASKS_APART - largest(spec.dtype) and {lowest} != numbers):
        message = "a half type has nothing below its lowest number, so that rows without a key would mix masked and other keys"
        raise Refused("narrowed-mask", message)


def check_half_sums(spec: AttentionSpec, context: BuildContext) -> None:
    """A row may have nothing but numbers that mask no key and yet round a float16 score, or its sum with a bias, visibly.

    Raises:
        Refused: The source adds such numbers and something else.
    """
    sums = [step for step in spec.mask if isinstance(step, (Added, Scaled))]
    if spec.dtype != ir.DataType.FLOAT16 or adds_in_float32(spec, context.builder.facts):
        return
    meaning = understand(spec, context.reader, ROUNDS_HALF)
    masked_from = context.bounds.masked_from
    soft = any(fill > masked_from for fill in meaning.fills) and not meaning.rows_see_a_key
    inside = any(masked_from < low <= ROUNDS_HALF for bias in meaning.biases for low in outcomes(bias))  # of a maximum, say
    if inside or (soft and (len(sums) > 1 or meaning.biases)):
        raise Refused("rounded-mask", SUMMED_IN_HALF)


def lowest_of(spec: AttentionSpec, context: BuildContext) -> float:
    """The lowest number that the mask adds to a score; -inf where several in float16 come to less than it holds."""
    lowest = context.bounds.lowest(spec.mask)
    narrow = spec.dtype == ir.DataType.FLOAT16 and not adds_in_float32(spec, context.builder.facts)
    return -math.inf if narrow and lowest < -largest(ir.DataType.FLOAT16) else lowest


def rounds_to_half(spec: AttentionSpec, context: BuildContext) -> bool:
    """Whether the source's masked scores are rounded to float16 on the device (decision 0003)."""
    half = spec.dtype == ir.DataType.FLOAT16 and not adds_in_float32(spec, context.builder.facts)
    return half and bool(context.device.provider.rounds_float16)


def adds_in_float32(spec: AttentionSpec, facts: Facts) -> bool:
    """Whether the scores of a half type are float32 where masks are added to them."""
    masked = [node.outputs[0] for node in spec.nodes if node.op_type in {"Add", "Sub", "Where", "Max"}]
    return bool(masked) and all(facts.dtype(value) == ir.DataType.FLOAT for value in masked)


def _mask_beside_bias(part: Term, bounds: Bounds) -> float | None:
    """A finite mask number that some sum inside of a term has beside numbers that mask nothing."""
    if part.data == "Add":
        spans = [bounds.of_term(argument) for argument in part.args]
        low = min(low for low, _ in spans)
        if ABSORBS < low <= MASKS and any((low > MASKS and (low, high) != (0, 0)) or high > 0 for low, high in spans):
            return low
    return next(filter(None, (_mask_beside_bias(inner, bounds) for inner in parts_of(part))), None)
