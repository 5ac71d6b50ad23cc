"""A quantised cache: the largest numbers of each channel, the error of the logits, and a check apart from the rounding error.

    verdict = check_quantised(before, after, record)

The check runs the source with the keys and values that the result holds: in a copy of it those that its attentions read become
inputs. In every step the result runs first. What it holds then, times its scales, is handed to the source, which computes
everything else with its own operators: its outputs must be those of the result to the tolerance of any decoder. What the source
would have appended by itself must be what the result holds, up to half a step of rounding, or the end of the range. So a rounding
that falls one way here and the other there does not matter, and a wrong layer, head, order, scale or position does.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.kernels.cache_formats import CacheFormat, format_of
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.verify.decoder_feeds import SPARE, Decoder, DecoderRun, Feeds, Loop
from onnx_attnfuse.verify.float32_copy import Widen, wide
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import grouped, in_front, unpack
from onnx_attnfuse.verify.quantised.roundings import CacheError, QuantisedCache
from onnx_attnfuse.verify.references import restored
from onnx_attnfuse.verify.references import step as rounding
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.verdict import Verdict, by_this_runtime, compare, undecided

_TOLERANCE = 1e-3
"""How far whole models in float32 may be apart, as a part of the magnitude of an output."""
_SEED, _CHECK_SEED = 7, 11
_SINGLE_SHARE = 3
"""One in so many tokens of a text is a step of its own, after the others as a prompt."""
_AFTER = 85
"""Each byte after the text."""
_FLOAT = ir.DataType.FLOAT
_BITS, _SMALLEST, _LARGEST = 3.0, -6, 448.0
"""Of float8e4m3fn: bits after the leading one, the exponent of the smallest normal number, and the largest number."""
_CACHE = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


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


def check_quantised(before: ir.Model, after: ir.Model, record: QuantisedCache, widen: Widen = wide) -> Verdict:
    """Whether a decoder equals its source with keys and values that are rounded and cut off.

    Args:
        before: The decoder whose cache grows.
        after: The decoder with the quantised cache.
        record: How both are run.
        widen: Makes them compute in float32.
    """
    loop = record.loop
    try:
        before, after = widen(before), widen(after)
    except RuntimeRefusal as refusal:
        return undecided(str(refusal))
    oracle = with_given_cache(before, loop)
    if oracle is None:
        return undecided("the source appends inside of its attentions, where keys and values cannot be replaced by rounded ones")
    feeds = Feeds(before, loop, record.context_length)
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        try:
            result = Quantised(after, loop, folder)
        except (RuntimeRefusal, ModelError) as refusal:
            return by_this_runtime(undecided(f"the quantised model does not load: {refusal}"))
        try:
            source = Decoder(oracle, loop, 0, pathlib.Path(folder, "source.onnx"))
            return by_this_runtime(_judged(source, result, feeds, loop))
        except RuntimeRefusal as refusal:
            return by_this_runtime(undecided(f"it does not run: {refusal}"))


def with_given_cache(source: ir.Model, loop: Loop) -> ir.Model | None:
    """A copy of the source whose attentions read keys and values that are inputs, called as `given` says; None: they cannot."""
    copy = source.clone()
    outputs = {value.name: value for value in copy.graph.outputs}
    for name, _ in loop.presents:
        value = outputs[name]
        copies = list[ir.Node]()
        while (node := value.producer()) is not None and is_standard(node, "Identity") and node.inputs[0] is not None:
            copies.append(node)
            value = node.inputs[0]
        readers = [(node, place) for node, place in value.uses() if node not in copies]
        if not readers:
            return None
        handed = ir.Value(name=given(name), shape=value.shape or outputs[name].shape, type=value.type or outputs[name].type)
        copy.graph.inputs.append(handed)
        for node, place in readers:
            node.replace_input_with(place, handed)
    return copy


def given(present: str) -> str:
    """The input that takes the place of keys or values."""
    return f"attnfuse/given/{present}"


def _judged(source: Decoder, result: Quantised, feeds: Feeds, loop: Loop) -> Verdict:
    largest, count = 0.0, 0
    for run in feeds.runs():
        error, detail = _run(source, result, feeds, run, loop)
        largest, count = max(largest, error), count + 1
        if detail:
            return Verdict(False, largest, count, f"{run}: {detail}")
    return Verdict(True, largest, count, f"equal in {count} loops but for rounding")


def _run(source: Decoder, result: Quantised, feeds: Feeds, run: DecoderRun, loop: Loop) -> tuple[float, str]:
    """The largest error of one loop, and the difference."""
    result.begin(run)
    largest, seen = 0.0, 0
    for new, fed in zip(run.steps, feeds.steps(run, _CHECK_SEED), strict=True):
        before = result.held(seen)
        outputs = result.step(fed)
        held = result.held(seen + new)
        source.cache = [held[past][:, :, :seen] for _, past in loop.pasts]
        handed = {given(name): held[past] for (name, _), (_, past) in zip(loop.presents, loop.pasts, strict=True)}
        expected = source.step(fed | handed)
        for (_, past), present in zip(loop.pasts, source.cache, strict=True):
            if not np.array_equal(before[past], held[past][:, :, :seen]):
                return largest, f"'{past}' holds other numbers than before at positions below {seen}"
            if what := _not_rounded(present[:, :, seen:], held[past][:, :, seen:], result.parts[past]):
                return largest, f"'{past}' at positions from {seen} on: {what}"
        for name, array in expected.items():
            found = compare(array, outputs[name], _TOLERANCE)
            largest = max(largest, found.max_abs_error)
            if not found.equal:
                return largest, f"'{name}' differs in step {[seen, seen + new]}: {found.detail}"
        seen += new
    return largest, ""


def _not_rounded(computed: Array, held: Array, part: Part) -> str:
    """How the stored numbers are no rounding of the computed ones; empty where they are."""
    kept = np.clip(computed.astype(np.float32), part.form.lowest * part.scale, part.form.largest * part.scale)
    allowed = rounding(kept, part.scale, part.form) + _TOLERANCE * float(np.abs(computed).max(initial=0.0))
    excess = np.abs(held - kept) - allowed
    if not (excess > 0).any():
        return ""
    place = np.unravel_index(int(excess.argmax()), excess.shape)
    return f"{float(held[place]):.4g} is no rounding of {float(computed[place]):.4g} by {float(part.scale.max()):.3g}"


class Quantised(Decoder):
    """A result whose cache is a quantised buffer."""

    def __init__(self, model: ir.Model, loop: Loop, folder: str) -> None:
        """Loads the result.

        Raises:
            ModelError: Its cache is not quantised, or its scales are no weights.
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        self.parts = {past: part_of(model, past) for _, past in loop.pasts}
        form = next(iter(self.parts.values())).form
        self._is_decomposed = form.dtype == ir.DataType.FLOAT8E4M3FN  # there is no kernel for it on the CPU
        runnable = rounded_in_front(model) if self._is_decomposed else model
        if runnable is None:
            raise RuntimeRefusal(f"there is no kernel on the CPU for a cache in {form.name}, and keys are rotated inside")
        super().__init__(runnable, loop, 1, pathlib.Path(folder, "result.onnx"))

    def begin(self, run: DecoderRun) -> None:
        """Fills the buffer with numbers that mean nothing."""
        self.cache = []
        for part in self.parts.values():
            shape = run.batch, part.heads, sum(run.steps) + SPARE, part.form.stored_size(part.head_size)
            after = np.full(shape, _AFTER, np.uint8).view(part.form.dtype.numpy())
            self.cache.append(after.astype(np.float32) if self._is_decomposed else after)

    def held(self, length: int) -> dict[str, Array]:
        """The first positions of the cache, dequantised, (b, m, length, h) float32, by the names of its inputs."""
        parts = zip(self.parts.items(), (buffer[:, :, :length] for buffer in self.cache), strict=True)
        if self._is_decomposed:
            return {name: numbers for (name, _), numbers in parts}
        return {name: restored(numbers, part.scale, part.form, part.head_size) for (name, part), numbers in parts}


