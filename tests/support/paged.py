"""Decoders with a cache in pages run step by step, each request beside the source run by itself with a cache that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onnx_attnfuse
from onnx_attnfuse.serving.decoder import ServedDecoder
from tests.support.decoder_loops import Array, Fed, session

PAGE, PAGES = 4, 40
SCHEDULE = ((3, 4, 1, 1), (6, 0, 1, 1), (0, 7, 1, 1), (1, 1), (0, 0, 9, 1), (0, 0, 1, 6))
"""New tokens of each request in each step: parts of prompts, a step without a token, requests that come later or have ended."""


def paged(model: onnx.ModelProto, **choices: Any) -> onnx_attnfuse.Result:
    """The model with its cache in pages, on the CPU unless `choices` says otherwise."""
    return onnx_attnfuse.optimize(model, **{"ep": "cpu", "cache": "paged", **choices})


def texts(schedule: Sequence[Sequence[int]] = SCHEDULE, seed: int = 0) -> list[Array]:
    """The tokens of each request."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 99, sum(steps)) for steps in schedule]


def alone(steps: Sequence[int], text: Array) -> list[Fed]:
    """The steps of one request by itself, where it has new tokens."""
    ends = np.cumsum(steps)
    parts = [(end - new, end) for new, end in zip(steps, ends, strict=True) if new]
    return [Fed(text[None, start:end], np.ones((1, end), np.int64)) for start, end in parts]


def together(
    model: onnx.ModelProto, decoder: ServedDecoder, schedule: Sequence[Sequence[int]], given: Sequence[Array]
) -> list[list[Array]]:
    """The logits of each request in each step where it has new tokens, run at once.

    Pages are NaN where nothing was written, are handed out in no order, and go from requests that have ended to later ones.
    """
    names, started = decoder.pages, session(model, optimized=True)
    assert names is not None
    rng, types = np.random.default_rng(1), {item.name: item.type for item in started.get_inputs()}
    pasts, presents = decoder.past_keys + decoder.past_values, decoder.present_keys + decoder.present_values
    shape = (PAGES, PAGE, decoder.kv_heads, decoder.head_size)
    dtype = np.float16 if "16" in types[pasts[0]] else np.float32
    pools = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, np.nan, dtype), "cpu") for name in pasts}
    free, pages, seen = [*map(int, rng.permutation(PAGES))], [list[int]() for _ in schedule], [0] * len(schedule)
    found: list[list[Array]] = [[] for _ in schedule]
    for step in range(max(map(len, schedule))):
        there = [place for place, steps in enumerate(schedule) if step < len(steps) and any(steps[: step + 1])]
        for place in set(range(len(schedule))) - set(there):
            free += pages[place]
            pages[place] = []
        counts = [schedule[place][step] for place in there]
        for place, new in zip(there, counts, strict=True):
            pages[place] += [free.pop() for _ in range(-(-(seen[place] + new) // PAGE) - len(pages[place]))]
        table = np.full((len(there), 1 + max(len(pages[place]) for place in there)), -1, np.int32)
        for row, place in enumerate(there):
            table[row, : len(pages[place])] = pages[place]
        tokens = np.concatenate([given[place][seen[place] : seen[place] + new] for place, new in zip(there, counts, strict=True)])
        starts = np.cumsum([0, *counts], dtype=np.int32)
        binding = started.io_binding()
        fed = {decoder.input_ids: tokens, names.cumulative_lengths: starts, names.block_table: table}
        fed[names.past_lengths] = np.array([seen[place] for place in there], np.int32)
        for name, array in fed.items():
            binding.bind_cpu_input(name, array)
        for past, present in zip(pasts, presents, strict=True):
            binding.bind_ortvalue_input(past, pools[past])
            binding.bind_ortvalue_output(present, pools[past])
        binding.bind_output(decoder.logits, "cpu")
        started.run_with_iobinding(binding)
        rows = binding.get_outputs()[-1].numpy()
        for row, (place, new) in enumerate(zip(there, counts, strict=True)):
            found[place] += [rows[starts[row] : starts[row + 1]]] if new else []
            seen[place] += new
    return found
