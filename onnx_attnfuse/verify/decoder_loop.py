"""Judging a decoder whose cache became one buffer: source and result are run in a loop, as a caller who generates does.

    verdict = check_decoder(before, after, loop)

A prompt and some steps, for one entry and for several, without padding and with padding on either side or in between. The source
gets a past that grows by its outputs, the result a buffer longer than its contents, with other numbers after them. At
every token that is no padding both must give the same. Nothing is known here of how either was built.
"""

from __future__ import annotations

import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.verify.decoder_feeds import SPARE, Decoder, DecoderRun, Feeds, Loop, Pattern
from onnx_attnfuse.verify.float32_copy import is_half, weight_bytes, widened
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import in_front
from onnx_attnfuse.verify.runtime import Operators, RuntimeRefusal, available
from onnx_attnfuse.verify.verdict import Verdict, by_this_runtime, compare, undecided

_TOLERANCES = {"float32": 1e-3, "float16": 5e-2}
"""How far whole models may be apart, as a part of the magnitude of an output."""
_PROMPT, _CHUNK, _STEPS, _WARM = 6, 3, 3, 4
_CHUNKS = (_CHUNK, 2, -3, 2)
"""New tokens on top of a cache, and how many are taken back, where several entries take them."""
_LONGEST_WARM = 256
"""The widest window that a loop begins beyond, where buffers keep no more."""
_MOST_WEIGHTS = 1 << 33
"""Bytes of weights in a half type that are still widened."""


def check_decoder(before: ir.Model, after: ir.Model, loop: Loop, operators: Operators = ()) -> Verdict:
    """Whether a decoder with a buffer gives the results of the source with a cache that grows.

    Args:
        before: The source.
        after: The decoder with the buffer.
        loop: How both are run.
        operators: Operators of other domains in NumPy.
    """
    if not available():
        return undecided("onnxruntime is not installed")
    after = in_front(after) if loop.rotates_each_token else after
    if loop.pages is not None:
        from onnx_attnfuse.verify.paged_loop import decomposed

        after = decomposed(after)
    if not is_half(before):
        return by_this_runtime(_judged(before, after, loop, operators))
    wide = undecided("it has too many weights to run it in float32")
    if weight_bytes(before) <= _MOST_WEIGHTS:
        wide = _judged(widened(before), widened(after), loop, operators)
    if is_half(before, [ir.DataType.BFLOAT16]) or (wide.undecided is None and not wide.equal):
        return by_this_runtime(wide)
    return by_this_runtime(_judged(before, after, loop, operators))


def _judged(before: ir.Model, after: ir.Model, loop: Loop, operators: Operators) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        try:
            source = Decoder(before, loop, 0, pathlib.Path(folder, "before.onnx"), operators)
        except RuntimeRefusal as refusal:
            return undecided(f"the original does not load: {refusal}")
        try:
            result = Decoder(after, loop, 1, pathlib.Path(folder, "after.onnx"), operators)
        except RuntimeRefusal as refusal:
            return Verdict(False, 0.0, 0, f"with a buffer the model does not load: {refusal}")
        return _judge_of(loop)(before, source, result, loop).verdict()


def _judge_of(loop: Loop) -> type[Judge]:
    if loop.pages is None:
        return Judge
    from onnx_attnfuse.verify.paged_loop import PagedJudge

    return PagedJudge