@dataclasses.dataclass(frozen=True)
class Part:
    """Keys or values of one attention."""

    form: CacheFormat
    scale: Array
    """(1, m, 1, h), or (1, 1, 1, 1)."""
    heads: int
    head_size: int


def part_of(model: ir.Model, past: str) -> Part:
    """The part of a quantised cache that an input is.

    Raises:
        ModelError: It is none.
    """
    info = group_query_attention.INFO
    value = next((item for item in model.graph.inputs if item.name == past), None)
    form = None if value is None else format_of(value.dtype)
    for node, place in () if value is None else value.uses():
        if node.op_type != info.name or form is None:
            continue
        scale = info.input(node, "k_scale" if place == info.place("past_key") else "v_scale")
        tensor = None if scale is None else scale.const_value
        heads, size = None if value is None or value.shape is None else value.shape[1], _head_size(node)
        if tensor is not None and isinstance(heads, int) and size is not None:
            numbers = np.asarray(tensor.numpy(), np.float32)
            return Part(form, numbers.reshape(1, heads if numbers.size > 1 else 1, 1, -1), heads, size)
    raise ModelError(f"'{past}' is no quantised cache with scales that are weights; make the model again")


def _head_size(node: ir.Node) -> int | None:
    """The head size of an attention, by its scales or its cache."""
    past = node.inputs[group_query_attention.INFO.place("past_key")]
    last = None if past is None or past.shape is None else past.shape[3]
    form = None if past is None else format_of(past.dtype)
    return last * 8 // form.bits if isinstance(last, int) and form is not None else None


