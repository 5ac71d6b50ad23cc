"""A shared cache in fewer bits, where that is asked for: scales are measured and handed to the nodes, the error is reported.

    record, notes = quantise_cache(model, shared, options, device, verifier)

It is the one place where results change. So `verify/quantised/exact_check.py` checks everything but rounding on its own, and
the error of rounding is measured and written into the model, where `attnfuse verify` holds it to that.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.containment import Subject, contained
from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.fusion.shared_cache.decoder import SharedCache
from onnx_attnfuse.graph.build import new_weight
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.kernels.cache_formats import FORMATS, CacheFormat
from onnx_attnfuse.kernels.conditions import Open
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.operators import rotary_embedding
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.decoder_feeds import DecoderRun, Feeds, Loop
from onnx_attnfuse.verify.float32_copy import Widen, weight_bytes, widening
from onnx_attnfuse.verify.quantised.cache import Turned, check_quantised, largest_numbers, measure
from onnx_attnfuse.verify.quantised.roundings import QuantisedCache
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.verifier import Verifier

_QUANTISING = Subject("quantising the cache")
_PER_CHANNEL = "PER_CHANNEL"


def quantise_cache(
    model: ir.Model, shared: SharedCache, options: Options, device: Device, verifier: Verifier
) -> tuple[QuantisedCache | None, tuple[str, ...]]:
    """Quantises the cache of a decoder, in place, or leaves it as it was: then there is no record, and notes say why.

    Args:
        model: The model, with all else done.
        shared: Its shared cache.
        options: The options.
        device: The device that it will run on.
        verifier: Judges it.

    Raises:
        OptionError: The file to calibrate with cannot be used.
    """
    form, decoder = FORMATS[options.kv_cache], shared.decoder
    if decoder is None or shared.source is None or shared.loop is None:
        return None, (f"no cache is {form.name}: none became a buffer",)
    with contained(_QUANTISING) as attempt, widening() as widen:
        nodes = _nodes(model, decoder)
        _check_kernels(nodes, model, form, device)
        turned = {
            name: found for node, name in zip(nodes, decoder.past_keys, strict=True) if (found := _turned(node)) is not None
        }
        calibration = calibrate(shared.source, shared.loop, decoder.context_length, form, turned, options.calibrate, widen)
        record = QuantisedCache(
            form.name,
            _PER_CHANNEL,
            calibration.source,
            _bytes(decoder, form.stored_size(decoder.head_size), form.dtype),
            _bytes(decoder, decoder.head_size, _dtype(nodes[0])),
            shared.loop,
            decoder.logits,
            decoder.context_length,
        )
        trial = model.clone()
        _apply(trial, decoder, form, calibration.scales)
        record = _judged(shared.source, trial, record, verifier, widen)
        if record.error is not None and calibration.texts:
            apart = model.clone()
            _apply(apart, decoder, form, calibration.apart)
            with verifier.timer.step("measure the cache"):
                error = measure(shared.source, apart, record, widen, calibration.texts)
            record = dataclasses.replace(record, error_on_text=error)
        _apply(model, decoder, form, calibration.scales)
        record.write(model)
        return record, record.lines()
    assert attempt.reason is not None
    return None, (f"the cache is in the type of the model, and not {form.name}: {attempt.reason}",)


def _nodes(model: ir.Model, decoder: ServedDecoder) -> list[ir.Node]:
    """The attentions, in the order of the layers."""
    inputs = {value.name: value for value in model.graph.inputs}
    place = INFO.place("past_key")
    return [next(node for node, at in inputs[name].uses() if at == place) for name in decoder.past_keys]


def _turned(node: ir.Node) -> Turned | None:
    """The channels of the keys that are rotated, by the operator or in front of it; None where none are."""
    key = INFO.input(node, "key")
    above = None if key is None else key.producer()
    if attribute(node, "do_rotary", 0):
        table, interleaved = INFO.input(node, "cos_cache"), attribute(node, "rotary_interleaved", 0)
    elif above is not None and above.op_type == rotary_embedding.INFO.name:
        table, interleaved = rotary_embedding.INFO.input(above, "cos_cache"), attribute(above, "interleaved", 0)
    else:
        return None
    half = None if table is None or table.shape is None else table.shape[-1]
    return Turned(2 * half, bool(interleaved)) if isinstance(half, int) else None


def _dtype(node: ir.Node) -> ir.DataType:
    past = INFO.input(node, "past_key")
    assert past is not None
    assert past.dtype is not None
    return past.dtype


def _bytes(decoder: ServedDecoder, stored: int, dtype: ir.DataType) -> int:
    """The bytes of one position of one entry in all layers."""
    return 2 * decoder.layers * decoder.kv_heads * stored * int(dtype.itemsize)


def _check_kernels(nodes: list[ir.Node], model: ir.Model, form: CacheFormat, device: Device) -> None:
    """Checks that the device has kernels for such a cache.

    Raises:
        Refused: It has none.
    """
    found = support(INFO.key, device.provider)
    if isinstance(found, Reason):
        raise Refused(found.code, found.message, found.node)
    if form.name not in found.caches:
        others = ", ".join(found.caches) or "none"
        message = f"{INFO.name} has no kernel on {device.ep} for a cache in {form.name}; there are {others}"
        raise Refused("no-kernel-for-cache", message)
    facts = Facts(model.graph)
    if any(output.uses() for node in nodes for output in node.outputs[1:]):
        raise Refused("no-kernel-for-cache", "a later attention reads the buffer without new keys, which is not quantised")
    for node in nodes:
        params = params_of_node(node, facts)
        if isinstance(params, Reason):
            raise Refused(params.code, params.message, params.node)
        on_device = dataclasses.replace(params, arch=device.arch)
        for reason in (condition(on_device) for condition in found.caches[form.name]):
            if isinstance(reason, Reason):
                raise Refused("no-kernel-for-cache", f"{INFO.name} on {device.name} {reason.message}", node.name)
            assert not isinstance(reason, Open)


def _apply(model: ir.Model, decoder: ServedDecoder, form: CacheFormat, scales: Scales) -> None:
    """Gives the attentions their scales and the cache its type, in place."""
    inputs, outputs = ({value.name: value for value in values} for values in (model.graph.inputs, model.graph.outputs))
    names = zip(decoder.past_keys, decoder.past_values, decoder.present_keys, decoder.present_values, strict=True)
    for node, (past_key, past_value, present_key, present_value) in zip(_nodes(model, decoder), names, strict=True):
        node.resize_inputs(max(len(node.inputs), INFO.place("v_scale") + 1))
        for name, past in (("k_scale", past_key), ("v_scale", past_value)):
            node.replace_input_with(INFO.place(name), _weight(model.graph, f"{past}.scale", scales[past]))
        for given in (
            ir.AttrString("k_quant_type", _PER_CHANNEL),
            ir.AttrString("v_quant_type", _PER_CHANNEL),
            ir.AttrInt64("kv_cache_bit_width", form.bits),
        ):
            node.attributes.add(given)
        for value in (inputs[past_key], inputs[past_value], outputs[present_key], outputs[present_value]):
            value.type = ir.TensorType(form.dtype)
            dims = list(value.shape or ())
            value.shape = ir.Shape([*dims[:-1], form.stored_size(decoder.head_size)])


def _weight(graph: ir.Graph, name: str, scale: npt.NDArray[np.float32]) -> ir.Value:
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    while name in taken:
        name += "_"
    return new_weight(graph, name, ir.tensor(scale, name=name))


def _judged(source: ir.Model, trial: ir.Model, record: QuantisedCache, verifier: Verifier, widen: Widen) -> QuantisedCache:
    """The record with the error that was measured; none where nothing is to be judged.

    Raises:
        Refused: The decoder differs in more than rounding, or that could not be found out.
    """
    if not verifier.judge_loop(functools.partial(check_quantised, source, trial, record, widen)):
        return record
    try:
        with verifier.timer.step("measure the cache"):
            return dataclasses.replace(record, error=measure(source, trial, record, widen))
    except (RuntimeRefusal, ModelError) as refusal:
        raise Refused("unverified", f"its effect could not be measured: {refusal}") from refusal


Array = npt.NDArray[np.generic]
Scales = Mapping[str, npt.NDArray[np.float32]]
_MEASURED, _TEXTS = 24, 3
"""How many tokens of how many texts the error is measured on at most, each a quarter of its text at most."""
_ENTRIES, _TOKENS = 4, 64
_LARGE_ENTRIES = 2
"""For models of many weights."""
_MOST_WEIGHTS = 1 << 33
"""Bytes of weights in a half type that are still widened, as kernels on the CPU are for float32."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Scales by the names of the inputs that the cache comes in, each (1, m, 1, h) float32, and their source."""

    scales: Scales
    source: str
    """In words."""
    apart: Scales = dataclasses.field(default_factory=dict[str, npt.NDArray[np.float32]])
    """Scales from all tokens but those of `texts`."""
    texts: tuple[Array, ...] = ()
    """Ends of given texts, (t) each, on which the error is measured; none where tokens are drawn or few."""


