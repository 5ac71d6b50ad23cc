"""Decoders with a cache in pages run step by step, each request beside the source run by itself with a cache that grows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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


class Running:
    """A decoder with a cache in pages and its requests, past and present bound to the same memory.

    Pages are NaN where nothing was written, are handed out in no order, and go from requests that have ended to later ones.
    """

    def __init__(self, model: onnx.ModelProto, decoder: ServedDecoder) -> None:
        self._decoder, self._session = decoder, session(model, optimized=True)
        self._pasts = decoder.past_keys + decoder.past_values
        types = {item.name: item.type for item in self._session.get_inputs()}
        empty = np.full((PAGES, PAGE, decoder.kv_heads, decoder.head_size), np.nan)
        empty = empty.astype(np.float16 if "16" in types[self._pasts[0]] else np.float32)
        self._pools = {name: onnxruntime.OrtValue.ortvalue_from_numpy(empty.copy(), "cpu") for name in self._pasts}
        self._free = [*map(int, np.random.default_rng(1).permutation(PAGES))]
        self._pages: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}

    def step(self, given: Mapping[int, Array]) -> dict[int, Array]:
        """The logits of the new tokens of each request that is there; a request that is not there any more loses its pages."""
        names, there = self._decoder.pages, list(given)
        assert names is not None
        for ended in self._pages.keys() - given.keys():
            self._free += self._pages.pop(ended)
        for place, tokens in given.items():
            pages, seen = self._pages.setdefault(place, []), self._seen.setdefault(place, 0)
            pages += [self._free.pop() for _ in range(-(-(seen + len(tokens)) // PAGE) - len(pages))]
        table = np.full((len(there), 1 + max(map(len, self._pages.values()))), -1, np.int32)
        for row, place in zip(table, there, strict=True):
            row[: len(self._pages[place])] = self._pages[place]
        starts = np.cumsum([0, *map(len, given.values())], dtype=np.int32)
        past = np.array([self._seen[place] for place in there], np.int32)
        fed = {self._decoder.input_ids: np.concatenate([*given.values()]), names.cumulative_lengths: starts}
        binding = self._session.io_binding()
        for name, array in {**fed, names.past_lengths: past, names.block_table: table}.items():
            binding.bind_cpu_input(name, array)
        for name, present in zip(self._pasts, self._decoder.present_keys + self._decoder.present_values, strict=True):
            binding.bind_ortvalue_input(name, self._pools[name])
            binding.bind_ortvalue_output(present, self._pools[name])
        binding.bind_output(self._decoder.logits, "cpu")
        self._session.run_with_iobinding(binding)
        rows = binding.get_outputs()[-1].numpy()
        for place, tokens in given.items():
            self._seen[place] += len(tokens)
        return {place: rows[start:end] for place, start, end in zip(there, starts, starts[1:], strict=False)}


def together(
    model: onnx.ModelProto, decoder: ServedDecoder, schedule: Sequence[Sequence[int]], given: Sequence[Array]
) -> list[list[Array]]:
    """The logits of each request in each step where it has new tokens, run at once."""
    running, found, seen = Running(model, decoder), [list[Array]() for _ in schedule], [0] * len(schedule)
    for step in range(max(map(len, schedule))):
        fed: dict[int, Array] = {}
        for place, steps in enumerate(schedule):
            if step < len(steps) and any(steps[: step + 1]):
                fed[place] = given[place][seen[place] : seen[place] + steps[step]]
                seen[place] += steps[step]
        for place, rows in running.step(fed).items():
            found[place] += [rows] if len(rows) else []
    return found


def generated(
    model: onnx.ModelProto, decoder: ServedDecoder, prompts: Sequence[Sequence[int]], counts: Sequence[int], part: int
) -> list[list[int]]:
    """So many tokens after each prompt, greedily, prompts in parts; request i begins in step i and ends with its last token."""
    running, found = Running(model, decoder), [list[int]() for _ in prompts]
    left = [np.array(prompt, np.int64) for prompt in prompts]
    for step in itertools.count():
        there = [place for place in range(min(step + 1, len(prompts))) if len(found[place]) < counts[place]]
        if not there:
            return found
        for place, rows in running.step({place: left[place][:part] for place in there}).items():
            left[place] = left[place][part:]
            if not len(left[place]):
                found[place].append(int(rows[-1].argmax()))
                left[place] = np.array(found[place][-1:], np.int64)
    raise AssertionError
