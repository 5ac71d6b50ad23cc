"""Tokens per second in onnxruntime-genai: an export as it is and fused, beside its own model builder on the same weights.

    python -m benchmarks.genai_speed [--threads 1,2] [--rounds 7] [--exporter dyn18] [--folder FOLDER] [--to FILE]

All models stay loaded and take turns, so that what else the machine does falls on each alike. A ratio is that of two runs of one
round, and the median of all rounds is told.
"""

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
from importlib import metadata

import onnx_attnfuse
from benchmarks.genai import folders, runs
from benchmarks.genai.architectures import Decoder

_LENGTH, _VOCABULARY = 1024, 8000
DECODER = Decoder(
    "llama",
    "Llama",
    {
        "vocab_size": _VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": _LENGTH,
        "tie_word_embeddings": False,
        "pad_token_id": runs.PAD,
        "bos_token_id": runs.EOS,
        "eos_token_id": runs.EOS,
    },
    kv_heads=4,
    head=64,
    layers=4,
)
"""4 layers of a Llama, 8 heads of 64, 4 of keys: 58 MB a step."""
PROMPT, STEPS = 256, 64
_PACKAGES = ("onnxruntime-genai", "onnxruntime", "torch", "transformers")


@dataclasses.dataclass(frozen=True)
class Speed:
    """One run: seconds to the first token, and tokens a second after it."""

    prompt: float
    rate: float


def contenders(folder: pathlib.Path, exporter: str) -> dict[str, pathlib.Path]:
    """The folders to run, by what they are called."""
    config = folders.source(DECODER, folder / "transformers")
    export = folders.exported(DECODER, exporter, folder / f"{exporter}.onnx")
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
        "attnfuse, growing cache": folders.growing(DECODER, fused, config, folder / "fused"),
        "export as it is, growing cache": folders.growing(DECODER, export, config, folder / "growing"),
    }


def measured(genai: runs.Genai, prompt: list[int]) -> Speed:
    """One run of a loaded model."""
    start = time.perf_counter()
    generator = genai.generator([prompt], STEPS)
    generator.generate_next_token()
    first = time.perf_counter()
    for _ in range(STEPS - 1):
        generator.generate_next_token()
    return Speed(first - start, (STEPS - 1) / (time.perf_counter() - first))


def race(given: dict[str, pathlib.Path], threads: int, rounds: int) -> dict[str, list[Speed]]:
    """Rounds in which every model runs once, after one that does not count; every second round goes the other way."""
    loaded = {name: runs.Genai(folder, threads) for name, folder in given.items()}
    (prompt,) = runs.prompts(_VOCABULARY, (PROMPT,))
    found: dict[str, list[Speed]] = {name: [] for name in given}
    for turn in range(rounds + 1):
        for name in list(loaded)[:: -1 if turn % 2 else 1]:
            speed = measured(loaded[name], prompt)
            if turn:
                found[name].append(speed)
    return found


def lines(found: dict[str, list[Speed]], threads: int) -> list[str]:
    """A row of the table for each model."""
    first = next(iter(found.values()))
    told: list[str] = []
    for name, speeds in found.items():
        rate, prompt = (statistics.median(getattr(item, field) for item in speeds) for field in ("rate", "prompt"))
        faster = statistics.median(one.rate / other.rate for one, other in zip(speeds, first, strict=True))
        sooner = statistics.median(other.prompt / one.prompt for one, other in zip(speeds, first, strict=True))
        told.append(f"| {threads} | {name} | {rate:.0f} | {faster:.2f} | {prompt * 1e3:.0f} | {sooner:.2f} |")
    return told


_PAGE = """\
# Tokens per second in onnxruntime-genai, on a CPU

`python -m benchmarks.genai_speed {arguments}`

{versions}; {machine}, {cores} cores that others use too, float32.

A Llama of {layers} layers, {hidden} channels, {heads} heads of {head} and {kv_heads} of keys, {vocabulary} tokens,
exported by {exporter}. A prompt of {prompt} tokens, then {steps} more, one sequence. Medians of {rounds} rounds in which every
model runs once; `×` is the median of ratios within a round, above 1 where it is faster than the model builder's model of the
same weights.

| threads | model | tokens/s | × | prompt ms | × |
|---|---|---|---|---|---|
{rows}

Operators:

{operators}
"""


def page(rows: list[str], given: dict[str, pathlib.Path], chosen: argparse.Namespace) -> str:
    """The table with how it was made."""
    settings = DECODER.settings
    counts = {name: sorted(folders.operators(folder).items()) for name, folder in given.items()}
    return _PAGE.format(
        arguments=f"--threads {chosen.threads} --rounds {chosen.rounds}",
        versions=", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        machine=platform.machine(),
        cores=os.cpu_count(),
        layers=DECODER.layers,
        hidden=settings["hidden_size"],
        heads=settings["num_attention_heads"],
        head=DECODER.head,
        kv_heads=DECODER.kv_heads,
        vocabulary=_VOCABULARY,
        exporter=chosen.exporter,
        prompt=PROMPT,
        steps=STEPS,
        rounds=chosen.rounds,
        rows="\n".join(rows),
        operators="\n".join(f"- {name}: {', '.join(f'{count} {kind}' for kind, count in of)}" for name, of in counts.items()),
    )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--exporter", default="dyn18")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/genai/speed"), help="where models go")
    parser.add_argument("--to", type=pathlib.Path, help="write the table there")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    given = contenders(chosen.folder, chosen.exporter)
    rows: list[str] = []
    for threads in map(int, chosen.threads.split(",")):
        for line in lines(race(given, threads, chosen.rounds), threads):
            print(line, flush=True)
            rows.append(line)
    if chosen.to:
        chosen.to.write_text(page(rows, given, chosen))


if __name__ == "__main__":
    main()
