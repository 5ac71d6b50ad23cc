"""Rows in which every key is masked: whether there can be any, and their result in the source.

A key is *masked* if its score is replaced by a large negative number, or has one added. As long as a row has one ordinary key,
how low the others are does not matter. In a fully masked row it does: softmax sees the numbers themselves. `seen_keys.sees_a_key`
says whether such rows can be excluded. If not, `masked_keys` sorts the keys by the steps that mask them:

    where(causal, scores, -1e9) + (1 - padding) * -1e4

    masked by                   value before Softmax
    the first step              -1e9              no longer depends on the score
    the second                  score - 1e4
    both                        -1.0001e9         no longer depends on the score

A fused operator adds one number to each score, so it is exact in fully masked rows only under the conditions of `choose_fills`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import element, keep_condition, split_added
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds, Interval, added
from onnx_attnfuse.attention.masks.operators import branches, float_of
from onnx_attnfuse.attention.masks.rounded_sums import (
    ROUNDED_AWAY,
    is_near_next_float,
    is_scaling,
    is_summed_in_half,
    rounded_among,
    rounded_before_scaling,
)
from onnx_attnfuse.attention.masks.seen_keys import implied, rows_keep_a_key
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Floored, Gain, Mask, Replaced, Scaled, step_gains
from onnx_attnfuse.certify.terms import Term, walk
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.thresholds import (
    ABOVE_NEARLY_LOWEST,
    ABSORBS,
    LEVELS_HALF,
    LOWEST_FLOAT32,
    MASKS,
    MASKS_APART,
    NEARLY_LOWEST,
    ROUNDS,
    ROUNDS_ALL,
)
from onnx_attnfuse.reasons import Refused

Fills = Literal["lowest", "exact"]
"""The fill of replaced scores in a fused operator's bias: the lowest number, which leaves nothing of the score; or the source's
own fill, with the queries of rows that are replaced throughout set to zero."""

SUMMED_IN_HALF = "a mask is summed with a bias, or multiplied, in float16, which the device computes in float32 in some places"
DISAGREEING = (
    "of rows that the lowest number masks throughout ONNX Runtime gives 0 up to 1.31, and something else at opset 25 since"
)
_LOWEST_ADDED = 25
_MAX_EVENTS = 6
_ROUNDED_AWAY_HALF = 4.0
"""Scores up to this are rounded away by numbers from `LEVELS_HALF` down, where sums are rounded to float16."""
_DIGITS = 1e-6
"""Numbers that differ by less than this part of them may be the same in float32."""


@dataclasses.dataclass(frozen=True)
class MaskedKey:
    """Keys that the same steps mask."""

    scored: bool
    """Whether their value before Softmax still depends on the score."""
    low: float
    high: float
    """The interval of the number that is added to the score, or replaces it."""
    reordered: bool = True
    """Whether its weight may depend on the order of additions: two or more differ from 0, and no key certainly outweighs it."""

    def absorbs(self, limit: float = ABSORBS) -> bool:
        """Whether the number leaves nothing of a score that it is added to."""
        return self.high <= limit

    def rounds(self, gain: float) -> bool:
        """Whether the rest of an ordinary score may depend on the order in which numbers were added.

        Args:
            gain: The factor of the numbers after the additions.
        """
        low, high = self.low / gain, self.high / gain
        return low > ROUNDS_ALL or is_near_next_float(low) or is_near_next_float(high)


@dataclasses.dataclass(frozen=True)
class MaskedKeys:
    """Every combination of steps that can mask a key, and the other facts about fully masked rows."""

    keys: tuple[MaskedKey, ...]
    biased: bool = False
    """An ordinary bias is added after scores were replaced."""
    added_later: bool = False
    """Anything is added after scores were replaced."""
    floored: bool = False
    """Masked scores are held above a number."""
    additions: int = 0
    """How often a number is added or multiplied, each time rounding the sum."""
    rounded: float | None = None
    """A number whose sum with a score is rounded visibly before something is added to the sum or multiplies it."""
    summed_in_half: bool = False
    """A mask of float16 is summed with something else, or multiplied."""
    scaled: bool = False
    """Masked scores are multiplied."""
    weakest: float = -math.inf
    """The highest number that is known to be added to scores in order to mask them."""
    soft: float | None = None
    """A number that is added to scores of some keys, masks none, and yet is too large to be rounded away beside one that does."""
    gain: float = 1.0
    """The factor of all added numbers after the additions, without the terms that they absorb."""


@dataclasses.dataclass(frozen=True)
class _Event:
    """One step that masks some keys: `kept` is where it does not, None if that is not known."""

    step: int
    kept: Term | None
    number: Interval
    replaces: bool = False


def masked_keys(
    mask: Mask, reader: Reader, bounds: Bounds, absorbs: float = ABSORBS, spec: AttentionSpec | None = None
) -> MaskedKeys:
    """Sorts the masked keys of a mask by the steps that mask them.

    Args:
        mask: The steps.
        reader: Reads their values.
        bounds: Intervals of their values.
        absorbs: From here down an added number leaves nothing of a score; higher where sums are rounded to a half type.
        spec: The attention, to tell which keys others in their row outweigh.

    Raises:
        Refused: Too many steps mask keys (`many-masks`), or a floor lies among the numbers of masked keys (`floor-near-fill`).
    """
    events, biased = _events(mask, reader, bounds)
    if len(events) > _MAX_EVENTS:
        raise Refused("many-masks", f"{len(events)} steps mask the scores; which rows are fully masked is unknown")
    keys = {active: _key(mask, active, bounds, absorbs) for active in _combinations(events)}
    if spec is not None and absorbs == ABSORBS and all(_is_certain(event.kept) for event in events):
        always = _always_adding(mask, reader)
        keys = {
            active: dataclasses.replace(key, reordered=_adds_often(active, always) and not _is_outweighed(active, keys, spec))
            for active, key in keys.items()
        }
    first = next((place for place, step in enumerate(mask) if isinstance(step, (Replaced, Floored))), len(mask))
    later = any(isinstance(step, Added) for step in mask[first:])
    floored = any(isinstance(step, Floored) for step in mask)
    rounding = [step for step in mask if isinstance(step, Added) or is_scaling(step)]
    scaled = any(isinstance(step, Scaled) for step in mask)
    others = mask if absorbs == ABSORBS else rounding  # a device that rounds all sums does so between other steps, too
    summed = any(is_summed_in_half(step, others, reader, bounds) for step in mask)
    fills, small = _added_numbers(mask, reader, MASKS), ROUNDED_AWAY if absorbs == ABSORBS else _ROUNDED_AWAY_HALF
    return MaskedKeys(
        tuple(dict.fromkeys(keys.values())),
        biased,
        later,
        floored,
        len(rounding),
        rounded_before_scaling(mask, reader, bounds)
        or (rounded_among(mask, reader, bounds, absorbs) if len(rounding) > 1 else None),
        summed,
        scaled,
        weakest=max(fills, default=-math.inf),
        soft=min(_added_numbers(mask, reader, -small) - fills, default=None),
        gain=_gain(mask),
    )


def _added_numbers(mask: Mask, reader: Reader, limit: float) -> frozenset[float]:
    """The numbers from `limit` down that are known to be added to scores, times the factor of later steps."""
    sums = [(step, gain) for step, gain in zip(mask, step_gains(mask), strict=True) if isinstance(step, Added)]
    return frozenset(fill for step, gain in sums for fill in split_added(step, gain, reader, limit).fills)


def _gain(mask: Mask) -> float:
    gains = {gain for step, gain in zip(mask, step_gains(mask), strict=True) if isinstance(step, Added)}
    only = gains.pop() if len(gains) == 1 else Gain()
    return 1.0 if only.values else abs(only.number)


def _refuse_rounding(number: float | None) -> None:
    if number is not None:
        message = f"with {number:g} added, fully masked rows depend on the order of float32 additions"
        raise Refused("rounded-mask", message)


def choose_fills(masked: MaskedKeys, absorbs: float = ABSORBS) -> Fills:
    """How replaced scores are written so that fully masked rows come out as in the source.

    Args:
        masked: The masked keys.
        absorbs: From here down an added number leaves nothing of a score; higher where sums are rounded to a half type.

    Raises:
        Refused: No way is exact (`weak-fill`), or it depends on the order in which numbers are added (`rounded-mask`).
    """
    replaced = [key for key in masked.keys if not key.scored]
    scored = [key for key in masked.keys if key.scored]
    soft = masked.soft is not None
    rounding = [
        key.high
        for key in scored
        if key.reordered and absorbs < key.high and key.high / masked.gain < ROUNDS and (soft or key.rounds(masked.gain))
    ]
    rounding = rounding if masked.additions > 1 else []
    _refuse_rounding(rounding[0] if rounding else masked.rounded)
    leaves = soft or masked.weakest > LEVELS_HALF or any((key.high if masked.scaled else key.low) > LEVELS_HALF for key in scored)
    if (masked.summed_in_half or (soft and absorbs != ABSORBS)) and (absorbs == ABSORBS or leaves):
        raise Refused("rounded-mask", SUMMED_IN_HALF)
    for key, other in itertools.product(replaced, scored):
        if not key.absorbs(absorbs) and not other.low >= key.high + MASKS_APART:
            message = f"scores are replaced by {key.high:g} and others are masked by adding; fully masked rows would mix both"
            raise Refused("weak-fill", message)
    alike = len({_in_single(number) for key in replaced for number in (key.low, key.high) if number != -math.inf}) <= 1
    infinite = masked.added_later and any(key.low == -math.inf for key in replaced)
    if not masked.biased and not infinite and alike and all(itertools.starmap(_stays_below, itertools.product(replaced, scored))):
        return "lowest"
    if masked.floored:
        message = "scores are clamped from below and replaced by another number; fully masked rows would mix both"
        raise Refused("weak-fill", message)
    return "exact"


def _stays_below(replaced: MaskedKey, scored: MaskedKey) -> bool:
    """Whether two masked keys share a row's weight as they did once the one that was replaced has the lowest number."""
    if replaced.high <= NEARLY_LOWEST:
        return True
    above = scored.low > replaced.high and scored.low >= replaced.high + max(MASKS_APART, _DIGITS * -replaced.high)
    return above and scored.low >= ABOVE_NEARLY_LOWEST


