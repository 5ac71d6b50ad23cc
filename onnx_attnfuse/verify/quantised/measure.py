"""Measuring a quantised cache: the largest numbers of each channel, and the error of the logits."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.verify.decoder_feeds import Decoder, DecoderRun, Feeds, Loop
from onnx_attnfuse.verify.float32_copy import Widen, wide
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.quantised.decoders import Quantised
from onnx_attnfuse.verify.quantised.roundings import CacheError, QuantisedCache

_SEED = 7
_SINGLE_SHARE = 3
"""One in so many tokens of a text is a step of its own, after the others as a prompt."""


@dataclasses.dataclass(frozen=True)
class Turned:
    """Channels of keys that are rotated by their position, in pairs."""

    width: int
    """How many there are, the first of each head."""
    interleaved: bool
    """Neighbours are a pair; else a pair is half of them apart."""

    def largest(self, keys: Array) -> Array:
        """The keys (b, m, t, h) with the length of its pair in the place of each: the largest that any position makes of it."""
        found: Array = np.array(keys)
        width, half = self.width, self.width // 2
        places = (slice(0, width, 2), slice(1, width, 2)) if self.interleaved else (slice(0, half), slice(half, width))
        length = np.hypot(*(keys[..., place] for place in places))
        for place in places:
            found[..., place] = length
        return found


def largest_numbers(
    source: ir.Model,
    loop: Loop,
    feeds: Feeds,
    run: DecoderRun,
    turned: Mapping[str, Turned],
    given: Mapping[str, Array] | None = None,
    counted: Sequence[Array] = (),
) -> list[dict[str, Array]]:
    """The largest magnitude of each channel of keys and values over a loop, (1, m, 1, h), by the names of the result's inputs.

    Args:
        source: The decoder whose cache grows, in float32.
        loop: How it is run.
        feeds: Its inputs.
        run: The loop.
        turned: Which keys are rotated; of these count the values that they may take at any other position.
        given: Arrays of a prompt; positions that a mask among them leaves out do not count.
        counted: Which of the others count, (b, t) truth values; the largest are found once for each. By default all count.

    Raises:
        RuntimeRefusal: It does not run.
    """
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        decoder = Decoder(source, loop, 0, pathlib.Path(folder, "source.onnx"))
        decoder.cache = feeds.empty(run.batch)
        for fed in feeds.steps(run, _SEED, given):
            decoder.step(fed)
        mask = np.asarray((given or {}).get(loop.mask, np.ones((run.batch, sum(run.steps)))), bool)[:, None, :, None]
        found: list[dict[str, Array]] = [{} for _ in counted or [mask]]
        for (_, name), part in zip(loop.pasts, decoder.cache, strict=True):
            numbers = np.where(mask, part.astype(np.float32), 0)
            numbers = np.abs(turned[name].largest(numbers) if name in turned else numbers)
            for largest, kept in zip(found, [item[:, None, :, None] for item in counted] or [mask], strict=True):
                largest[name] = np.where(kept, numbers, 0).max(axis=(0, 2), keepdims=True)
        return found


def measure(
    before: ir.Model, after: ir.Model, record: QuantisedCache, widen: Widen = wide, texts: Sequence[Array] = ()
) -> CacheError:
    """How far the logits are from those of the source; the tokens are the same every time.

    Args:
        before: The decoder whose cache grows.
        after: The decoder with the quantised cache.
        record: How both are run.
        widen: Makes them compute in float32.
        texts: Tokens, (t); by default they are drawn.

    Raises:
        RuntimeRefusal: One does not run.
        ModelError: The cache of the second is not quantised.
    """
    before, after = widen(before), widen(after)
    feeds = Feeds(before, record.loop, record.context_length)
    pairs: list[tuple[Array, Array]] = []
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        source = Decoder(before, record.loop, 0, pathlib.Path(folder, "source.onnx"))
        result = Quantised(after, record.loop, folder)
        for run, steps in _loops(feeds, record.loop.tokens, texts):
            source.cache = feeds.empty(run.batch)
            result.begin(run)
            for fed in steps:
                old, new = source.step(fed)[record.logits], result.step(fed)[record.logits]
                pairs.append((_rows(old), _rows(new)))
    old, new = (np.concatenate(items) for items in zip(*pairs, strict=True))
    error, spread = np.abs(new - old), float(old.std()) or 1.0
    equal = float((old.argmax(-1) == new.argmax(-1)).mean())
    return CacheError(float(error.max()) / spread, float(error.mean()) / spread, equal, len(old))


def _loops(feeds: Feeds, tokens: str, texts: Sequence[Array]) -> Iterator[tuple[DecoderRun, Iterator[Mapping[str, Array]]]]:
    """The loops to run with the inputs of each step: with drawn tokens, or one for each text."""
    if not texts:
        yield from ((run, feeds.steps(run, _SEED + 1)) for run in feeds.runs())
    for text in texts:
        single = len(text) // _SINGLE_SHARE
        run = feeds.run(1, len(text) - single, single)
        yield run, _with_text(feeds.steps(run, _SEED + 1), tokens, text)


def _with_text(steps: Iterator[dict[str, Array]], tokens: str, text: Array) -> Iterator[Mapping[str, Array]]:
    """Steps with the tokens of a text, again from its beginning where they are more."""
    seen = 0
    for fed in steps:
        new = fed[tokens].shape[1]
        part = text[np.arange(seen, seen + new) % len(text)]
        yield fed | {tokens: np.broadcast_to(part, fed[tokens].shape).astype(fed[tokens].dtype)}
        seen += new


def _rows(logits: Array) -> Array:
    """The logits of each token."""
    return logits.reshape(-1, logits.shape[-1]).astype(np.float64)
