"""Decoders exported with a growing cache, run by onnxruntime-genai on one buffer, token by token beside transformers.

    python -m benchmarks.genai_tokens [--only llama,gpt2] [--folder build/genai] [--to benchmarks/results/genai_cpu.md]

Each export goes through `attnfuse optimize --cache shared`, and then three ways through onnxruntime-genai: one prompt, a batch of
three with padding, and one prompt on top of another's continuation. The first once more through ONNX Runtime, with the mask that
onnxruntime-genai hands in where steps are captured, for those models that read it. The exit status is 1 where
a token is another one.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import argparse
import dataclasses
import logging
import pathlib
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

from benchmarks.genai import folders, runs, whisper
from benchmarks.genai.architectures import ARCHITECTURES, Decoder, exporter_names, model
from benchmarks.genai.captured import Captured
from benchmarks.harness import table
from onnx_attnfuse.errors import ModelError

STEPS = 64
_WHISPER = "whisper, with its encoder"
_FIRST, _MORE = 16, 32
"""Tokens between two prompts that follow each other, and after the second."""
_PACKAGES = ("onnxruntime-genai", "onnxruntime", "torch", "transformers", "onnxscript")


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of one export."""

    name: str
    exporter: str
    attention: str
    """The operators of attention, or why there is no model."""
    found: tuple[runs.Comparison, ...] = ()
    """One prompt, a batch, a prompt on top of another."""
    captured: runs.Comparison | None = None
    """One prompt with masks as captured steps have them; None: the model does not read them."""

    @property
    def is_equal(self) -> bool:
        """Whether every token is the one of transformers, or a tie decided."""
        return bool(self.found) and all(item.is_equal for item in (*self.found, *([self.captured] if self.captured else [])))


@dataclasses.dataclass(frozen=True)
class _Truths:
    """Tokens that transformers generates, for the three ways."""

    prompts: runs.Tokens
    one: runs.Generated
    batch: runs.Generated
    after: runs.Generated


def rows(decoder: Decoder, folder: pathlib.Path) -> Iterator[Row]:
    """One row for each exporter."""
    by_transformers = _truths(decoder)
    config = folders.source(decoder, folder / "transformers")
    for exporter in decoder.exporters:
        made = folder / exporter
        try:
            export = folders.exported(decoder, exporter, folder / f"{exporter}.onnx")
            folders.shared(export, config, made)
            counts = folders.operators(made)
            attention = ", ".join(f"{count} {name}" for name, count in counts.items() if name.endswith("Attention"))
            found = _found(runs.Genai(made), by_transformers)
            yield Row(decoder.name, exporter, attention, found, _captured(export, by_transformers))
        except Exception as error:  # noqa: BLE001 - the others are to be told all the same
            lines = str(error).strip().splitlines()
            yield Row(decoder.name, exporter, f"{type(error).__name__}: {lines[0] if lines else ''}")


def rows_of_whisper(folder: pathlib.Path) -> Iterator[Row]:
    """One row for each exporter: one recording, and three."""
    for exporter in whisper.EXPORTED:
        made = whisper.served(exporter, folder)
        counts = folders.operators(made)
        attention = ", ".join(f"{count} {name}" for name, count in counts.items() if name.endswith("Attention"))
        yield Row(_WHISPER, exporter, attention, tuple(whisper.continued(made, count, STEPS) for count in (1, 3)))


def _truths(decoder: Decoder) -> _Truths:
    given, made = runs.prompts(decoder.settings["vocab_size"]), model(decoder)
    longest = max(given, key=len)
    one = runs.by_torch(made, [longest], STEPS)
    after = runs.by_torch(made, [longest + one.tokens[0][:_FIRST] + given[0]], _MORE)
    return _Truths(given, one, runs.by_torch(made, given, STEPS), after)


def _found(genai: runs.Genai, truths: _Truths) -> tuple[runs.Comparison, ...]:
    given, longest = truths.prompts, max(truths.prompts, key=len)
    return (
        runs.compared(genai.generated([longest], STEPS), truths.one),
        runs.compared(genai.generated(given, STEPS), truths.batch),
        runs.compared(genai.continued(longest, _FIRST, given[0], _MORE), truths.after),
    )


def _captured(export: pathlib.Path, truths: _Truths) -> runs.Comparison | None:
    try:
        made = Captured(export)
    except ModelError:
        return None
    return runs.compared(made.generated(max(truths.prompts, key=len), STEPS), truths.one)


def rows_of(made: list[Row]) -> str:
    """The rows as a table of Markdown."""
    head = ["decoder", "exporter", "attention", "one prompt", "batch of 3", "prompt on top", "captured"]
    found = [[*row.found, *[""] * (3 - len(row.found)), row.captured or ""] for row in made]
    return table(head, [[row.name, row.exporter, row.attention, *more] for row, more in zip(made, found, strict=True)])


_PAGE = """\
# Decoders in onnxruntime-genai, token by token

`python -m benchmarks.genai_tokens --to benchmarks/results/genai_cpu.md`

{versions}; {machine}, on the CPU, float32. {exporters}.

{equal} of {count} exports give the tokens of transformers' `generate(do_sample=False)`, all of them:

- {steps} after one prompt of {one} tokens;
- {steps} in each row of a batch of {lengths} tokens with padding;
- {more} after a prompt on top of another and {first} tokens that follow it;
- with Whisper {steps} after prompts of 4 tokens for one recording and for three, encoder and decoder both fused;
- *captured*: {steps} after one prompt, made with `--padding assume-right` and run by ONNX Runtime with the masks that
  onnxruntime-genai hands in where it captures steps, as long as the buffer with zeros behind the text; empty where a model does
  not read such.

A number is how many tokens are equal before one differs, bold where that is too few. In brackets stands the largest
difference of logits up to there, in the size of the largest logit. A tie is a difference where the two best logits of
transformers are within {near:.0e}. Weights are random and peaky, so that one wrong position, mask or window shows.

{table}
"""


def page(made: list[Row]) -> str:
    """The table with how it was made."""
    return _PAGE.format(
        versions=", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES),
        machine=platform.machine(),
        exporters=exporter_names(),
        equal=sum(row.is_equal for row in made),
        count=len(made),
        steps=STEPS,
        one=max(runs.LENGTHS),
        lengths=", ".join(map(str, runs.LENGTHS)),
        more=_MORE,
        first=_FIRST,
        near=runs.NEAR,
        table=rows_of(made),
    )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join([*ARCHITECTURES, "whisper"]), help="decoders, with commas")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("build/genai"), help="where models go; exports are kept"
    )
    parser.add_argument("--to", type=pathlib.Path, help="write the table there")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    made: list[Row] = []
    for name in chosen.only.split(","):
        folder = chosen.folder / name
        for row in rows_of_whisper(folder) if name == "whisper" else rows(ARCHITECTURES[name], folder):
            print(f"{row.name} {row.exporter}: {row.attention}: {' | '.join(map(str, (*row.found, row.captured)))}", flush=True)
            made.append(row)
    print(rows_of(made))
    if chosen.to:
        chosen.to.write_text(page(made))
    return 0 if all(row.is_equal for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
