"""`attnfuse patterns`: the list of patterns, one of them, a new one, and their matches."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import importlib.resources
import importlib.util
import json
import keyword
import pathlib
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from onnx_attnfuse_cli.endings import failed
from onnx_attnfuse_cli.manual import Example, Manual
from onnx_attnfuse_cli.options import derived_options
from onnx_attnfuse_cli.suggestions import Group
from onnx_attnfuse_cli.terminal import Exit, echo

if TYPE_CHECKING:
    from onnx_attnfuse.language.registry.registry import Entry
    from onnx_attnfuse.testing.asserting import Checked


_SELECTING = ("patterns", "skip_patterns", "only_patterns")


@click.group("patterns", cls=Group, short_help="List, show, start and check patterns.")
def command() -> None:
    """Patterns: forms of attention, built in or your own.

    docs/write-a-pattern.md shows how to write one.
    """


@command.command(
    "list",
    cls=Manual,
    short_help="List patterns and their sources.",
    examples=[Example("attnfuse patterns list --patterns mine.py", "The installed ones, and those in mine.py.")],
)
@derived_options(only=_SELECTING)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_patterns(*, as_json: bool, **chosen: Any) -> int:
    """List all patterns that a run with these options would use, and their sources."""
    rows = [
        {"name": entry.name, "kind": entry.kind, "from": entry.owner, "does": _first_line(entry)} for entry in _entries(chosen)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return Exit.DONE
    from rich.console import Console

    from onnx_attnfuse.report.text import columns

    table = columns(("name", "kind", "from", "does"), (row.values() for row in rows))
    Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty()).print(table)
    return Exit.DONE


@command.command(
    "show",
    cls=Manual,
    short_help="Show what a pattern matches and means.",
    examples=[Example("attnfuse patterns show soft_cap", "Its graph, and when it does not match.")],
)
@click.argument("name")
@derived_options(only=_SELECTING)
def show_pattern(*, name: str, **chosen: Any) -> int:
    """Show the formula of pattern NAME, its meaning, and when it does not match."""
    found = [entry for entry in _entries(chosen) if entry.name == name or entry.name.startswith(f"{name}.")]
    if not found:
        raise click.UsageError(f"no pattern is called {name!r}; `attnfuse patterns list` shows them")
    click.echo("\n\n".join(map(_described, found)))
    return Exit.DONE


@command.command(
    "new",
    cls=Manual,
    short_help="Create a pattern and its test from a template.",
    examples=[Example("attnfuse patterns new my_attention", "Writes my_attention.py and its test.")],
)
@click.argument("name")
@click.option("-o", "--output", type=click.Path(path_type=pathlib.Path), default=pathlib.Path(), help="Folder to write to.")
def new_pattern(*, name: str, output: pathlib.Path) -> int:
    """Write NAME.py and test_NAME.py: a working pattern to start from.

    A character that Python does not allow in a name becomes an underscore. A reserved name, such as class or softmax, gets a
    suffix.
    """
    from onnx_attnfuse.report.files import write_text

    texts = importlib.resources.files("onnx_attnfuse_cli") / "skeleton"
    pattern, test = ((texts / file).read_text(encoding="utf-8") for file in ("pattern.txt", "test.txt"))
    called = python_name(name, pattern, test)
    if not output.is_dir():
        raise click.UsageError(f"the folder {output} does not exist; make it first")
    files = {output / f"{called}.py": pattern, output / f"test_{called}.py": test}
    for path in files:
        if path.exists():
            raise click.UsageError(f"{path} is there already; choose another name, or remove it")
    for path, text in files.items():
        write_text(text.replace("NAME", called), path.absolute())
        echo(f"wrote {path}")
    echo(f"next: attnfuse patterns check {output / called}.py, then python -m pytest {output / f'test_{called}.py'}")
    return Exit.DONE


@command.command(
    "check",
    cls=Manual,
    short_help="Report what your patterns match in models.",
    examples=[
        Example("attnfuse patterns check mine.py model.onnx", "What the patterns in mine.py find in a model."),
        Example("attnfuse patterns check mine.py my_model.py:attention", "The same in a torch function."),
    ],
)
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@click.argument("models", nargs=-1, metavar="[MODEL | CODE.py:FUNCTION]...")
@derived_options(only=("skip_patterns", "ep", "arch", "verify"))
@click.pass_context
def check_pattern(context: click.Context, *, file: pathlib.Path, models: tuple[str, ...], **chosen: Any) -> int:
    """Load the patterns in FILE, a Python file or a folder, and report what they match in models.

    If a pattern has a written form and a meaning, z3 tries to prove them equal for all sizes.

    A model is a file, or a torch function whose parameters have example tensors as defaults. The report has a line for every
    Softmax: the pattern that matched it, or the pattern that came nearest and the operator that stopped it. Exits with 1 if a
    pattern matches nothing, with 3 if one fails.
    """
    from onnx_attnfuse.language.registry.discovery import from_path
    from onnx_attnfuse.testing.asserting import check

    entries = from_path(file)
    for entry in entries:
        echo(f"{entry.name}: {entry.kind}, {_first_line(entry)}".rstrip(", "))
        for line in _formula_proofs(entry):
            echo(f"  formula: {line}")
    found: set[str] = set()
    ends = [Exit.DONE]
    for model in models:
        checked = check(_model(model), file, **chosen)
        echo("", f"{model}")
        for line in _lines(checked):
            echo(f"  {line}")
        found.update(pattern.name for pattern in checked.report.patterns if pattern.hits)
        ends.append(failed(checked.report.failures, context.obj, model))
    idle = [entry.name for entry in entries if models and entry.name not in found]
    if idle:
        echo("", f"found nothing: {', '.join(idle)}")
    return max(Exit.TOO_FEW if idle else Exit.DONE, *ends)


def _formula_proofs(entry: Entry) -> Iterator[str]:
    """Lines on whether what a pattern says is written is what it says that means."""
    from onnx_attnfuse.errors import MissingDependencyError
    from onnx_attnfuse.language import Pattern
    from onnx_attnfuse.testing.formulas import proofs

    if isinstance(entry.grain, Pattern):
        try:
            yield from map(str, proofs(entry.grain))
        except MissingDependencyError as error:
            yield f"not proved: {error}"


def _model(text: str) -> Any:
    """A path, or the function of `file.py:name`."""
    path, separator, name = text.rpartition(":")
    if not separator or not path.endswith(".py"):
        return text
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    if spec is None or spec.loader is None or not pathlib.Path(path).is_file():
        raise click.UsageError(f"there is no file {path}; write FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(pathlib.Path(path).parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"{path} cannot be run: {type(error).__name__}: {error}; correct the file") from error
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise click.UsageError(f"{path} has no function {name}")
    return getattr(module, name)


def _lines(checked: Checked) -> list[str]:
    lines: list[str] = []
    for site in checked.report.sites:
        miss = checked.misses.get(site.name)
        if site.pattern:
            lines.append(f"{site.name}: matched {site.pattern}, {site.status} {site.op or ''}".rstrip())
        else:
            lines.append(f"{site.name}: no pattern, {site.status} {site.op or ''}".rstrip())
            lines += [f"  nearest miss, of {' and '.join(miss.patterns)}: {miss}"] if miss else []
        lines += [f"  {reason.code}: {reason}" for reason in site.reasons]
    if not checked.report.sites:
        lines.append("no attention was found")
        if checked.nearest is not None:
            lines.append(f"nearest miss, of {' and '.join(checked.nearest.patterns)}: {checked.nearest}")
    return [*lines, *checked.report.notes]


def _entries(chosen: dict[str, Any]) -> tuple[Entry, ...]:
    from onnx_attnfuse import Options
    from onnx_attnfuse.language.registry.discovery import load

    catalogue = load(Options(**chosen))
    for pack in catalogue.broken:
        echo(str(pack), err=True)
    return catalogue.entries


def _first_line(entry: Entry) -> str:
    doc: str = getattr(entry.grain, "doc", "")
    return doc.partition("\n")[0]


def _described(entry: Entry) -> str:
    """A pattern's formula, its module's words and its own."""
    from onnx_attnfuse.language import Pattern

    grain = entry.grain
    lines = [f"{entry.name}: {entry.kind}, from {entry.owner} ({grain.home})"]
    if isinstance(grain, Pattern):
        lines.append(f"  written: {grain.written}")
        if grain.meaning is not None and not grain.restates:
            lines.append(f"  means:   {grain.meaning}")
        if grain.refused is not None:
            lines.append(f"  refused: {grain.refused.code}: {grain.refused.message}")
    module = sys.modules.get(grain.home.rpartition(".")[0])
    docs = [module.__doc__ if module is not None else None, getattr(grain, "doc", None)]
    return "\n\n".join(["\n".join(lines), *(doc.strip() for doc in docs if doc)])


def python_name(asked: str, *texts: str) -> str:
    """The name of a module and of the function in it, as near to what was asked for as Python allows.

    Args:
        asked: The name that a user typed.
        texts: Python code in which the name replaces `NAME`; names that it uses are taken.

    Returns:
        An identifier that is no keyword, no builtin, no module of Python or of an installed package, and not used in `texts`.

    Raises:
        click.UsageError: There is no letter or digit in it, or it names a folder too.
    """
    if "/" in asked or "\\" in asked:
        raise click.UsageError(f"{asked!r} is a path; give the name alone, and the folder with -o")
    plain = unicodedata.normalize("NFKC", asked.removesuffix(".py")).lower()
    name = re.sub(r"\W+", "_", plain).strip("_")
    if not name.isidentifier():
        name = f"attention_{name}"
    if not re.search(r"[^\W_]", plain) or not name.isidentifier():
        raise click.UsageError(f"{asked!r} is no name for a function; use letters, digits and underscores")
    return f"{name}_pattern" if name in _taken(*texts) else name


def _taken(*texts: str) -> set[str]:
    """Names that mean something already."""
    found = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *sys.stdlib_module_names}
    found.update(importlib.metadata.packages_distributions())
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found