def calibrate(
    source: ir.Model,
    loop: Loop,
    most: int | None,
    form: CacheFormat,
    turned: Mapping[str, Turned],
    file: pathlib.Path | None,
    widen: Widen,
) -> Calibration:
    """Measures the scales of each channel.

    Args:
        source: The decoder whose cache grows.
        loop: How it is run.
        most: The most positions, where that is known.
        form: The format of the quantised cache.
        turned: Which keys are rotated, by the names of the inputs.
        file: Tokens as arrays by the names of inputs; None: they are drawn.
        widen: Makes the source compute in float32.

    Raises:
        OptionError: The file cannot be used.
        Refused: The source cannot be run.
    """
    if any(value.dtype in HALVES for value in source.graph.initializers.values()) and weight_bytes(source) > _MOST_WEIGHTS:
        raise Refused("unverified", "the model has too many weights to measure scales in float32")
    try:
        model = widen(source)
    except RuntimeRefusal as refusal:
        raise Refused("unverified", f"there are no scales: {refusal}") from refusal
    feeds = Feeds(model, loop, most)
    given = None if file is None else _read(file, loop, feeds)
    entries = _LARGE_ENTRIES if feeds.is_large else _ENTRIES
    run = feeds.run(entries, _TOKENS) if given is None else _run_of(given, loop)
    every, rest, texts = _set_apart(run, given or {}, loop)
    try:
        found, apart = largest_numbers(model, loop, feeds, run, turned, given, (every, rest))
    except RuntimeRefusal as refusal:
        if file is not None:
            raise OptionError(f"the model does not run on {file}: {refusal}; give arrays of a prompt that it takes") from refusal
        raise Refused("unverified", f"the source does not run, so there are no scales: {refusal}") from refusal
    tokens = run.batch * sum(run.steps)
    drawn = f"{tokens} generated tokens; give real text with --calibrate FILE.npz"
    words = drawn if file is None else f"{tokens} tokens of {file.name}"
    scales, others = ({name: _scale(largest, form) for name, largest in item.items()} for item in (found, apart))
    return Calibration(scales, words, others, texts)