class Judge:
    """Two decoders, and their inputs."""

    def __init__(self, before: ir.Model, source: Decoder, result: Decoder, loop: Loop) -> None:
        self._source, self._result, self._loop = source, result, loop
        self._feeds = Feeds(before, loop)
        self._rng = np.random.default_rng(0)
        dtype = self._feeds.dtype(loop.pasts[0][0] if loop.own is None else loop.own.parts[0][0])
        widest = max((window for window in loop.windows if window), default=0)
        self._warm = widest + _WARM if 0 < widest <= _LONGEST_WARM and not self._feeds.is_large else _WARM
        self._tolerance = _TOLERANCES.get(str(dtype), min(_TOLERANCES.values()))

    def verdict(self) -> Verdict:
        """Whether both give the same in all loops."""
        largest, count, refused = 0.0, 0, ""
        for warm in (False, True) if self._loop.own is None else (False,):
            if warm and count and self._feeds.is_large:
                break
            for case in self._cases(warm=warm):
                try:
                    error, detail = self._run(case)
                except SourceRefusal as refusal:
                    refused = str(refusal)
                    continue
                except RuntimeRefusal as refusal:
                    return Verdict(False, largest, count, f"{case}: with a buffer it does not run: {refusal}")
                if detail:
                    return Verdict(False, max(error, largest), count + 1, f"{case}: {detail}")
                largest, count = max(error, largest), count + 1
        if not count:
            return undecided(f"the original does not run: {refused or 'no sizes fit its inputs'}")
        return Verdict(True, largest, count, f"equal in {count} loops")

    def _cases(self, *, warm: bool) -> Iterator[Any]:
        """Loops that the sizes of the source allow; on top of a past several entries get several tokens each where they may."""
        fixed_batch, fixed_new = self._feeds.batch, self._feeds.new
        batches = [fixed_batch] if isinstance(fixed_batch, int) else [1, 3]
        patterns = tuple(self._patterns())
        for batch, pattern in itertools.product(batches, patterns):
            if self._feeds.is_large and batch == 1 and pattern != patterns[-1]:
                continue
            prompt = [] if warm else [_PROMPT]
            steps = [*self._chunks(batch), *[1] * _STEPS]
            if isinstance(fixed_new, int):
                prompt = [] if warm else [fixed_new]
                steps = [fixed_new] * _STEPS if batch == 1 or fixed_new == 1 else []
            if self._loop.only_ends and pattern == "right":  # later tokens would have it in between
                steps = []
            while prompt and steps and self._too_long(_span((*prompt, *steps))):
                steps = steps[:-1]
            if (prompt or steps) and not self._too_long(_span((*prompt, *steps)) + self._warm * warm):
                yield DecoderRun(batch, (*prompt, *steps), pattern, warm)
            if self._loop.ends_anywhere and steps and (batch == 1 or fixed_new == 1 or warm or self._loop.takes_chunks):
                yield DecoderRun(batch, (*prompt, *steps), pattern, warm, at_beginning=True)

    def _chunks(self, batch: int) -> Sequence[int]:
        """Several new tokens on top of a cache."""
        if self._loop.takes_chunks and not self._feeds.is_large:
            return [new for new in _CHUNKS if new > 0 or not any(self._loop.windows)]
        return (_CHUNK,) if batch == 1 or self._loop.takes_chunks else ()

    def _too_long(self, total: int) -> bool:
        """Whether a source with a buffer has no place for that many positions."""
        filled = self._loop.filled
        return filled is not None and isinstance(filled.length, int) and total > filled.length

    def _patterns(self) -> Iterator[Pattern]:
        """Where padding may lie."""
        yield "none"
        if self._loop.is_padded:
            yield "right"
        if self._loop.is_padded and self._loop.any_padding:
            yield "left"
        if self._loop.is_padded and self._loop.any_padding and not self._loop.only_ends:
            yield "holes"

    def _run(self, case: Any) -> tuple[float, str]:
        """The largest error of one loop, and where both differ beyond the tolerance."""
        loop, past = self._loop, self._warm if case.warm else 0
        keep = self._kept(case, past)
        self._source.cache, self._result.cache = self._first(case.batch, keep[:, :past], _span(case.steps))
        largest, seen = 0.0, past
        for new in case.steps:
            if new < 0:
                seen += new
                self._take_back(seen)
                continue
            now = keep[:, : seen + new]
            fed = self._feeds.step(now, new, self._rng)
            old = self._of_source(fed, now, new)
            if case.at_beginning:
                fed[loop.mask] = np.pad(fed[loop.mask], ((0, 0), (0, past + _span(case.steps) + SPARE - now.shape[1])))
            got = self._result.step(fed)
            for name, left in old.items():
                found = compare(*_of_tokens(left, got[name], now[:, seen:]), self._tolerance)
                largest = max(largest, found.max_abs_error)
                if not found.equal:
                    return largest, f"'{name}' differs in step {[seen, seen + new]}: {found.detail}"
            seen += new
        return largest, ""

    def _take_back(self, seen: int) -> None:
        """Leaves the source so many positions; those of a buffer are written anew."""
        own = self._loop.own
        if self._loop.filled is None:
            axes = [2] * len(self._source.cache) if own is None else [axis for _, _, axis in own.parts]
            pairs = zip(self._source.cache, axes, strict=True)
            self._source.cache = [array.take(range(seen), axis) for array, axis in pairs]

    def _of_source(self, fed: Mapping[str, Array], now: Array, new: int) -> dict[str, Array]:
        """The outputs of one step of the source.

        Raises:
            SourceRefusal: It does not run with sizes that were tried.
        """
        try:
            return self._source.step({**fed, **self._inputs(now, new, self._source.cache[0].shape[2])})
        except RuntimeRefusal as refusal:
            raise SourceRefusal(str(refusal)) from refusal

    def _inputs(self, now: Array, new: int, length: int) -> dict[str, Array]:
        """Further inputs of a source: its branch; with a buffer of its own where new keys go, and a mask as long as that."""
        filled, branch, seen = self._loop.filled, self._loop.branch, now.shape[1] - new
        chosen = {} if branch is None else {branch.name: np.full((1,) * branch.rank, branch.with_past == (seen > 0))}
        if filled is None:
            return chosen
        places = np.arange(seen, seen + new, dtype=self._feeds.dtype(filled.position))
        dims, tokens = self._feeds.dims[filled.position], self._feeds.dims[self._loop.tokens]
        further: dict[str, Array] = chosen | {
            filled.position: places if len(dims) == 1 and dims[0] == tokens[1] else places[:1].reshape(len(dims) * [1])
        }
        if filled.masks_buffer:
            mask = np.zeros((now.shape[0], length), bool)
            mask[:, : now.shape[1]] = now
            further[self._loop.mask] = mask.astype(self._feeds.dtype(self._loop.mask))
        return further

    def _kept(self, case: DecoderRun, past: int) -> Array:
        """Where tokens are, (b, all positions); rows of a batch differ, and every row begins with one at least."""
        total, first = past + _span(case.steps), past or case.steps[0]
        keep = np.ones((case.batch, total), bool)
        for row in range(case.batch):
            padding = (5 * row + 3) % first  # the first row is not the longest
            if case.pattern == "left":
                keep[row, :padding] = False
            elif case.pattern == "right":
                keep[row, first - padding : first] = False
            elif case.pattern == "holes":
                keep[row, [place for place in range(1, total) if (place * 7 + row) % 3 == 1]] = False
        if self._loop.takes_chunks and self._loop.any_padding and not self._loop.only_ends and case.pattern in {"left", "right"}:
            self._pad_chunks(keep, case, past)
        return keep

    def _pad_chunks(self, keep: Array, case: DecoderRun, past: int) -> None:
        """Marks padding at one end of what comes on top of a cache, in place; entries differ in how much."""
        ends = [past + end for end in itertools.accumulate(case.steps)]
        for start, end, row in ((start, end, row) for start, end in itertools.pairwise(ends) for row in range(case.batch)):
            padding = (start + row) % (end - start) if end > start else 0
            keep[row, start : start + padding] &= case.pattern != "left"
            keep[row, end - padding : end] &= case.pattern != "right"

    def _first(self, batch: int, keep: Array, more: int) -> tuple[list[Array], list[Array]]:
        """The past that a loop begins with: as it grows, and as a buffer of the tokens, with other numbers after them."""
        grown: list[Array] = []
        buffers: list[Array] = []
        past = keep.shape[1]
        windows = self._loop.windows or (None,) * len(self._loop.pasts)
        for place, ((name, _), window) in enumerate(zip(self._loop.pasts, windows, strict=True)):
            shape = self._feeds.cache_shape(name, batch, past)
            dtype = self._feeds.dtype(name if self._loop.own is None else self._loop.own.parts[0][0])
            numbers = self._rng.standard_normal(shape).astype(dtype)
            room = past + more + SPARE if window is None else window + place // 2 % 2 * SPARE  # a full one shows padding in it
            buffer = (3 * self._rng.standard_normal((*shape[:2], room, shape[3]))).astype(dtype)
            for row in range(batch):
                tokens = numbers[row][:, keep[row]]
                tokens = tokens if window is None else tokens[:, tokens.shape[1] - _resident(tokens.shape[1], window, room) :]
                buffer[row, :, : tokens.shape[1]] = tokens
            grown.append(self._placed(numbers, past + more))
            buffers.append(buffer)
        return grown if self._loop.own is None else self._feeds.empty(batch), buffers

    def _placed(self, numbers: Array, least: int) -> Array:
        """The past of the source: as it is, or in the source's own buffer, with other numbers after it."""
        filled = self._loop.filled
        if filled is None:
            return numbers
        whole = filled.length if isinstance(filled.length, int) else least + SPARE
        batch, heads, past, channels = numbers.shape
        buffer = (3 * self._rng.standard_normal((batch, heads, whole, channels))).astype(numbers.dtype)
        buffer[:, :, :past] = numbers
        return buffer


def _resident(tokens: int, window: int, room: int) -> int:
    """How many of the last tokens a buffer of so much room holds: it drops as many at once as it is longer than the window."""
    at_once = room - window + 1
    return tokens if tokens <= room else tokens - at_once * -(-(tokens - room) // at_once)


def _span(steps: Sequence[int]) -> int:
    """The most positions that there are after any step."""
    return max(itertools.accumulate(steps))


class SourceRefusal(Exception):
    """The source does not run with sizes that were tried."""


def _of_tokens(left: Array, right: Array, keep: Array) -> tuple[Array, Array]:
    """The rows of two outputs that are of tokens: of all new ones, or of the last where an output is of the last only."""
    whole: Sequence[int] = keep.shape
    if left.shape != right.shape or left.ndim < 2 or left.shape[0] != whole[0]:
        return left, right
    if left.shape[1] == whole[1] and (left.ndim > 2 or not np.issubdtype(left.dtype, np.floating)):
        return left[keep], right[keep]
    return left[keep[:, -1]], right[keep[:, -1]]
