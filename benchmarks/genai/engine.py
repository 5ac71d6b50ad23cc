"""Several prompts continued by the Engine of onnxruntime-genai at once: a decoder with a cache in pages (`--cache paged`)."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, where onnxruntime-genai is imported
_EVENTS, _MOST_RUNS = 16, 10_000


def limit(folder: pathlib.Path, **batching: int) -> None:
    """Changes settings of the Engine in the config of a folder, such as `block_size` and `max_scheduled_tokens`."""
    path = folder / "genai_config.json"
    config: Any = json.loads(path.read_text(encoding="utf-8"))
    config["engine"]["dynamic_batching"] |= batching
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def by_engine(folder: pathlib.Path, prompts: Sequence[Sequence[int]], steps: Sequence[int]) -> list[list[int]]:
    """The tokens that follow each prompt, greedily, at most so many; they end with a text's end.

    Raises:
        RuntimeError: A request fails, or the Engine does not come to an end.
    """
    import onnxruntime_genai

    genai: Any = onnxruntime_genai
    engine = genai.Engine(genai.Model(str(folder)))
    flags, requests, found = genai.EngineEventFlags, list[Any](), list[list[int]]()
    for prompt, most in zip(prompts, steps, strict=True):
        request = engine.create_request()
        options = genai.TurnOptions(request)
        options.set_do_sample(False)
        options.set_max_generated_tokens(most)
        request.begin_turn(np.array(prompt, np.int32), options)
        requests.append(request)
        found.append([])
    events, runs = engine.create_event_buffer(_EVENTS), 0
    while engine.has_pending_requests():
        engine.run(events)
        for event in (events[place] for place in range(len(events))):
            place = next(place for place, request in enumerate(requests) if request == event.request)
            if int(event.flags) & int(flags.FAILED):
                raise RuntimeError(f"request {place} failed: {event.error_code}")
            if int(event.flags) & int(flags.TOKEN):
                found[place].append(int(event.token))
            if int(event.flags) & int(flags.TURN_FINISHED):
                requests[place].close()  # until then it keeps its pages and its place in the batch
        runs += 1
        if runs > _MOST_RUNS:
            raise RuntimeError("the Engine does not come to an end")
    return found


def settings() -> Mapping[str, Mapping[str, int]]:
    """The settings that the Engine is run with: pages as they are, small ones, prompts in parts."""
    return {
        "as written": {},
        "pages of 16": {"block_size": 16, "num_blocks": 64, "max_batch_size": 4},
        "prompts in parts": {"block_size": 16, "num_blocks": 64, "max_batch_size": 4, "max_scheduled_tokens": 5},
    }
