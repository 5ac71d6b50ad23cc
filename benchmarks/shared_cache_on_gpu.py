"""A decoder with one buffer for its cache, on a GPU: whether it gives what the source gives, and how long a step takes.

    python benchmarks/shared_cache_on_gpu.py MODEL.onnx [--ep cuda] [--past 1024] [--steps 50]

MODEL is a decoder in float16 with a cache that grows. Logits of a prompt and of single steps are held against those of the source
in the same runtime, nothing optimised, with padding on the left, on the right and in between; errors are parts of a magnitude.
Steps are timed with inputs and outputs bound: a cache that grows, a shared one, and a shared one with padding on the right only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime

import onnx_attnfuse
from onnx_attnfuse.serving.decoder import ServedDecoder

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
_PROMPTS = {
    "none": [[1] * 8, [1] * 8],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8],
    "holes": [[1, 0, 1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1, 1]],
}
_CHOICES: Mapping[str, dict[str, str]] = {
    "grows": {},
    "shared": {"cache": "shared"},
    "shared, padding on the right": {"cache": "shared", "padding": "assume-right"},
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ep", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--past", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    results = {name: onnx_attnfuse.optimize(given.model, ep=given.ep, **chosen) for name, chosen in _CHOICES.items()}
    decoder = results["shared"].report.decoder
    if decoder is None:
        raise SystemExit("\n".join(results["shared"].report.notes))
    print({site.mask_form for site in results["shared"].report.sites})
    with tempfile.TemporaryDirectory() as folder:
        source, sessions = _session(given.model, given.ep, optimized=False), dict[str, Any]()
        for place, (name, result) in enumerate(results.items()):
            result.save(f"{folder}/{place}.onnx")
            sessions[name] = _session(f"{folder}/{place}.onnx", given.ep)
        for padding, prompt in _PROMPTS.items():
            print(
                f"padding {padding:6} largest error {_error(source, sessions['shared'], decoder, np.array(prompt), given.ep):.1e}"
            )
        past = min(given.past, (decoder.context_length or given.past + 1) - 1)
        for name, session in sessions.items():
            print(f"{name:30} {_step(session, decoder, past, given.steps, given.ep):.2f} ms")


def _session(path: str, ep: str, *, optimized: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = ["CUDAExecutionProvider"] if ep == "cuda" else []
    return onnxruntime.InferenceSession(path, options, providers=[*providers, "CPUExecutionProvider"])


def _fed(decoder: ServedDecoder, tokens: Any, mask: Any) -> dict[str, Any]:
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -tokens.shape[1] :]
    fed = {decoder.input_ids: tokens, decoder.attention_mask: mask}
    return fed if decoder.position_ids is None else fed | {decoder.position_ids: positions}


def _error(source: Any, shared: Any, decoder: ServedDecoder, mask: Any, ep: str) -> float:
    """The largest error of logits at tokens, over a prompt and three steps."""
    rng, batch = np.random.default_rng(0), len(mask)
    pasts = [item for item in source.get_inputs() if len(item.shape) == 4]
    outputs = [item.name for item in source.get_outputs()]
    cache = {item.name: np.zeros((batch, item.shape[1], 0, item.shape[3]), _TYPES[item.type]) for item in pasts}
    buffers = _buffers(shared, decoder, batch, mask.shape[1] + 8, ep)
    tokens, largest = rng.integers(2, 99, mask.shape), 0.0
    for _ in range(4):
        fed = _fed(decoder, tokens, mask)
        taken = {item.name: fed[item.name] for item in source.get_inputs() if item.name in fed}
        found = dict(zip(outputs, source.run(outputs, taken | cache), strict=True))
        old = found.pop(decoder.logits).astype(np.float32)
        cache = dict(zip(cache, found.values(), strict=True))
        binding = _bound(shared, decoder, fed, buffers)
        shared.run_with_iobinding(binding)
        new, keep = binding.get_outputs()[-1].numpy().astype(np.float32), mask[:, -tokens.shape[1] :].astype(bool)
        largest = max(largest, float(np.abs(old[keep] - new[keep]).max() / np.abs(old[keep]).max()))
        tokens = rng.integers(2, 99, (batch, 1))
        mask = np.concatenate([mask, np.ones_like(tokens)], axis=1)
    return largest


def _buffers(session: Any, decoder: ServedDecoder, batch: int, room: int, ep: str) -> dict[str, Any]:
    """A buffer for each input of the cache, with the output it is bound to."""
    types = {item.name: _TYPES[item.type] for item in session.get_inputs()}
    shape = (batch, decoder.kv_heads, room, decoder.head_size)
    names = zip(decoder.past_keys + decoder.past_values, decoder.present_keys + decoder.present_values, strict=True)
    return {
        past: (present, onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, types[past]), ep)) for past, present in names
    }


def _bound(session: Any, decoder: ServedDecoder, fed: Mapping[str, Any], buffers: Mapping[str, Any]) -> Any:
    binding = session.io_binding()
    names = {item.name for item in session.get_inputs()}
    for name, array in fed.items():
        if name in names:
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
    for past, (present, buffer) in buffers.items():
        binding.bind_ortvalue_input(past, buffer)
        binding.bind_ortvalue_output(present, buffer)
    binding.bind_output(decoder.logits, "cpu")
    return binding


def _step(session: Any, decoder: ServedDecoder, past: int, steps: int, ep: str) -> float:
    """Milliseconds of one new token on top of a past, the median."""
    fed = _fed(decoder, np.array([[5]]), np.ones((1, past + 1), np.int64))
    if decoder.past_keys[0] in {item.name for item in session.get_inputs()}:
        binding = _bound(session, decoder, fed, _buffers(session, decoder, 1, past + 1, ep))
    else:
        binding = session.io_binding()
        for item in session.get_inputs():
            if item.name in fed:
                binding.bind_cpu_input(item.name, fed[item.name])
            else:
                array = np.zeros((1, item.shape[1], past, item.shape[3]), _TYPES[item.type])
                binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(array, ep))
        for item in session.get_outputs():
            binding.bind_output(item.name, "cpu" if item.name == decoder.logits else ep)
    seconds: list[float] = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[3:])


if __name__ == "__main__":
    main()
