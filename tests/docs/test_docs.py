"""The documentation names what there is; that its links lead somewhere is for `make docs` to say."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import typing
from collections.abc import Iterator

import click
import pytest

import onnx_attnfuse
from docs import provider_pages, readme, reasons, support_matrix
from onnx_attnfuse.graph.assumptions import ASSUMPTIONS, DEFAULT
from onnx_attnfuse.kernels.operators import target_names
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse_cli import main, optimize
from onnx_attnfuse_cli.options import SECTIONS
from onnx_attnfuse_cli.terminal import MEANINGS, Exit

_ROOT = pathlib.Path(__file__).parents[2]
_DOCS = _ROOT / "docs"
_OURS = "https://github.com/onnx-attnfuse/onnx-attnfuse/"


@pytest.mark.parametrize("name", onnx_attnfuse.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"(?:auto\w+:: |onnx_attnfuse\.){name}$", (_DOCS / "python.md").read_text(), re.MULTILINE)


def test_nothing_else_is() -> None:
    named = re.findall(r"auto(?:function|class|exception):: (\w+)", (_DOCS / "python.md").read_text())
    assert set(named) <= set(onnx_attnfuse.__all__)
    assert len(set(named)) == len(named)


def test_every_example_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in _DOCS.glob("*.md"))
    assert set(re.findall(r"literalinclude\} examples/(\w+)\.py", text)) == {
        path.stem for path in (_DOCS / "examples").glob("*.py")
    }


def test_every_reason_code_is_in_one_family() -> None:
    families = reason_codes.families()
    named = [code for family in families.values() for code in family.codes]
    assert reasons.codes() == set(named)
    assert len(named) == len(set(named))
    assert families.keys().isdisjoint(named)
    assert len(families) <= 40


@pytest.mark.parametrize("family", reason_codes.families().values(), ids=lambda family: family.name)
def test_a_family_is_complete_and_fits_a_terminal(family: reason_codes.Family) -> None:
    texts = [family.meaning, family.remedy, *(text for code in family.codes.values() for text in (code.meaning, code.remedy))]
    assert all(text.endswith(".") for text in texts)
    assert family.example
    for name in (family.name, *family.codes):
        text = reason_codes.explained(name)
        assert text is not None
        assert max(map(len, text.splitlines())) <= readme.COLUMNS
        assert family.url in text


def test_the_index_of_reason_codes_is_as_the_code_has_it() -> None:
    assert (_DOCS / "reasons.md").read_text(encoding="utf-8") == reasons.page(), "run `make reasons`"


def test_the_page_of_each_execution_provider_is_as_its_record_has_it() -> None:
    pages = provider_pages.pages()
    assert set(pages) == set((_DOCS / "providers").glob("*.md"))
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run `make provider-pages`"


def test_the_support_matrix_is_as_the_records_have_it() -> None:
    assert support_matrix.PATH.read_text(encoding="utf-8") == support_matrix.page(), "run `make support`"


def test_every_command_has_its_help_on_the_page_of_commands() -> None:
    (listed,) = re.findall(r":commands: (.+)", (_DOCS / "command_line.md").read_text(encoding="utf-8"))
    assert listed.split(", ") == list(main._COMMANDS)


def bullets(indent: str = "") -> set[str]:
    """What the bullets of the page of options begin with."""
    lines = re.findall(rf"^{indent}- (`.*?)[:\n]", (_DOCS / "options.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name.partition(" ")[0] for line in lines for name in re.findall(r"`(.+?)`", line)}


def test_every_option_has_a_bullet() -> None:
    options = [parameter for parameter in optimize.command.params if isinstance(parameter, click.Option)]
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    assert {name for name in bullets() if name.startswith("-")} - {"-vv"} == names
    fields = {field.name for field in dataclasses.fields(onnx_attnfuse.Options) if field.metadata.get("command", True)}
    assert {f"--{name.replace('_', '-')}" for name in fields - {"policy"}} <= names


def test_help_has_the_options_under_the_headings_of_their_page() -> None:
    pages: dict[str, set[str]] = {}
    for part in (_DOCS / "options.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        bullets = re.findall(r"^- (?:`-\w`, )?`--([\w-]+)", text, re.MULTILINE)
        pages |= {heading: {name.replace("-", "_") for name in bullets}} if bullets else {}
    options = {parameter.name for parameter in optimize.command.params if isinstance(parameter, click.Option)}
    assert pages == {heading: options & set(names) for heading, names in SECTIONS.items()}
    assert options == set().union(*pages.values())


def test_every_value_has_a_bullet() -> None:
    kinds = typing.get_type_hints(onnx_attnfuse.Options)
    values = {"auto", *typing.get_args(kinds["padding"]), *typing.get_args(kinds["cache"]), *target_names()}
    values |= {*typing.get_args(kinds["kv_cache"])}
    assert bullets("  ") == values | {"none", "sites", "model", DEFAULT} | set(ASSUMPTIONS)


def test_every_exit_status_has_a_bullet() -> None:
    assert {name for name in bullets() if name.isdigit()} == {str(int(status)) for status in MEANINGS}


def test_links_of_the_readme_are_absolute_and_lead_somewhere() -> None:
    """The page is shown on the package index, too, where relative links lead nowhere."""
    links = re.findall(r"\]\((.+?)\)", (_ROOT / "README.md").read_text(encoding="utf-8"))
    assert 10 < len(links) <= 20
    for link in links:
        path = re.fullmatch(
            r"https://(?:github|raw\.githubusercontent)\.com/onnx-attnfuse/onnx-attnfuse/(?:blob/)?main/(.+)", link
        )
        assert path is not None, link
        assert (_ROOT / path[1]).exists(), link
    assert _OURS in (_ROOT / "pyproject.toml").read_text(encoding="utf-8")


def anchors(page: pathlib.Path) -> set[str]:
    """What links may name of a page: its headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    """Of pages that are not on the site, too, which `make docs` does not look at."""
    pages = [*_DOCS.rglob("*.md"), *(_ROOT / "benchmarks").rglob("*.md"), _ROOT / "CONTRIBUTING.md", _ROOT / "CHANGELOG.md"]
    for page in pages:
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.relative_to(_ROOT)}: {path}"
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), (
                f"{page.relative_to(_ROOT)}: {path}#{anchor}"
            )


