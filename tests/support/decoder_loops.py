"""Decoders run in loops: the source with a cache that grows, the other with a buffer that is bound as past and present."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

import onnx_attnfuse
from onnx_attnfuse.serving.decoder import ServedDecoder

Array = npt.NDArray[Any]
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


@dataclasses.dataclass(frozen=True)
class Fed:
    """The tokens and the mask that a caller feeds in one step."""

    tokens: Array
    mask: Array
    """(b, past + s) of 0 and 1."""

    @property
    def positions(self) -> Array:
        """The positions of the new tokens among all tokens, as `generate` of transformers counts them."""
        return np.maximum(self.mask.cumsum(1) - 1, 0)[:, -self.tokens.shape[1] :]


def operators(model: onnx.ModelProto) -> set[str]:
    """The operators of a decoder, but the one that gives each entry the number of new tokens."""
    counts = {node.input[16] for node in model.graph.node if node.op_type == "GroupQueryAttention" and len(node.input) > 16}
    return {node.op_type for node in model.graph.node if node.output[0] not in counts}


def steps(prompts: Sequence[Sequence[int]], more: Sequence[int] = (1, 1, 1), seed: int = 0) -> list[Fed]:
    """A prompt whose mask is given, row by row, and steps of tokens that are none of them padding."""
    rng = np.random.default_rng(seed)
    mask = np.array(prompts, np.int64)
    found = [Fed(rng.integers(2, 99, mask.shape), mask)]
    for new in more:
        mask = np.concatenate([mask, np.ones((len(mask), new), np.int64)], axis=1)
        found.append(Fed(rng.integers(2, 99, (len(mask), new)), mask))
    return found


def named(decoder: ServedDecoder, step: Fed, width: int = 64) -> dict[str, Array]:
    """The feeds of a step by the names of inputs; embeddings are those of a table that has nothing to do with the model."""
    table = np.random.default_rng(5).standard_normal((99, width)).astype(np.float32)
    tokens = {decoder.input_ids: step.tokens} if decoder.inputs_embeds is None else {decoder.inputs_embeds: table[step.tokens]}
    positions = {} if decoder.position_ids is None else {decoder.position_ids: step.positions}
    return {**tokens, **positions, decoder.attention_mask: step.mask}


def session(model: onnx.ModelProto, *, optimized: bool = False) -> onnxruntime.InferenceSession:
    """A session that runs the nodes as they are written, or as ONNX Runtime usually does."""
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def grown(model: onnx.ModelProto, decoder: ServedDecoder, fed: Sequence[Fed]) -> list[Array]:
    """The logits of the source in each step; inputs of the cache are told by their shapes, its outputs by their order."""
    started = session(model)
    pasts = [given for given in started.get_inputs() if len(given.shape) == 4]
    rest = [given.name for given in started.get_inputs() if len(given.shape) != 4]
    outputs = [given.name for given in started.get_outputs()]
    batch = len(fed[0].tokens)
    cache = {given.name: np.zeros((batch, given.shape[1], 0, given.shape[3]), _TYPES[given.type]) for given in pasts}
    logits: list[Array] = []
    for step in fed:
        feeds = named(decoder, step)
        found = dict(zip(outputs, started.run(outputs, {name: feeds[name] for name in rest} | cache), strict=True))
        logits.append(found.pop(decoder.logits))
        cache = dict(zip(cache, found.values(), strict=True))
    return logits


def buffered(model: onnx.ModelProto, decoder: ServedDecoder, fed: Sequence[Fed], room: int = 24, slack: int = 0) -> list[Array]:
    """The logits of a decoder in each step, past and present bound to one buffer that begins with numbers of no meaning.

    Buffers that keep no more than a window are longer than that by `slack`.
    """
    started = session(model, optimized=True)
    rng, batch = np.random.default_rng(1), len(fed[0].tokens)
    pasts, presents = decoder.past_keys + decoder.past_values, decoder.present_keys + decoder.present_values
    types = {given.name: _TYPES[given.type] for given in started.get_inputs()}
    windows = decoder.cache_windows or (None,) * decoder.layers
    lengths = [room if window is None else window + slack for window in windows]
    shapes = [(batch, decoder.kv_heads, length, decoder.head_size) for length in lengths] * 2
    held = {name: (7 * rng.standard_normal(shape)).astype(types[name]) for name, shape in zip(pasts, shapes, strict=True)}
    buffers = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cpu") for name, array in held.items()}
    logits: list[Array] = []
    for step in fed:
        binding = started.io_binding()
        for name, array in named(decoder, step).items():
            if name in types:
                binding.bind_cpu_input(name, np.ascontiguousarray(array, types[name]))
        for past, present in zip(pasts, presents, strict=True):
            binding.bind_ortvalue_input(past, buffers[past])
            binding.bind_ortvalue_output(present, buffers[past])
        binding.bind_output(decoder.logits, "cpu")
        started.run_with_iobinding(binding)
        logits.append(binding.get_outputs()[-1].numpy())
    return logits


def assert_same_at_tokens(old: Sequence[Array], new: Sequence[Array], fed: Sequence[Fed], atol: float = 2e-4) -> None:
    """Both give the same wherever there is a token."""
    for place, (left, right, step) in enumerate(zip(old, new, fed, strict=True)):
        keep = step.mask[:, -step.tokens.shape[1] :].astype(bool)
        np.testing.assert_allclose(right[keep], left[keep], atol=atol, rtol=1e-3, err_msg=f"step {place}")


def shared(model: onnx.ModelProto, **choices: Any) -> onnx_attnfuse.Result:
    """The model with its cache in one buffer, on the CPU unless `choices` says otherwise."""
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "shared", **choices})


def assert_serves(
    model: onnx.ModelProto, result: onnx_attnfuse.Result, padding: Sequence[Sequence[int]], more: Sequence[int]
) -> None:
    """A decoder with a buffer gives in a loop what its source gives, wherever there are tokens."""
    found = result.report.decoder
    assert found is not None, result.report.notes
    fed = steps(padding, more)
    assert_same_at_tokens(grown(model, found, fed), buffered(result.model, found, fed), fed)
