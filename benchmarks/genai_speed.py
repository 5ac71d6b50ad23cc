"""Tokens per second in onnxruntime-genai: an export as it is and fused, beside its own model builder on the same weights.

    python -m benchmarks.genai_speed [--only small] [--rounds 5] [--to FILE]

All models are loaded and take turns, so that what else the machine does falls on each alike. Where weights come to lie in memory
makes up to a tenth, so models are loaded anew several times, every time in another order. One thread is timed by the time of the
process, which others do not lengthen by taking turns with it; several are timed by the clock on the wall, and want a machine that
does nothing else.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_attnfuse
from benchmarks.genai import folders, runs
from benchmarks.genai.architectures import Decoder
from benchmarks.harness import Benchmark, Cells, Row, Setting, command

_TOKENS = {"pad_token_id": runs.PAD, "bos_token_id": runs.EOS, "eos_token_id": runs.EOS, "tie_word_embeddings": False}
_LENGTH, _LOADS = 1024, 5


def _llama(layers: int, hidden: int, inner: int, vocabulary: int) -> Decoder:
    """A Llama with heads of 64 channels, half as many of keys."""
    heads = hidden // 64
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": _LENGTH,
    }
    return Decoder("llama", "Llama", settings | _TOKENS, kv_heads=heads // 2, head=64, layers=layers)


SIZES = {"large": _llama(8, 1024, 2816, 16000), "small": _llama(4, 512, 1408, 8000)}
PROMPT, STEPS = {"small": 256, "large": 128}, {"small": 64, "large": 32}
MODELS = (
    "builder of onnxruntime-genai",
    "attnfuse --cache shared",
    "the same with --padding assume-right",
    "attnfuse, growing cache",
    "export as it is, growing cache",
)


@dataclasses.dataclass(frozen=True)
class Speed:
    """One run: seconds to the first token, and tokens a second after it."""

    prompt: float
    rate: float


@functools.cache
def contenders(size: str, setting: Setting) -> dict[str, pathlib.Path]:
    """The folders to run, by what they are called."""
    decoder, folder = SIZES[size], setting.folder / "genai_speed" / size
    config = folders.source(decoder, folder / "transformers")
    export = folders.exported(decoder, "dyn18", folder / "dyn18.onnx")
    fused = folder / "fused.onnx"
    onnx_attnfuse.optimize(export, ep="cpu").save(fused)
    shared, right, built = folder / "shared", folder / "right", folder / "built"
    folders.shared(export, config, shared)
    folders.shared(export, config, right, "--padding", "assume-right")
    if not built.exists():
        folders.built(config, built)
    growing = folders.growing(fused, shared, folder / "fused")
    plain = folders.growing(export, shared, folder / "growing")
    return dict(zip(MODELS, (built, shared, right, growing, plain), strict=True))


def measured(genai: runs.Genai, prompt: list[int], steps: int, clock: Callable[[], float]) -> Speed:
    """One run of a loaded model."""
    start = clock()
    generator = genai.generator([prompt], steps)
    generator.generate_next_token()
    first = clock()
    for _ in range(steps - 1):
        generator.generate_next_token()
    return Speed(first - start, (steps - 1) / (clock() - first))


@functools.cache
def speeds(size: str, setting: Setting) -> dict[str, list[Speed]]:
    """Rounds with models that are loaded several times, each time beginning with another."""
    found: dict[str, list[Speed]] = {name: [] for name in MODELS}
    for load in range(1 if setting.quick else _LOADS):
        first = load * 2 % len(MODELS)
        order, given = [*MODELS[first:], *MODELS[:first]], contenders(size, setting)
        loaded = {name: runs.Genai(given[name], setting.threads or None) for name in order}
        for name, rounds in _rounds(loaded, size, setting).items():
            found[name] += rounds
    return found


def _rounds(loaded: Mapping[str, runs.Genai], size: str, setting: Setting) -> dict[str, list[Speed]]:
    """Rounds in which every model runs once, after one that does not count; every second round goes the other way."""
    (prompt,) = runs.prompts(SIZES[size].settings["vocab_size"], (PROMPT[size],))
    clock = time.process_time if setting.threads == 1 else time.perf_counter
    found: dict[str, list[Speed]] = {name: [] for name in loaded}
    for turn in range((1 if setting.quick else setting.rounds) + 1):
        for name in list(loaded)[:: -1 if turn % 2 else 1]:
            speed = measured(loaded[name], prompt, STEPS[size], clock)
            if turn:
                found[name].append(speed)
    return found


def measure(size: str, name: str, setting: Setting) -> Cells:
    """Medians of all rounds."""
    found = speeds(size, setting)
    pairs = list(zip(found[name], found[MODELS[0]], strict=True))
    return {
        "tokens/s": f"{statistics.median(item.rate for item, _ in pairs):.0f}",
        "× tokens/s": f"{statistics.median(item.rate / first.rate for item, first in pairs):.2f}",
        "prompt ms": f"{1e3 * statistics.median(item.prompt for item, _ in pairs):.0f}",
        "× prompt": f"{statistics.median(first.prompt / item.prompt for item, first in pairs):.2f}",
        "operators": folders.operators(contenders(size, setting)[name]),
    }


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each size and model."""
    for size, decoder in setting.some(list(SIZES.items())):
        what = f"{size}: {decoder.layers} layers, {decoder.settings['hidden_size']} channels"
        for name in MODELS:
            yield Row((what, str(setting.threads or "all"), name), functools.partial(measure, size, name))


NOTE = f"""\
Llamas with heads of 64 channels, half as many of keys, exported by dynamo at opset 18, one sequence: prompts of {PROMPT}
tokens, and {STEPS} more. Medians of all rounds, of models that are loaded several times; × is how many times as fast it is
as the model builder's model of the same weights."""
HEADS = ("size", "threads", "model")
BENCHMARK = Benchmark("Tokens per second in onnxruntime-genai, on a CPU", rows, NOTE, HEADS)
main = command("genai_speed", BENCHMARK, provider="cpu", threads=1, rounds=5)

if __name__ == "__main__":
    main()
