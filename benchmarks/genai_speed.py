"""Tokens per second in onnxruntime-genai: an export as it is and fused, beside its own model builder on the same weights.

    python -m benchmarks.genai_speed [--sizes small,large] [--threads 1] [--rounds 5] [--loads 5] [--folder FOLDER] [--to FILE]

All models are loaded and take turns, so that what else the machine does falls on each alike. Where weights come to lie in memory
makes up to a tenth, so models are loaded anew, every time in another order. A ratio is that of two runs of one round, and the
median of all rounds is told. One thread is timed by the time of the process on the CPU, which others do not
lengthen by taking turns with it; several are timed by the clock on the wall, and want a machine that does nothing else.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import pathlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import onnx_attnfuse
from benchmarks.genai import folders, runs
from benchmarks.genai.architectures import Decoder
from benchmarks.harness import table

_TOKENS = {"pad_token_id": runs.PAD, "bos_token_id": runs.EOS, "eos_token_id": runs.EOS, "tie_word_embeddings": False}
_LENGTH = 1024


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


SIZES = {"small": _llama(4, 512, 1408, 8000), "large": _llama(8, 1024, 2816, 16000)}
PROMPT, STEPS = {"small": 256, "large": 128}, {"small": 64, "large": 32}
_PACKAGES = ("onnxruntime-genai", "onnxruntime", "torch", "transformers")


@dataclasses.dataclass(frozen=True)
class Speed:
    """One run: seconds to the first token, and tokens a second after it."""

    prompt: float
    rate: float


def contenders(decoder: Decoder, folder: pathlib.Path, exporter: str) -> dict[str, pathlib.Path]:
    """The folders to run, by what they are called."""
    config = folders.source(decoder, folder / "transformers")
    export = folders.exported(decoder, exporter, folder / f"{exporter}.onnx")
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


def race(given: dict[str, pathlib.Path], size: str, threads: int, rounds: int, loads: int) -> dict[str, list[Speed]]:
    """Rounds with models that are loaded several times, each time beginning with another."""
    found: dict[str, list[Speed]] = {name: [] for name in given}
    for load in range(loads):
        first = load * 2 % len(given)
        order = [*list(given)[first:], *list(given)[:first]]
        for name, speeds in _rounds({name: given[name] for name in order}, size, threads, rounds).items():
            found[name] += speeds
    return found


def _rounds(given: dict[str, pathlib.Path], size: str, threads: int, rounds: int) -> dict[str, list[Speed]]:
    """Rounds in which every model runs once, after one that does not count; every second round goes the other way."""
    loaded = {name: runs.Genai(folder, threads) for name, folder in given.items()}
    (prompt,) = runs.prompts(SIZES[size].settings["vocab_size"], (PROMPT[size],))
    clock = time.process_time if threads == 1 else time.perf_counter
    found: dict[str, list[Speed]] = {name: [] for name in given}
    for turn in range(rounds + 1):
        for name in list(loaded)[:: -1 if turn % 2 else 1]:
            speed = measured(loaded[name], prompt, STEPS[size], clock)
            if turn:
                found[name].append(speed)
    return found


def rows_of(found: dict[str, list[Speed]], size: str, threads: int) -> list[list[object]]:
    """A row of the table for each model."""
    first = next(iter(found.values()))
    rows: list[list[object]] = []
    for name, speeds in found.items():
        rate, prompt = (statistics.median(getattr(item, field) for item in speeds) for field in ("rate", "prompt"))
        faster = statistics.median(one.rate / other.rate for one, other in zip(speeds, first, strict=True))
        sooner = statistics.median(other.prompt / one.prompt for one, other in zip(speeds, first, strict=True))
        rows.append([size, threads, name, f"{rate:.0f}", f"{faster:.2f}", f"{prompt * 1e3:.0f}", f"{sooner:.2f}"])
    return rows


_PAGE = """\
# Tokens per second in onnxruntime-genai, on a CPU

`python -m benchmarks.genai_speed {arguments}`

{versions}; {machine}, {cores} cores that others use too, float32.

Llamas with heads of 64 channels, half as many of keys, exported by {exporter}:

{sizes}

One sequence, one thread by the time of the process, several by the clock on the wall. Models are loaded {loads} times, as
where their weights come to lie in memory makes up to a tenth, and run once in each of {rounds} rounds every time. Medians of all
rounds; `×` is the median of ratios within a round, above 1 where it is faster than the model builder's model of the same weights.

{rows}

Operators:

{operators}
"""


def page(rows: list[list[object]], given: dict[str, pathlib.Path], chosen: argparse.Namespace) -> str:
    """The table with how it was made; operators are those of the last size."""
    counts = {name: sorted(folders.operators(folder).items()) for name, folder in given.items()}
    return _PAGE.format(
        arguments=f"--sizes {chosen.sizes} --threads {chosen.threads} --rounds {chosen.rounds} --loads {chosen.loads}",
        versions=", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        machine=platform.machine(),
        cores=os.cpu_count(),
        exporter=chosen.exporter,
        sizes="\n".join(map(_described, chosen.sizes.split(","))),
        rounds=chosen.rounds,
        loads=chosen.loads,
        rows=table(["size", "threads", "model", "tokens/s", "×", "prompt ms", "×"], rows),
        operators="\n".join(f"- {name}: {', '.join(f'{count} {kind}' for kind, count in of)}" for name, of in counts.items()),
    )


def _described(size: str) -> str:
    """A line on a size."""
    found = SIZES[size]
    what = f"{found.layers} layers, {found.settings['hidden_size']} channels, {found.settings['vocab_size']} tokens"
    return f"- {size}: {what}; a prompt of {PROMPT[size]} tokens, then {STEPS[size]} more"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default=",".join(SIZES), help="with commas")
    parser.add_argument("--threads", default="1", help="numbers of threads, with commas")
    parser.add_argument("--rounds", type=int, default=5, help="of each load")
    parser.add_argument("--loads", type=int, default=5, help="how often models are loaded")
    parser.add_argument("--exporter", default="dyn18")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/genai/speed"), help="where models go")
    parser.add_argument("--to", type=pathlib.Path, help="write the table there")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows: list[list[object]] = []
    given: dict[str, pathlib.Path] = {}
    for size in chosen.sizes.split(","):
        given = contenders(SIZES[size], chosen.folder / size, chosen.exporter)
        for threads in map(int, chosen.threads.split(",")):
            rows += rows_of(race(given, size, threads, chosen.rounds, chosen.loads), size, threads)
            print(*rows[-len(given) :], sep="\n", flush=True)
    if chosen.to:
        chosen.to.write_text(page(rows, given, chosen))


if __name__ == "__main__":
    main()