def takes_rows_level(masked: MaskedKeys, absorbs: float = ABSORBS) -> bool:
    """Whether fully masked rows come out as in the source only where their scores are small (`level-rows`).

    Args:
        masked: The masked keys.
        absorbs: From here down an added number leaves nothing of a score; higher where sums are rounded to a half type.
    """
    finite = [key for key in masked.keys if key.scored and key.high > -math.inf]
    if absorbs != ABSORBS:
        return any(key.low <= LEVELS_HALF for key in finite)
    return masked.additions > 1 and any(key.low <= ROUNDS_ALL and absorbs < key.high for key in finite)


def _events(mask: Mask, reader: Reader, bounds: Bounds) -> tuple[list[_Event], bool]:
    """The steps that mask keys, and whether an ordinary bias follows one that replaces scores."""
    events: list[_Event] = []
    biased = False
    for place, (step, gain) in enumerate(zip(mask, step_gains(mask), strict=True)):
        if isinstance(step, Replaced):
            fill = step.fill * gain.number
            low, high = sorted((fill * number for number in bounds.gain(gain)), key=float)
            events.append(_Event(place, keep_condition(step.condition, step.keep_where, reader), (low, high), replaces=True))
        elif isinstance(step, Added):
            parts = split_added(step, gain, reader, MASKS)
            if parts.fills:
                number = (-math.inf, MASKS) if parts.adds_unread_amount else (min(parts.fills), max(parts.fills))
                events.append(_Event(place, parts.allowed, number))
            lows = [bounds.of_term(bias)[0] for bias in parts.biases if bounds.may_mask(bias)]
            events += [_Event(place, None, (low, MASKS)) for low in lows]
            earlier = any(isinstance(other, (Replaced, Floored)) for other in mask[:place])
            biased |= bool(parts.biases) and earlier
    return events, biased


