"""A page for each execution provider: what its record says, what was tried, and what became of whole models.

python docs/provider_pages.py
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator

from onnx_attnfuse.bench.doctor import tables
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.execution_provider import UNKNOWN, ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.operators import by_key
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason

ROOT = pathlib.Path(__file__).parents[1]
_HEAD = "<!-- Written by `make provider-pages` from the record and the tables of results; do not edit. -->"
_MASKS = {"none": "none", "bias": "added", "raw": "of 0 and 1", "lengths": "lengths", "ranges": "lengths with offsets"}
_YES = {True: "yes", False: "no", None: "not known"}


def page(record: ExecutionProvider) -> str:
    """The page of a provider."""
    parts = [f"# {record.name}", _HEAD, *_introduction(record), "## Operators", _operators(record), "## Other facts"]
    parts.append("\n".join(f"- {line}" for line in _facts(record)))
    tried = tables([record.name]).get(record.name)
    if tried is not None:
        parts += ["## Tested forms", f"{tried[0].upper()}{tried[1:]}. [How they are tested](../conformance.md)."]
    summary = _summary(ROOT / "benchmarks" / "results" / f"providers_{record.name}.md")
    if summary:
        parts += ["## Whole models", summary, f"[Model by model](../../benchmarks/results/providers_{record.name}.md)."]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[pathlib.Path, str]:
    """All pages by their files."""
    return {ROOT / "docs" / "providers" / f"{record.name}.md": page(record) for record in providers.every()}


def _introduction(record: ExecutionProvider) -> Iterator[str]:
    packages = " or ".join(f"`{package}`" for package in dict.fromkeys((record.distribution, *record.plugins)))
    yield f"`attnfuse optimize MODEL --ep {record.name}` writes a model for {record.ort_name} of ONNX Runtime, in {packages}."
    yield f"Source: {record.known_from}."
    notes = (ROOT / "docs" / "details" / "providers.md").read_text(encoding="utf-8")
    if f"\n## {record.name}\n" in notes:
        yield f"[Findings in detail](../details/providers.md#{record.name})."
    form = record.unfused_form
    if form is not None:
        kinds, place = _types(form.dtypes), {"scores": "after the product", "queries": "at the queries"}[form.scale]
        source = _shorter(form.known_from, record)
        yield f"attnfuse writes plain attention here, in {kinds}, scaled {place}. The provider fuses it itself: {source}."


def _operators(record: ExecutionProvider) -> str:
    """A table of the operators that attnfuse writes with their forms, and a line on each other one."""
    rows = [("operator", "written", "types", "masks", "causal", "kernels", "source"), ("---",) * 7]
    refused: list[str] = []
    for key, info in sorted(by_key().items()):
        if info.kind == "attention" and info.target is not None:
            found = support(key, record)
            if isinstance(found, Reason):
                refused.append(f"- Not written: {found.message}.")
            else:
                rows.append((f"`{key}`", *_supported(found), _shorter(found.known_from, record)))
    table = [f"| {' | '.join(row)} |" for row in rows] if rows[2:] else []
    return "\n\n".join(filter(None, ("\n".join(table), "\n".join(refused))))


def _supported(found: OpSupport) -> tuple[str, ...]:
    masks = ", ".join(words for form, words in _MASKS.items() if form in found.masks)
    written = "by default" if found.by_default else "with `--target`"
    kernels = ", ".join(dict.fromkeys("not known" if ((name, ()),) == UNKNOWN else name for name, _ in found.kernels))
    return written, _types(found.written), masks, _YES[found.causal], kernels


def _shorter(source: str, record: ExecutionProvider) -> str:
    """A source without that of the whole record, which the page names at its top."""
    return source.removeprefix(record.known_from).lstrip(";:, ") or "as above"


def _types(dtypes: Iterable[object]) -> str:
    return ", ".join(sorted(map(type_name, dtypes)))


def _facts(record: ExecutionProvider) -> Iterator[str]:
    """Facts about a provider that concern no single operator, one line each."""
    yield f"Fused operators give NaN, as a Softmax does, where all scores of a row are -inf: {_YES[record.keeps_nan_rows]}."
    if record.computes_in_float16:
        yield "The provider computes float32 in float16; attnfuse edits fully masked rows so that they give the float32 result."
    else:
        yield f"Sums of float16 numbers are rounded to float16: {_YES[record.rounds_float16]}."
    yield f"Run-time checks (`--padding guarded`) cost no more than their condition: {_YES[record.takes_if]}."
    yield f"RotaryEmbedding of com.microsoft: {'used' if record.rotates else 'decomposed'}."
    yield f"A cache in one buffer (`--cache shared`): {_YES[record.shares_cache]}."
    fate = "keeps fused operators" if record.keeps_fused else "decomposes fused operators that are not known to run correctly"
    yield f"attnfuse {fate}."
    if record.skip_norms is not None:
        taken = {"none": "", "without sum": " if another node reads their sum"}[record.skip_norms]
        yield f"attnfuse decomposes SkipLayerNormalization and its variants{taken}."
    if record.decomposed_norms:
        yield f"attnfuse decomposes these operators of ai.onnx: {', '.join(sorted(record.decomposed_norms))}."
    if record.fixed_sizes:
        yield "The provider takes fixed sizes only (`--dim`)."
    if record.mixes_up_inputs:
        yield "attnfuse moves unused inputs to the end, because the provider mixes up the inputs after them. Names stay."
    if record.gathers_flat:
        yield "attnfuse flattens indices of Gather with more than two axes, for which the provider is wrong."
    if record.merges_into_norms:
        yield "Before norms attnfuse writes a quotient for Reciprocal of Sqrt, and repeats tables shared by batch entries."
    if record.pays:
        kinds = len(record.pays)
        yield f"attnfuse makes {kinds} kinds of rewrites that are faster there ([decisions](../decisions/README.md))."


def _summary(path: pathlib.Path) -> str:
    """The lines on all models at the top of a table of results; empty where there is none."""
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()[2:]
    top = itertools.takewhile(lambda line: not line.startswith("## "), lines)
    return re.sub(r"\n{2,}", "\n\n", "\n".join(top)).strip()


if __name__ == "__main__":
    for file, text in pages().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
