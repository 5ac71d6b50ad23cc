"""Decoders whose cache is a quantised buffer, run step by step in float32; what the cache holds is dequantised."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.kernels.cache_formats import CacheFormat, format_of
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.kernels.operators.group_query_attention import INFO
from onnx_attnfuse.verify.decoder_feeds import SPARE, Decoder, DecoderRun, Loop
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import grouped, in_front, unpack
from onnx_attnfuse.verify.references import restored
from onnx_attnfuse.verify.runtime import RuntimeRefusal

_AFTER = 85
"""Each byte after the text."""


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


_FLOAT = ir.DataType.FLOAT
_BITS, _SMALLEST, _LARGEST = 3.0, -6, 448.0
"""Of float8e4m3fn: bits after the leading one, the exponent of the smallest normal number, and the largest number."""
_CACHE = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


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