def _combinations(events: Sequence[_Event]) -> Iterator[tuple[_Event, ...]]:
    """Every set of steps that can mask one key together: who is masked by one is masked by those that it implies."""
    pairs = [
        (one, other)
        for one, other in itertools.permutations(events, 2)
        if one.kept is not None and other.kept is not None and implied(other.kept, one.kept)
    ]
    for count in range(1, len(events) + 1):
        for active in itertools.combinations(events, count):
            if not any(one in active and other not in active for one, other in pairs):
                yield active


def _always_adding(mask: Mask, reader: Reader) -> frozenset[int]:
    """The steps that add something other than 0, or multiply, where they mask no key."""
    found = set[int]()
    for place, (step, gain) in enumerate(zip(mask, step_gains(mask), strict=True)):
        parts = split_added(step, gain, reader, MASKS) if isinstance(step, Added) else None
        if is_scaling(step) or (parts is not None and (parts.biases or parts.adds_unread_amount)):
            found.add(place)
    return frozenset(found)


def _is_certain(kept: Term | None) -> bool:
    """Whether it is known where a step masks; of numbers of a mask nothing says that they are 0 or 1."""
    numbers = (item.args[0] for item in walk(kept) if item.op == "eq0") if kept is not None else ()
    return kept is not None and not any(item.op == "element" and item.sort != "Bool" for item in numbers)