def rounded_in_front(model: ir.Model) -> ir.Model | None:
    """A copy of a model in float32 whose attentions are given rounded keys and values; None where they rotate them afterwards."""
    copy = in_front(model)
    for build, node in grouped(copy):
        if INFO.input(node, "k_scale") is None:
            continue
        if attribute(node, "do_rotary", 0):
            return None
        unpack(build, node)
        for name, scale, past in (("key", "k_scale", "past_key"), ("value", "v_scale", "past_value")):
            _round(build, node, name, scale)
            for value in (INFO.input(node, past), node.outputs[1 if name == "key" else 2]):
                assert value is not None
                value.type = ir.TensorType(_FLOAT)
            node.replace_input_with(INFO.place(scale), None)
        for name in _CACHE:
            del node.attributes[name]
    return copy


def _round(build: Builder, node: ir.Node, name: str, scale: str) -> None:
    """Puts a rounding between an operand and the operator, in operators of every opset: before 19 no Cast knows float8.

    The step of a number is 2^(e - 3), where e is the exponent of its leading bit, at least that of the smallest normal number.
    """
    operand, scales = INFO.input(node, name), INFO.input(node, scale)
    assert operand is not None
    assert scales is not None
    assert scales.const_value is not None
    numbers = build.constant(np.asarray(scales.const_value.numpy(), np.float32).reshape(-1))

    def made(kind: str, *given: ir.Value | float) -> ir.Value:
        inputs = [item if isinstance(item, ir.Value) else build.scalar(item, _FLOAT) for item in given]
        return build.elementwise(kind, inputs, _FLOAT)

    scaled = made("Min", made("Max", made("Div", operand, numbers), -_LARGEST), _LARGEST)
    exponent = made("Floor", made("Div", made("Log", made("Max", made("Abs", scaled), 2.0**_SMALLEST)), math.log(2)))
    step = made("Pow", 2.0, made("Sub", exponent, _BITS))
    value = made("Mul", made("Mul", made("Round", made("Div", scaled, step)), step), numbers)
    node.replace_input_with(INFO.place(name), value)
