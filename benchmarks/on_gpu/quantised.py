"""Caches in fewer bits: steps and prompts beside the shared cache in the type of the model, memory, and what the logits lose.

The decoder is the folder's `llama-1b` of `python -m benchmarks.exports whole FOLDER`, or a small Llama that is made. Sizes are
entries, positions in use, and positions in the buffer. A cell of a step ends with MiB of the cache and, for a prompt and steps of
the same tokens, the largest and mean difference of logits by their spread and the share of equal greedy tokens. `int8/tensor` has
one scale for all channels.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.sessions import session_of
from benchmarks.whole import exports
from onnx_attnfuse.serving.decoder import ServedDecoder

SIZES = ((1, 1920, 2048), (16, 1920, 2048), (1, 64, 256))
KINDS = ("same", "int8", "int8/tensor", "int4", "float8")
_PROMPT, _STEPS, _MOST_PROMPT = 64, 64, 8192
_TYPES = {"tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(float16)": 10, "tensor(float8e4m3fn)": 17}
"""Element types as ONNX numbers them."""


def source_of(setting: Setting) -> pathlib.Path:
    """The decoder whose cache grows."""
    path = setting.folder / "llama-1b.onnx"
    if path.exists():
        exports.fill(path)
        return path
    from benchmarks.genai import folders
    from benchmarks.genai.architectures import ARCHITECTURES
    from benchmarks.genai_speed import SIZES as LLAMAS

    return folders.exported(ARCHITECTURES["llama"] if setting.quick else LLAMAS["small"], "dyn18", setting.folder / "llama.onnx")


@functools.cache
def made(source: pathlib.Path, kind: str, setting: Setting) -> tuple[pathlib.Path, ServedDecoder, int, Any]:
    """The model with one type of cache, its interface, bytes of a position, and tokens.

    Raises:
        RuntimeError: The cache was left as it was.
    """
    name, _, scales = kind.partition("/")
    choices: dict[str, Any] = {"ep": setting.provider, "verify": "none", "cache": "shared", "kv_cache": name}
    choices |= {"arch": setting.arch} if setting.cuda else {}
    result = onnx_attnfuse.optimize(source, **choices)
    decoder, record = result.report.decoder, result.report.kv_cache
    if decoder is None or (record is None and name != KINDS[0]):
        raise RuntimeError(next(note for note in reversed(result.report.notes) if "cache" in note))
    if scales:
        one_scale(result.model)
    target = source.with_suffix(f".{kind.replace('/', '-')}.onnx")
    result.save(target)
    (width,) = {value.dtype.itemsize for value in result.model.graph.inputs if value.name == decoder.past_keys[0] and value.dtype}
    plain = int(2 * decoder.layers * decoder.kv_heads * decoder.head_size * width)
    return target, decoder, plain if record is None else record.bytes_per_position, decoder.vocab_size


def one_scale(model: ir.Model) -> None:
    """Gives each cache one scale, the largest of its channels, in place."""
    for node in model.graph:
        if node.op_type != "GroupQueryAttention":
            continue
        for place, name in ((12, "k_quant_type"), (13, "v_quant_type")):
            value = node.inputs[place]
            assert value is not None
            assert value.const_value is not None
            number = np.asarray([value.const_value.numpy().max()], np.float32)
            value.const_value, value.shape = ir.tensor(number, name=value.name), ir.Shape([1])
            node.attributes.add(ir.AttrString(name, "PER_TENSOR"))


class Served:
    """A decoder with its buffer on the device, and the binding of a step or of a prompt."""

    words = ""

    def __init__(
        self, source: pathlib.Path, kind: str, size: tuple[int, int, int], setting: Setting, *, truth: Any = None
    ) -> None:
        """Loads it; `truth` takes the logits of the first, with which others are compared, and is None for a prompt."""
        path, self._decoder, position, vocabulary = made(source, kind, setting)
        self._batch, past, room = size
        self._provider, self._session = setting.provider, session_of(path, setting.provider)
        self._inputs = {item.name: item for item in self._session.get_inputs()}
        names = (*self._decoder.past_keys, *self._decoder.past_values)
        self._buffers = {name: self._room(name, room) for name in names}
        if truth is not None:
            tokens = np.random.default_rng(0).integers(2, vocabulary, (self._batch, _PROMPT + _STEPS))
            logits = self._logits(tokens)
            self.words = f"{position * room * self._batch / 2**20:.1f} MiB {lost(truth.setdefault('logits', logits), logits)}"
        new = 1 if truth is not None else past
        self._timed = self._bound(np.full((self._batch, new), 7), past if truth is not None else 0)
        self()

    def __call__(self) -> None:
        self._run(self._timed)

    def _room(self, name: str, length: int) -> Any:
        item = self._inputs[name]
        shape = [self._batch, item.shape[1], length, item.shape[3]]
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, _TYPES[item.type], self._provider, 0)

    def _bound(self, tokens: np.ndarray[Any, Any], past: int) -> Any:
        """The binding of new tokens on top of so many positions."""
        decoder, binding, total = self._decoder, self._session.io_binding(), past + tokens.shape[1]
        fed = {
            decoder.input_ids: tokens,
            decoder.attention_mask: np.ones((self._batch, total)),
            decoder.position_ids: np.broadcast_to(np.arange(past, total), tokens.shape),
        }
        for name, array in fed.items():
            if name in self._inputs:
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array, np.int64), self._provider, 0)
                binding.bind_ortvalue_input(name, value)
        binding.bind_output(decoder.logits, self._provider)
        presents = (*decoder.present_keys, *decoder.present_values)
        for (past_name, value), present in zip(self._buffers.items(), presents, strict=True):
            binding.bind_ortvalue_input(past_name, value)
            binding.bind_ortvalue_output(present, value)
        return binding

    def _run(self, binding: Any) -> Any:
        """Runs to the end; the logits, where they lie."""
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()[0]

    def _logits(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The logits of a prompt and single tokens, (b, tokens, vocabulary) float32."""
        found = [self._run(self._bound(tokens[:, :_PROMPT], 0)).numpy()]
        found += [self._run(self._bound(tokens[:, at : at + 1], at)).numpy() for at in range(_PROMPT, tokens.shape[1])]
        return np.concatenate([item.astype(np.float32) for item in found], axis=1)


def lost(old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> str:
    """The largest and mean difference by the spread of the logits, and the share of equal greedy tokens."""
    if not np.isfinite(new).all():
        return "not finite"
    apart, spread = np.abs(new - old), float(old.std())
    equal = float((old.argmax(-1) == new.argmax(-1)).mean())
    return f"{apart.max() / spread:.2g} {apart.mean() / spread:.2g} {equal:.1%}"


def races(setting: Setting) -> Iterator[Race]:
    """A row for a step and one for a prompt of each size."""
    source = source_of(setting)
    for size in setting.sizes_or(SIZES):
        batch, past, room = size
        load, truth = functools.partial(Served, source, size=size, setting=setting), dict[str, Any]()
        yield Race(f"{batch}x1 at {past} of {room}", {kind: functools.partial(load, kind=kind, truth=truth) for kind in KINDS})
        if batch * past <= _MOST_PROMPT:
            yield Race(f"{batch}x{past}", {kind: functools.partial(load, kind=kind) for kind in KINDS})


BENCHMARK = Benchmark("Quantised caches", races)
