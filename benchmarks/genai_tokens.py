"""Decoders exported with a growing cache, run by onnxruntime-genai on one buffer, token by token beside transformers.

    python -m benchmarks.genai_tokens [--only llama] [--folder build/genai] [--to benchmarks/results/genai_cpu.md]

Each export goes through `attnfuse optimize --cache shared`, and then three ways through onnxruntime-genai: one prompt, a batch of
three with padding, and one prompt on top of another's continuation. The first once more through ONNX Runtime, with the mask that
onnxruntime-genai hands in where steps are captured, for those models that read it.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

from benchmarks.genai import folders, runs, whisper
from benchmarks.genai.architectures import ARCHITECTURES, exporter_names, model
from benchmarks.genai.captured import Captured
from benchmarks.harness import WRONG, Benchmark, Cells, Row, Setting, command
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


def decoder_cells(name: str, exporter: str, setting: Setting) -> Cells:
    """How many tokens of an export are equal, each way."""
    decoder, folder, truths = ARCHITECTURES[name], setting.folder / name, _truths(name)
    made = folder / exporter
    export = folders.exported(decoder, exporter, folder / f"{exporter}.onnx")
    folders.shared(export, folders.source(decoder, folder / "transformers"), made)
    genai, given, longest = runs.Genai(made), truths.prompts, max(truths.prompts, key=len)
    found = {
        "attention": folders.operators(made, "Attention"),
        "one prompt": str(runs.compared(genai.generated([longest], STEPS), truths.one)),
        "batch of 3": str(runs.compared(genai.generated(given, STEPS), truths.batch)),
        "prompt on top": str(runs.compared(genai.continued(longest, _FIRST, given[0], _MORE), truths.after)),
    }
    with contextlib.suppress(ModelError):
        found["captured"] = str(runs.compared(Captured(export).generated(longest, STEPS), truths.one))
    return found


def whisper_cells(exporter: str, setting: Setting) -> Cells:
    """One recording, and three."""
    made = whisper.served(exporter, setting.folder / "whisper")
    several = {"one prompt": 1, "batch of 3": 3}
    found = {column: str(whisper.continued(made, count, STEPS)) for column, count in several.items()}
    return {"attention": folders.operators(made, "Attention"), **found}


def rows(setting: Setting) -> Iterator[Row]:
    """A row for each exporter of each decoder."""
    for key, decoder in setting.some(list(ARCHITECTURES.items())):
        for exporter in decoder.exporters:
            yield Row((decoder.name, exporter), functools.partial(decoder_cells, key, exporter))
    for exporter in setting.some(whisper.EXPORTED):
        yield Row(("whisper, with its encoder", exporter), functools.partial(whisper_cells, exporter))


NOTE = f"""\
On the CPU, float32. {exporter_names()}. Beside transformers' `generate(do_sample=False)`:

- {STEPS} tokens after one prompt of {max(runs.LENGTHS)} tokens;
- {STEPS} in each row of a batch of {", ".join(map(str, runs.LENGTHS))} tokens with padding;
- {_MORE} after a prompt on top of another and {_FIRST} tokens that follow it;
- with Whisper {STEPS} after prompts of 4 tokens for one recording and for three, encoder and decoder both fused;
- *captured*: {STEPS} after one prompt, made with `--padding assume-right` and run by ONNX Runtime with the masks that
  onnxruntime-genai hands in where it captures steps, as long as the buffer with zeros behind the text; empty where a model does
  not read such.

A number is how many tokens are equal before one differs, after {WRONG} where that is too few. In brackets is the largest
difference of logits up to there, in the size of the largest logit. A tie is a difference where the two best logits of
transformers are within {runs.NEAR:.0e}. Weights are random and peaky, so that one wrong position, mask or window shows."""
BENCHMARK = Benchmark("Decoders in onnxruntime-genai, token by token", rows, NOTE, ("decoder", "exporter"))
main = command("genai_tokens", BENCHMARK, provider="cpu", folder=pathlib.Path("build/genai"))

if __name__ == "__main__":
    main()
