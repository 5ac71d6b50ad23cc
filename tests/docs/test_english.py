"""The pages of the user's site: how many there are, how long they are, and how plain their sentences."""

from __future__ import annotations

import importlib
import pathlib
import re
from collections.abc import Iterator

import click
import pytest

from onnx_attnfuse.report import reason_codes
from onnx_attnfuse_cli import main

_DOCS = pathlib.Path(__file__).parents[2] / "docs"
GENERATED = {"command_line", "python", "reasons"}
"""Pages whose text is that of the code. Help and docstrings on command_line and python, 9,700 words, are not counted below."""
PAGES = re.findall(
    r"^([a-z][\w-]*)$",
    "".join(re.findall(r"```\{toctree\}.+?```", (_DOCS / "index.md").read_text("utf-8"), re.DOTALL)),
    re.MULTILINE,
)
WRITTEN = ["index", *(page for page in PAGES if page not in GENERATED)]
INSIDE = [
    "../CHANGELOG",
    "../CONTRIBUTING",
    "../SECURITY",
    "certificates",
    "conformance",
    "glossary",
    "how_it_works",
    "measured",
    "targets",
]
INSIDE += sorted(page.relative_to(_DOCS).with_suffix("").as_posix() for page in _DOCS.glob("*/*.md"))
"""Pages of the repository that the site does not hold."""
LONGEST = 30
BANNED = re.compile(r"\b(told|spelled|stands|behind|settles?|settled|what is)\b", re.IGNORECASE)


def prose(page: str) -> str:
    """The text of a page without code, tables, comments and the addresses of links."""
    text = (_DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"^(?P<fence>`{3,}).*?^(?P=fence)$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^(?:\||#| {4}\S).*$", "\n", text, flags=re.MULTILINE)
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)


def sentences(page: str) -> list[str]:
    """The sentences of a page; an item of a list begins one, and `code` is a word."""
    text = re.sub(r"`[^`]+`", "code", prose(page))
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    found = [piece for block in re.split(r"\n\s*\n", text) for piece in re.split(r"(?<=[.!?:])\s+|;\s", block)]
    return [" ".join(piece.split()) for piece in found if piece.strip()]


def test_the_site_is_small() -> None:
    assert len(PAGES) <= 40
    assert len(set(PAGES)) == len(PAGES)
    assert sum(len((_DOCS / f"{page}.md").read_text(encoding="utf-8").split()) for page in [*WRITTEN, "reasons"]) <= 22_500


@pytest.mark.parametrize("page", [*WRITTEN, *INSIDE])
def test_sentences_are_short_and_plain(page: str) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST]
    assert not long
    banned = [sentence for sentence in sentences(page) if BANNED.search(sentence)]
    assert not banned


def plain(text: str) -> bool:
    """Whether the sentences of a text are short and plain; `code` is a word."""
    found = re.split(r"(?<=[.!?:])\s+|;\s", re.sub(r"`[^`]+`", "code", text))
    return not any(len(sentence.split()) > LONGEST or BANNED.search(sentence) for sentence in found)


def texts(command: click.Command) -> Iterator[str]:
    """What `--help` of a command and of its own commands says, but for names."""
    yield from filter(None, (command.help, command.short_help))
    yield from (option.help for option in command.params if isinstance(option, click.Option) and option.help)
    yield from (example.what for example in getattr(command, "examples", ()))
    yield from getattr(command, "statuses", {}).values()
    for inner in getattr(command, "commands", {}).values():
        yield from texts(inner)


@pytest.mark.parametrize("name", main._COMMANDS)
def test_help_is_short_and_plain(name: str) -> None:
    command: click.Command = importlib.import_module(main._COMMANDS[name]).command
    assert [text for text in texts(command) if not plain(text)] == []


def test_reasons_are_short_and_plain() -> None:
    families = reason_codes.families().values()
    said = [text for family in families for text in (family.title, family.meaning, family.remedy)]
    said += [text for family in families for code in family.codes.values() for text in (code.meaning, code.remedy)]
    assert [text for text in said if not plain(text)] == []


def test_the_readme_is_a_page_long_and_plain() -> None:
    page = "../README"
    assert len((_DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()) <= 80
    assert not [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST or BANNED.search(sentence)]
