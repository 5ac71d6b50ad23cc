"""Decoders that are run step by step: a source whose cache grows, and a result whose cache is a quantised buffer."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.kernels.cache_formats import CacheFormat, format_of
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.verify.decoder_loop import Loop, started
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.quantised.feeds import DecoderRun, Feeds, taken
from onnx_attnfuse.verify.quantised.rounding_prologue import rounded_in_front
from onnx_attnfuse.verify.references.quantised_cache import restored
from onnx_attnfuse.verify.runtime import PieceSession, Reference, RuntimeRefusal

_SPARE = 3
_BEHIND = 85
"""What each byte behind the text is."""


class Growing:
    """A source whose cache grows."""

    def __init__(self, model: ir.Model, loop: Loop, feeds: Feeds, folder: str) -> None:
        """Loads the source.

        Raises:
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        self._session = _loaded(model, folder, "source")
        self._loop, self._feeds, self.cache = loop, feeds, list[Array]()

    def begin(self, run: DecoderRun) -> None:
        """Empties the cache."""
        self.cache = [self._feeds.cache(name, run.batch) for name, _ in self._loop.pasts]

    def step(self, fed: Mapping[str, Array], handed: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """The outputs of one step by their names; `handed` are inputs besides.

        Raises:
            RuntimeRefusal: ONNX Runtime ended with an error.
        """
        loop = self._loop
        past = dict(zip((name for name, _ in loop.pasts), self.cache, strict=True))
        names = [*loop.outputs, *(name for name, _ in loop.presents)]
        found = self._session.run(names, taken(fed, self._feeds.names) | past | dict(handed or {}))
        self.cache = found[len(loop.outputs) :]
        return dict(zip(loop.outputs, found, strict=False))


class Quantised:
    """A result whose cache is a quantised buffer."""

    def __init__(self, model: ir.Model, loop: Loop, folder: str) -> None:
        """Loads the result.

        Raises:
            ModelError: Its cache is not quantised, or its scales are no weights.
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        self.parts = {past: part_of(model, past) for _, past in loop.pasts}
        form = next(iter(self.parts.values())).form
        self._is_spelled_out = form.dtype == ir.DataType.FLOAT8E4M3FN  # there is no kernel for it on the CPU
        spelled = rounded_in_front(model) if self._is_spelled_out else model
        if spelled is None:
            raise RuntimeRefusal(f"there is no kernel on the CPU for a cache in {form.name}, and keys are rotated inside")
        self._session = _loaded(spelled, folder, "result")
        self._loop, self._buffers = loop, dict[str, Array]()
        self._names = [name for name in self._session.inputs() if name not in self.parts]

    def begin(self, run: DecoderRun) -> None:
        """Fills the buffer with numbers that mean nothing."""
        length = sum(run.steps) + _SPARE
        for name, part in self.parts.items():
            shape = run.batch, part.heads, length, part.form.stored_size(part.head_size)
            behind = np.full(shape, _BEHIND, np.uint8).view(part.form.dtype.numpy())
            self._buffers[name] = behind.astype(np.float32) if self._is_spelled_out else behind

    def step(self, fed: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one step by their names.

        Raises:
            RuntimeRefusal: ONNX Runtime ended with an error.
        """
        loop = self._loop
        names = [*loop.outputs, *(name for _, name in loop.presents)]
        found = self._session.run(names, taken(fed, self._names) | self._buffers)
        self._buffers = dict(zip(self._buffers, found[len(loop.outputs) :], strict=True))
        return dict(zip(loop.outputs, found, strict=False))

    def held(self, length: int) -> dict[str, Array]:
        """The first positions of the cache, dequantised, (b, m, length, h) float32, by the names of its inputs."""
        if self._is_spelled_out:
            return {name: buffer[:, :, :length] for name, buffer in self._buffers.items()}
        return {
            name: restored(self._buffers[name][:, :, :length], part.scale, part.form, part.head_size)
            for name, part in self.parts.items()
        }


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


def _loaded(model: ir.Model, folder: str, name: str) -> PieceSession | Reference:
    try:
        return started(model, pathlib.Path(folder, f"{name}.onnx"), ())
    except ModelError as error:
        raise RuntimeRefusal(str(error)) from error
