"""Decoders exported with a growing cache, run by onnxruntime-genai on one buffer, token by token beside transformers.

    python -m benchmarks.genai_tokens [--only llama] [--folder build/genai] [--to benchmarks/results/genai_cpu.md]

Each export goes through `attnfuse optimize --cache shared`, and then three ways through onnxruntime-genai: one prompt, a batch of
three with padding, and one prompt on top of another's continuation. The first once more through ONNX Runtime, with the mask that
onnxruntime-genai hands in where steps are captured, for those models that read it. The exit status is 1 where
a token is another one.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping

from benchmarks.exports import quiet
from benchmarks.genai import folders, runs, whisper
from benchmarks.genai.architectures import ARCHITECTURES, exporter_names, model
from benchmarks.genai.captured import Captured
from benchmarks.harness import WRONG, Benchmark, Race, Setting, command, one_line
from onnx_attnfuse.errors import ModelError

STEPS = 64
_FIRST, _MORE = 16, 32
"""Tokens between two prompts that follow each other, and after the second."""


@dataclasses.dataclass(frozen=True)
class _Truths:
    """Tokens that transformers generates, for the three ways."""

    prompts: runs.Tokens
    one: runs.Generated
    batch: runs.Generated
    after: runs.Generated


@functools.cache
def _truths(name: str) -> _Truths:
    decoder = ARCHITECTURES[name]
    given, made = runs.prompts(decoder.settings["vocab_size"]), model(decoder)
    longest = max(given, key=len)
    one = runs.by_torch(made, [longest], STEPS)
    after = runs.by_torch(made, [longest + one.tokens[0][:_FIRST] + given[0]], _MORE)
    return _Truths(given, one, runs.by_torch(made, given, STEPS), after)


def decoder_cells(name: str, exporter: str, folder: pathlib.Path) -> Iterator[tuple[str, object]]:
    """What each way of one export came to, as it comes."""
    decoder, made, truths = ARCHITECTURES[name], folder / exporter, _truths(name)
    export = folders.exported(decoder, exporter, folder / f"{exporter}.onnx")
    folders.shared(export, folders.source(decoder, folder / "transformers"), made)
    yield "attention", _attention(made)
    genai, given, longest = runs.Genai(made), truths.prompts, max(truths.prompts, key=len)
    yield "one prompt", runs.compared(genai.generated([longest], STEPS), truths.one)
    yield "batch of 3", runs.compared(genai.generated(given, STEPS), truths.batch)
    yield "prompt on top", runs.compared(genai.continued(longest, _FIRST, given[0], _MORE), truths.after)
    try:
        captured = Captured(export)
    except ModelError:
        return
    yield "captured", runs.compared(captured.generated(longest, STEPS), truths.one)


def whisper_cells(exporter: str, folder: pathlib.Path) -> Iterator[tuple[str, object]]:
    """One recording, and three."""
    made = whisper.served(exporter, folder)
    yield "attention", _attention(made)
    yield "one prompt", whisper.continued(made, 1, STEPS)
    yield "batch of 3", whisper.continued(made, 3, STEPS)


def _attention(made: pathlib.Path) -> str:
    return ", ".join(f"{count} {name}" for name, count in folders.operators(made).items() if name.endswith("Attention"))


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """How many tokens are equal, each way."""
    del setting
    found: dict[str, str] = {}
    try:
        for column, cell in race.truth():
            found[column] = str(cell)
    except Exception as error:  # noqa: BLE001 - the others are to be told all the same
        return {"attention": f"{WRONG}: {type(error).__name__}: {one_line(error)}", **found}
    return found


def races(setting: Setting) -> Iterator[Race]:
    """A row for each exporter of each decoder."""
    quiet()
    known: list[tuple[str, Callable[..., Iterator[tuple[str, object]]], str, str]] = [
        (decoder.name, functools.partial(decoder_cells, key), key, exporter)
        for key, decoder in ARCHITECTURES.items()
        for exporter in decoder.exporters
    ]
    known += [("whisper, with its encoder", whisper_cells, "whisper", exporter) for exporter in whisper.EXPORTED]
    for label, cells, key, exporter in known[-1 - len(whisper.EXPORTED) :][:2] if setting.quick else known:
        yield Race(f"{label}, {exporter}", {}, functools.partial(cells, exporter, setting.folder / key))


NOTE = f"""\
On the CPU, float32. {exporter_names()}. Beside transformers' `generate(do_sample=False)`:

- {STEPS} tokens after one prompt of {max(runs.LENGTHS)} tokens;
- {STEPS} in each row of a batch of {", ".join(map(str, runs.LENGTHS))} tokens with padding;
- {_MORE} after a prompt on top of another and {_FIRST} tokens that follow it;
- with Whisper {STEPS} after prompts of 4 tokens for one recording and for three, encoder and decoder both fused;
- *captured*: {STEPS} after one prompt, made with `--padding assume-right` and run by ONNX Runtime with the masks that
  onnxruntime-genai hands in where it captures steps, as long as the buffer with zeros behind the text; empty where a model does
  not read such.

A number is how many tokens are equal before one differs, after {WRONG} where that is too few. In brackets stands the largest
difference of logits up to there, in the size of the largest logit. A tie is a difference where the two best logits of
transformers are within {runs.NEAR:.0e}. Weights are random and peaky, so that one wrong position, mask or window shows."""
BENCHMARK = Benchmark("Decoders in onnxruntime-genai, token by token", races, NOTE, measure)
main = command("genai_tokens", BENCHMARK, provider="cpu", folder=pathlib.Path("build/genai"))

if __name__ == "__main__":
    main()
