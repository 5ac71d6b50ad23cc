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
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import onnx_attnfuse
from benchmarks.exports import quiet
from benchmarks.genai import folders, runs
from benchmarks.genai.architectures import Decoder
from benchmarks.harness import Benchmark, Race, Setting, command

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


@dataclasses.dataclass(frozen=True)
class Speed:
    """One run: seconds to the first token, and tokens a second after it."""

    prompt: float
    rate: float


def contenders(decoder: Decoder, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The folders to run, by what they are called."""
    config = folders.source(decoder, folder / "transformers")
    export = folders.exported(decoder, "dyn18", folder / "dyn18.onnx")
    fused = folder / "fused.onnx"
    onnx_attnfuse.optimize(export, ep="cpu").save(fused)
    shared, right, built = folder / "shared", folder / "right", folder / "built"
    folders.shared(export, config, shared)
    folders.shared(export, config, right, "--padding", "assume-right")
    if not built.exists():
        folders.built(config, built)
    return {
        "builder of onnxruntime-genai": built,
        "attnfuse --cache shared": shared,
        "the same with --padding assume-right": right,
        "attnfuse, growing cache": folders.growing(decoder, fused, config, folder / "fused"),
        "export as it is, growing cache": folders.growing(decoder, export, config, folder / "growing"),
    }


def measured(genai: runs.Genai, prompt: list[int], steps: int, clock: Callable[[], float]) -> Speed:
    """One run of a loaded model."""
    start = clock()
    generator = genai.generator([prompt], steps)
    generator.generate_next_token()
    first = clock()
    for _ in range(steps - 1):
        generator.generate_next_token()
    return Speed(first - start, (steps - 1) / (clock() - first))


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """Rounds with models that are loaded several times, each time beginning with another."""
    names, found = list(race.variants), {name: list[Speed]() for name in race.variants}
    for load in range(1 if setting.quick else _LOADS):
        first = load * 2 % len(names)
        loaded = {name: race.variants[name]() for name in [*names[first:], *names[:first]]}
        for name, speeds in _rounds(loaded, race.truth, setting).items():
            found[name] += speeds
    return {name: _cell(speeds, found[names[0]]) for name, speeds in found.items()}


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


def _cell(speeds: list[Speed], first: list[Speed]) -> str:
    rate, prompt = (statistics.median(getattr(item, field) for item in speeds) for field in ("rate", "prompt"))
    faster = statistics.median(one.rate / other.rate for one, other in zip(speeds, first, strict=True))
    sooner = statistics.median(other.prompt / one.prompt for one, other in zip(speeds, first, strict=True))
    return f"{rate:.0f} ({faster:.2f}), {prompt * 1e3:.0f} ({sooner:.2f})"


def races(setting: Setting) -> Iterator[Race]:
    """A row for each size."""
    quiet()
    for size, decoder in setting.some(list(SIZES.items())):
        given = contenders(decoder, setting.folder / "genai_speed" / size)
        load: dict[str, Callable[[], Any]] = {
            name: lambda folder=folder: runs.Genai(folder, setting.threads or None) for name, folder in given.items()
        }
        what = f"{decoder.layers} layers, {decoder.settings['hidden_size']} channels, {decoder.settings['vocab_size']} tokens"
        yield Race(f"{size}: {what}; {PROMPT[size]} tokens, then {STEPS[size]} more", load, size)


NOTE = """\
Llamas with heads of 64 channels, half as many of keys, exported by dynamo at opset 18, one sequence. A cell has tokens a second
and milliseconds of the prompt, each with how many times as fast that is as the model builder's model of the same weights: medians
of all rounds, of models that are loaded several times."""
BENCHMARK = Benchmark("Tokens per second in onnxruntime-genai, on a CPU", races, NOTE, measure)
main = command("genai_speed", BENCHMARK, provider="cpu", threads=1, rounds=5)

if __name__ == "__main__":
    main()