def _adds_often(active: Sequence[_Event], always: frozenset[int]) -> bool:
    return len(always.union(event.step for event in active if not event.replaces)) > 1


def _is_outweighed(active: tuple[_Event, ...], keys: Mapping[tuple[_Event, ...], MaskedKey], spec: AttentionSpec) -> bool:
    """Whether each row has a key that one of the steps does not mask, and that leaves no weight to a key which they all mask."""
    for event in active:
        lowest = min((key.low for others, key in keys.items() if event not in others), default=0.0)
        apart = keys[active].high + MASKS_APART <= min(lowest, 0.0)
        if apart and event.kept is not None and rows_keep_a_key(event.kept, spec):
            return True
    return False


def _key(mask: Mask, active: Sequence[_Event], bounds: Bounds, absorbs: float) -> MaskedKey:
    scored, low, high = True, 0.0, 0.0
    is_scaled, is_held = any(isinstance(step, Scaled) for step in mask), False
    for place, (step, gain) in enumerate(zip(mask, step_gains(mask), strict=True)):
        for event in active:
            if event.step == place and event.replaces:
                scored, (low, high) = False, event.number
            elif event.step == place:
                low, high = added((low, high), event.number)
        if not scored and is_scaled and gain.number and math.isfinite(low) and math.isinf(_in_single(low / gain.number)):
            message = f"masked scores come to {low / gain.number:g}, which float32 cannot hold; fully masked rows are NaN"
            raise Refused("weak-fill", message)
        if isinstance(step, Floored):
            scored, low, high = _floored(scored, (low, high), step.low * gain.number, bounds.masked_from, absorbs)
            is_held = True
        if is_held and low == -math.inf:
            raise Refused("weak-fill", "scores are clamped from below and then lowered to -inf; fully masked rows are NaN")
    return MaskedKey(scored, low, high)


def _in_single(number: float) -> float:
    """A number as float32 holds it, infinite where it does not."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _floored(scored: bool, number: Interval, floor: float, limit: float, absorbs: float) -> tuple[bool, float, float]:
    """A masked key after a floor: whether it still has its score, and between which numbers it lies."""
    low, high = number
    if floor <= absorbs:
        return scored and high > floor, max(low, floor), max(high, floor)
    if low >= floor - limit or (not scored and low >= floor):
        return scored, low, high
    if high <= floor + limit or (high <= floor and not scored):
        return False, floor, floor
    message = f"scores are clamped at {floor:g}, close to the mask values; fully masked rows would differ"
    raise Refused("floor-near-fill", message)


def rows_disagree(mask: IndexedValue, reader: Reader, bounds: Bounds, opset: int = _LOWEST_ADDED) -> bool:
    """Whether versions of ONNX Runtime may disagree on rows without a key under a mask that an ai.onnx Attention adds.

    Its kernel of opset 25, which 1.32 has, adds the lowest number of a type as any other; older kernels, and older versions of
    ONNX Runtime at any opset, take it for -inf and give 0. Without an opset the question is whether a mask
    may hold that number at all.
    """
    dtype = reader.facts.dtype(mask.value)
    if opset < _LOWEST_ADDED or dtype == ir.DataType.BOOL:
        return False
    lowest = LOWEST_FLOAT32 if dtype is None else -largest(dtype)
    if bounds.of(mask.value)[0] > lowest:
        return False
    numbers = map(float_of, branches(element(mask, reader)))
    return any(number is None or -math.inf < number <= lowest for number in numbers)
