"""The scales of a quantised cache: the largest number of each channel of keys and values, over tokens that are given or drawn."""

from __future__ import annotations

import dataclasses
import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.kernels.cache_formats import CacheFormat
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.decoder_loop import Loop
from onnx_attnfuse.verify.float32_copy import weight_bytes
from onnx_attnfuse.verify.quantised.feeds import DecoderRun, Feeds
from onnx_attnfuse.verify.quantised.measure import Turned, largest_numbers
from onnx_attnfuse.verify.quantised.widening import Widen
from onnx_attnfuse.verify.runtime import RuntimeRefusal

Array = npt.NDArray[np.generic]
_ENTRIES, _TOKENS = 4, 64
_LARGE_ENTRIES = 2
"""For models of many weights."""
_MOST_WEIGHTS = 1 << 33
"""Bytes of weights in a half type that are still widened, as kernels on the CPU are for float32."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Scales by the names of the inputs that the cache comes in, each (1, m, 1, h) float32, and what they are from."""

    scales: Mapping[str, npt.NDArray[np.float32]]
    source: str
    """In words."""


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
    try:
        found = largest_numbers(model, loop, feeds, run, turned, given)
    except RuntimeRefusal as refusal:
        if file is not None:
            raise OptionError(f"the model does not run on {file}: {refusal}; give arrays of a prompt that it takes") from refusal
        raise Refused("unverified", f"the source does not run, so there are no scales: {refusal}") from refusal
    tokens = run.batch * sum(run.steps)
    drawn = f"{tokens} generated tokens; give real text with --calibrate FILE.npz"
    words = drawn if file is None else f"{tokens} tokens of {file.name}"
    return Calibration({name: _scale(largest, form) for name, largest in found.items()}, words)


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
            found = {name: archive[name] for name in archive.files if name in feeds.names or name == loop.mask}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        what = "is not there" if isinstance(error, FileNotFoundError) else "is no .npz file of arrays"
        raise OptionError(f"{file} {what}; write one with numpy.savez({file.name!r}, {loop.tokens}=...)") from error
    pasts = {name for name, _ in loop.pasts}
    found = {name: array for name, array in found.items() if name not in pasts}
    if loop.tokens not in found:
        raise OptionError(f"{file} has no array '{loop.tokens}', the tokens of this model; add it, (texts, tokens)")
    tokens = found[loop.tokens]
    if tokens.ndim != feeds.rank(loop.tokens) or not tokens.size:
        raise OptionError(f"'{loop.tokens}' in {file} is of shape {list(tokens.shape)}; make it (texts, tokens), not empty")
    if loop.mask in found and found[loop.mask].shape != tokens.shape[:2]:
        raise OptionError(f"'{loop.mask}' in {file} is not of the shape of the tokens; make it so, or leave it out")
    return {name: array.astype(feeds.dtype(name)) for name, array in found.items()}
