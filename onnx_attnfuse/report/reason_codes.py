"""Reason codes by family, with their meaning and what to do, for reports, `attnfuse explain --code` and docs/reasons.md.

The table is `reason_codes.txt`: `== family: title`, its meaning, an indented example, `Do: what to do`, then one line for
each code, `code: meaning -> what to do`; without the latter it is that of the family.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import textwrap
from collections.abc import Mapping

_PAGE = "https://github.com/onnx-attnfuse/onnx-attnfuse/blob/main/docs/reasons.md"
_COLUMNS = 100
_RENAMED = {"not-spelled": "not-decomposed", "spelled-as-wanted": "provider-form"}
"""Earlier names of codes, which older reports have."""


@dataclasses.dataclass(frozen=True)
class Code:
    """The explanation of one reason code."""

    meaning: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Family:
    """Reason codes with one cause, and one thing to do."""

    name: str
    title: str
    meaning: str
    example: str
    """Lines of a model's source, or commands."""
    remedy: str
    codes: Mapping[str, Code]

    @property
    def url(self) -> str:
        """Its part of the page of reason codes."""
        return f"{_PAGE}#{self.name}"


@functools.cache
def families() -> Mapping[str, Family]:
    """Every family by name, in the order of the work."""
    text = importlib.resources.files("onnx_attnfuse.report").joinpath("reason_codes.txt").read_text(encoding="utf-8")
    found = [_family(block) for block in text.split("\n== ")[1:]]
    return {family.name: family for family in found}


@functools.cache
def by_code() -> Mapping[str, Family]:
    """The family of every code."""
    return {code: family for family in families().values() for code in family.codes}


def family_name(code: str) -> str | None:
    """The name of a code's family; None if the code is a pattern's own."""
    return by_code()[code].name if code in by_code() else None


def remedy(code: str) -> str:
    """The remedy of a code in one sentence; empty if nothing can be done, or the code is a pattern's own."""
    family = by_code().get(code)
    first = family.codes[code].remedy.partition(". ")[0] if family else ""
    return "" if first.startswith("No ") else first.removesuffix(".")


def explained(name: str) -> str | None:
    """A code, by its earlier name too, or a family as text; None if there is neither."""
    name = _RENAMED.get(name, name)
    family = families().get(name) or by_code().get(name)
    if family is None:
        return None
    entry = family.codes.get(name)
    lines = [f"{name}: {family.title} ({family.name})", *_wrapped(entry.meaning)] if entry else [f"{name}: {family.title}"]
    lines += [*_wrapped(family.meaning), "", *(f"        {line}" for line in family.example.splitlines()), ""]
    lines += _wrapped(f"What to do: {(entry or family).remedy}")
    lines += [] if entry else _wrapped(f"Codes: {', '.join(family.codes)}")
    return "\n".join([*lines, f"    {family.url}"])


def similar(name: str) -> list[str]:
    """Codes and families with nearly this name."""
    return difflib.get_close_matches(name, [*by_code(), *families()], n=3)


def _family(block: str) -> Family:
    head, *lines = [line for line in block.splitlines() if line]
    name, _, title = head.partition(": ")
    (remedy,) = (line.removeprefix("Do: ") for line in lines if line.startswith("Do: "))
    codes: dict[str, Code] = {}
    for code, _, text in (line.partition(": ") for line in lines[1:] if not line.startswith(("    ", "Do: "))):
        meaning, _, own = text.partition(" -> ")
        codes[code] = Code(meaning, own or remedy)
    example = "\n".join(line.strip() for line in lines if line.startswith("    "))
    return Family(name, title, lines[0], example, remedy, codes)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
