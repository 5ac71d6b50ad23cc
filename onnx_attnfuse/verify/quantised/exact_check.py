"""Judging a quantised cache apart from the rounding error: the source is run with the keys and values that the result holds.

    verdict = check_quantised(before, after, record)

In a copy of the source the keys and values that its attentions read become inputs. In every step the result runs first. What it
holds then, times its scales, is handed to the source, which computes everything else with its own operators: its outputs must be
those of the result to the tolerance of any decoder. What the source would have appended by itself must be what the result holds,
up to half a step of rounding, or the end of the range. So a rounding that falls one way here and the other there does not matter,
and a wrong layer, head, order, scale or position does.
"""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.verify.decoder_feeds import Decoder, DecoderRun, Feeds, Loop
from onnx_attnfuse.verify.float32_copy import Widen, wide
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.quantised.decoders import Part, Quantised
from onnx_attnfuse.verify.quantised.roundings import QuantisedCache
from onnx_attnfuse.verify.references.quantised_cache import step as rounding
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.tolerance import compare
from onnx_attnfuse.verify.verdict import Verdict, by_this_runtime, undecided

_TOLERANCE = 1e-3
"""How far whole models in float32 may be apart, as a part of the magnitude of an output."""
_SEED = 11


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
    for new, fed in zip(run.steps, feeds.steps(run, _SEED), strict=True):
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
