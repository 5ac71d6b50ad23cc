"""Every page of results names a command that exists, so that its figures can be made again."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = sorted((_ROOT / "benchmarks" / "results").glob("*.md"))
_DOCS = sorted([*(_ROOT / "docs").rglob("*.md"), *(_ROOT / "benchmarks").glob("*.md"), _ROOT / "README.md"])


def commands(text: str) -> Iterator[tuple[str, str]]:
    """What a page says to run: a module and its first argument, a script, or a target of make."""
    yield from re.findall(r"python (?:-W \w+ )?-m ((?:benchmarks|models|tests)[\w.]*)(?: ([a-z][\w]*))?", text)
    yield from ((script, "") for script in re.findall(r"\b(?:python )?((?:benchmarks|tests|models)/[\w/]+\.py)", text))
    yield from (("make", target) for target in re.findall(r"\bmake ([a-z][a-z-]+)", text))
    yield from (("attnfuse", name) for name in re.findall(r"`attnfuse (\w+)", text))


def exists(command: str, argument: str) -> bool:
    """Whether there is such a command; a benchmark of several has the one that is named."""
    if command == "make":
        return re.search(rf"^{argument}:", (_ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) is not None
    if command == "attnfuse":
        return argument in (_ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    if command.endswith(".py"):
        return (_ROOT / command).is_file()
    path = _ROOT / command.replace(".", "/")
    if command in {"benchmarks.on_cpu", "benchmarks.on_gpu", "benchmarks.on_torch"} and argument:
        return (path / f"{argument}.py").is_file()
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_names_a_command_that_exists(page: pathlib.Path) -> None:
    found = set(commands(page.read_text(encoding="utf-8")))
    assert found
    assert not [words for words in found if not exists(*words)]


@pytest.mark.parametrize("page", _DOCS, ids=lambda page: page.stem)
def test_benchmarks_that_a_page_names_exist(page: pathlib.Path) -> None:
    found = [words for words in commands(page.read_text(encoding="utf-8")) if words[0].startswith("benchmarks")]
    assert not [words for words in found if not exists(*words)]


def test_a_command_that_is_gone_is_noticed() -> None:
    text = "`python -m benchmarks.gone OUT`, `python benchmarks/gone.py`, python -m benchmarks.on_gpu gone, `make gone`"
    found = list(commands(text))
    assert len(found) == 4
    assert not any(exists(*words) for words in found)


def test_a_command_that_is_there_is_found() -> None:
    assert exists("benchmarks.on_gpu", "whole")
    assert exists("make", "drift")
    assert importlib.util.find_spec("benchmarks.on_gpu") is not None


def test_no_script_hides_a_folder_from_the_scripts_beside_it() -> None:
    """A script that is run by its path finds modules beside it first."""
    beside = {path.stem for path in (_ROOT / "benchmarks").glob("*.py")}
    folders = {path.name for path in _ROOT.iterdir() if path.is_dir()}
    assert "models" in folders
    assert not beside & folders
