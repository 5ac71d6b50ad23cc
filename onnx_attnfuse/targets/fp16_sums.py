"""Masks of half types: numbers that a sum in float16 or bfloat16 rounds away, or takes beyond the type's range."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import split_added, understand
from onnx_attnfuse.attention.masks.fully_masked import SUMMED_IN_HALF
from onnx_attnfuse.attention.masks.intervals import Bounds, outcomes
from onnx_attnfuse.attention.masks.mask_terms import parts_of
from onnx_attnfuse.attention.masks.rounded_sums import lowest_sum
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Gain, Scaled
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph.dtypes import HALVES, largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import BuildContext
from onnx_attnfuse.thresholds import ABSORBS, MASKS, MASKS_APART, ROUNDS_HALF


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