def test_decisions_have_one_shape_and_a_line_in_their_list() -> None:
    pages = sorted((_DOCS / "decisions").glob("[0-9]*.md"))
    lines = []
    for page in pages:
        title, *headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], page.name
        lines.append(f"| [{int(page.name[:4])}]({page.name}) | {title} |")
    text = (_DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[.+$", text, re.MULTILINE) == lines


def test_files_that_decisions_name_exist() -> None:
    """But for scripts of which a page says in which commit they were last."""
    folders = ("onnx_attnfuse", "tests", "benchmarks", "docs")
    files = "\n".join(path.as_posix() for folder in folders for path in (_ROOT / folder).rglob("*.*"))
    for page in (_DOCS / "decisions").glob("*.md"):
        for name in re.findall(r"`([\w./]+\.(?:py|txt|jsonl))`(?!, last in)", page.read_text(encoding="utf-8")):
            assert re.search(rf"/{re.escape(name)}$", files, re.MULTILINE), f"{page.name}: {name}"


@pytest.fixture(scope="module")
def demo() -> tuple[str, str]:
    """The session and the picture as they are made today."""
    return readme.demo()


def test_the_session_of_the_readme_is_fresh_and_fits_its_column(demo: tuple[str, str]) -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.without_decimals(readme.page(demo[0])) == readme.without_decimals(text), "run `make readme`"
    assert max(map(len, demo[0].splitlines())) <= readme.COLUMNS


@pytest.mark.newest
def test_the_picture_is_fresh(demo: tuple[str, str]) -> None:
    assert readme.PICTURE.read_text(encoding="utf-8") == demo[1], "run `make readme`"


def test_codes_in_the_troubleshooting_guide_exist() -> None:
    text = (_DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert len(named) > 3
    assert named <= reason_codes.by_code().keys()


def sessions() -> Iterator[tuple[str, str]]:
    """Pages, each with a session on a terminal that works on models of the repository; `...` stands for lines left out."""
    for page in (_ROOT / "README.md", *sorted(_DOCS.glob("*.md")), *sorted(_DOCS.glob("details/*.md"))):
        for text in re.findall(r"^```console\n(.+?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            if "attnfuse" in text and "models/bundled/" in text:
                yield page.name, text


@pytest.mark.parametrize(("page", "session"), [pytest.param(*item, id=item[0]) for item in sessions()])
def test_what_a_page_shows_is_printed(
    page: str, session: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    del page
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"models/bundled/\S+", session):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((_ROOT / name).read_bytes())
    for line, shown in re.findall(r"^\$ (.+)\n((?:[^$].*\n)*)", session, re.MULTILINE):
        tool, *arguments = shlex.split(line)
        if tool == "mkdir":
            (tmp_path / arguments[0]).mkdir()
            continue
        planned = [] if "--ep" in arguments or arguments[0] not in {"optimize", "explain"} else ["--ep", "cpu"]
        assert main.main([*arguments, *planned]) in {Exit.DONE, Exit.DIFFERS}
        printed = _without_decimals("".join(capfd.readouterr()).replace(os.sep, "/"))
        wanted = re.escape(_without_decimals(shown)).replace(
            r"\.\.\.\
",
            "(?:.*\n)*",
        )
        assert re.fullmatch(wanted, printed), printed


def _without_decimals(text: str) -> str:
    """The text without numbers that have decimals, whose last digits differ from machine to machine."""
    return re.sub(r"-?\d+\.\d+(?:e[-+]\d+)?", "#", text)
