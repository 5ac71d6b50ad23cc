"""Reason codes with what they mean and what to do about them, for `attnfuse explain --code` and docs/reasons.md.

The table is `reason_codes.txt`: `== Chapter`, a line on it, then one line for each code, `code: what it means -> what to do`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Entry:
    """The explanation of one reason code."""

    chapter: str
    """The part of the work that gives it."""
    meaning: str
    """When it is given."""
    remedy: str
    """What to do about it."""


@functools.cache
def chapters() -> Mapping[str, str]:
    """A line on each chapter, by its title; empty if there is nothing to say."""
    found: dict[str, str] = {}
    title = ""
    for line in _lines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
            found[title] = ""
        elif title and " -> " not in line:
            found[title] = line
    return found


@functools.cache
def entries() -> Mapping[str, Entry]:
    """Every entry of the table, by code."""
    found: dict[str, Entry] = {}
    title = ""
    for line in _lines():
        if line.startswith("== "):
            title = line.removeprefix("== ")
        elif " -> " in line:
            code, _, text = line.partition(": ")
            meaning, _, remedy = text.partition(" -> ")
            assert code not in found, f"{code} is there twice"
            found[code] = Entry(title, meaning, remedy)
    return found


def explained(code: str) -> str | None:
    """The entry of a code as text, None if there is none."""
    entry = entries().get(code)
    if entry is None:
        return None
    return f"{code} ({entry.chapter})\n    {entry.meaning}\n    What to do: {entry.remedy}"


def similar(code: str) -> list[str]:
    """Codes that are spelled nearly the same."""
    return difflib.get_close_matches(code, entries(), n=3)


def _lines() -> list[str]:
    text = importlib.resources.files("onnx_attnfuse_cli").joinpath("reason_codes.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
