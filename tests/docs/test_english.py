"""The pages of the user's site: how many there are, how long they are, and how plain their sentences."""

from __future__ import annotations

import pathlib
import re

import pytest

_DOCS = pathlib.Path(__file__).parents[2] / "docs"
GENERATED = {"command_line", "python", "reasons"}
"""Pages whose text is that of the code; reasons.md has 10,000 words, so that the site has 25,000."""
PAGES = re.findall(
    r"^([a-z][\w-]*)$",
    "".join(re.findall(r"```\{toctree\}.+?```", (_DOCS / "index.md").read_text("utf-8"), re.DOTALL)),
    re.MULTILINE,
)
WRITTEN = ["index", *(page for page in PAGES if page not in GENERATED)]
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
    assert sum(len((_DOCS / f"{page}.md").read_text(encoding="utf-8").split()) for page in WRITTEN) <= 15_000


@pytest.mark.parametrize("page", WRITTEN)
def test_sentences_are_short_and_plain(page: str) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST]
    assert not long
    banned = [sentence for sentence in sentences(page) if BANNED.search(sentence)]
    assert not banned


def test_the_readme_is_a_page_long_and_plain() -> None:
    page = "../README"
    assert len((_DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()) <= 80
    assert not [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST or BANNED.search(sentence)]