def _set_apart(run: DecoderRun, given: Mapping[str, Array], loop: Loop) -> tuple[Array, Array, tuple[Array, ...]]:
    """All positions of given texts, those besides their last tokens, and these tokens of the last texts.

    No later token changes the keys of an earlier one. Texts that go with other arrays are not set apart, as these go with all.
    """
    every: npt.NDArray[np.bool_] = np.ones((run.batch, sum(run.steps)), bool)
    rest, texts = np.array(every), list[Array]()
    if not given or given.keys() - {loop.tokens, loop.mask, loop.positions} or given[loop.tokens].ndim != every.ndim:
        return every, rest, ()
    kept = np.asarray(given.get(loop.mask, every), bool)
    for row in reversed(range(run.batch)):
        places = np.flatnonzero(kept[row])
        count = min(_MEASURED, len(places) // 4)
        if count > 1 and len(texts) < _TEXTS:
            rest[row, places[-count:]] = False
            texts.append(given[loop.tokens][row, places[-count:]])
    return every, rest, tuple(texts)


def _scale(largest: Array, form: CacheFormat) -> npt.NDArray[np.float32]:
    """Scales that map the largest number of each channel, and some room, to the largest stored; a channel of zeros has any."""
    numbers = np.asarray(largest, np.float32)
    numbers = np.where(numbers > 0, numbers, numbers.max() or 1)
    return (numbers * (form.room / form.largest)).astype(np.float32)


def _run_of(given: Mapping[str, Array], loop: Loop) -> DecoderRun:
    batch, length = given[loop.tokens].shape[:2]
    return DecoderRun(batch, (length,))


def _read(file: pathlib.Path, loop: Loop, feeds: Feeds) -> dict[str, Array]:
    """The arrays of a file that are inputs of a prompt.

    Raises:
        OptionError: The file cannot be read, or has no tokens.
    """
    try:
        with np.load(file) as archive:
            found = {name: archive[name] for name in archive.files if name in feeds.dims or name == loop.mask}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        problem = "is not there" if isinstance(error, FileNotFoundError) else "is no .npz file of arrays"
        raise OptionError(f"{file} {problem}; write one with numpy.savez({file.name!r}, {loop.tokens}=...)") from error
    pasts = {name for name, _ in loop.pasts}
    found = {name: array for name, array in found.items() if name not in pasts}
    if loop.tokens not in found:
        raise OptionError(f"{file} has no array '{loop.tokens}', the tokens of this model; add it, (texts, tokens)")
    tokens = found[loop.tokens]
    if tokens.ndim != len(feeds.dims[loop.tokens]) or not tokens.size:
        raise OptionError(f"'{loop.tokens}' in {file} is of shape {list(tokens.shape)}; make it (texts, tokens), not empty")
    if loop.mask in found and found[loop.mask].shape != tokens.shape[:2]:
        raise OptionError(f"'{loop.mask}' in {file} is not of the shape of the tokens; make it so, or leave it out")
    return {name: array.astype(feeds.dtype(name)) for name, array in found.items()}
