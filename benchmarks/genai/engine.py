"""Six prompts continued at once by the Engine of onnxruntime-genai, token by token beside transformers (`--cache paged`).

python -m benchmarks.genai.engine [--only llama] [--folder build/genai_engine]
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.genai import folders, runs
from benchmarks.genai.architectures import ARCHITECTURES, model
from benchmarks.harness import WRONG, Benchmark, Cells, Row, Setting, command

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read once, where onnxruntime-genai is imported
_EVENTS, _MOST_TURNS = 16, 10_000
_PROMPTS, _COUNTS = (3, 11, 1, 6, 5, 40), (9, 5, 21, 13, 17, 11)
"""Tokens of each prompt, and those that follow it."""
_SMALL = {"block_size": 16, "num_blocks": 64, "max_batch_size": 4}
SETTINGS: dict[str, dict[str, int]] = {
    "as written": {},
    "pages of 16, 4 requests at once": _SMALL,
    "prompts in parts": _SMALL | {"max_scheduled_tokens": 5},
}
"""Settings of the Engine."""


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
    events, turns = engine.create_event_buffer(_EVENTS), 0
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
        turns += 1
        if turns > _MOST_TURNS:
            raise RuntimeError("the Engine does not come to an end")
    return found


def _same(found: list[int], wanted: list[int]) -> bool:
    """Whether tokens are equal up to the end of the text; its token is not given by the Engine, nor chosen by transformers."""
    return found == wanted[: len(found)]


def measure(name: str, exporter: str, setting: Setting) -> Cells:
    """How many requests have the tokens of transformers, with each setting of the Engine."""
    decoder, folder = ARCHITECTURES[name], setting.folder / name
    config, source, found = folders.source(decoder, folder / "transformers"), model(decoder), dict[str, str]()
    prompts = runs.prompts(decoder.settings["vocab_size"], _PROMPTS)
    wanted = [runs.by_torch(source, [prompt], count).tokens[0] for prompt, count in zip(prompts, _COUNTS, strict=True)]
    export = folders.exported(decoder, exporter, folder / f"{exporter}.onnx")
    folders.shared(export, config, folder / exporter, "--cache", "paged")
    for what, batching in SETTINGS.items():
        made = folder / f"{exporter}_run"
        shutil.copytree(folder / exporter, made, dirs_exist_ok=True)
        limit(made, **batching)
        same = [_same(*pair) for pair in zip(by_engine(made, prompts, _COUNTS), wanted, strict=True)]
        found[what] = f"{'' if all(same) else WRONG} {sum(same)} of {len(same)}".strip()
    return found


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each exporter of some decoders."""
    for name in setting.some(("gpt2", "opt", "llama")):
        for exporter in ARCHITECTURES[name].exporters:
            yield Row(f"{name}, {exporter}", functools.partial(measure, name, exporter))


NOTE = "Requests whose tokens are those of transformers, by the settings of the Engine."
BENCHMARK = Benchmark("Six prompts in the Engine of onnxruntime-genai", rows, NOTE)
main = command("genai.engine", BENCHMARK, provider="cpu", folder=pathlib.Path("build/genai_engine"))

if __name__ == "__main__":
    main()
