"""How the documentation is built: `make docs`, without a network, and with every warning an error."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import re
from typing import Any

import click
from sphinx.application import Sphinx

from onnx_attnfuse_cli import optimize
from onnx_attnfuse_cli.manual import Manual

project = "onnx-attnfuse"
author = "the authors of onnx-attnfuse"
release = importlib.metadata.version("onnx-attnfuse")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
include_patterns = ["*.md", "examples/*", "images/*"]
exclude_patterns = ["certificates.md", "conformance.md", "glossary.md", "how_it_works.md", "measured.md", "targets.md"]
"""The site has what users need; decisions, tables of results and pages for contributors are read in the repository."""
root_doc = "index"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "onnx-attnfuse"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

default_role = "code"
smartquotes = False  # of --option they make an en dash
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Sphinx) -> None:
    """Where this says what Sphinx would not."""
    app.connect("source-read", _links_to_the_repository)
    app.connect("autodoc-process-docstring", _keep, priority=100)
    app.connect("autodoc-process-docstring", _put_back, priority=900)
    app.connect("autodoc-process-signature", _no_signature)
    app.connect("sphinx-click-process-options", _named)
    app.connect("sphinx-click-process-epilog", _manual)


_REPOSITORY = "https://github.com/onnx-attnfuse/onnx-attnfuse/blob/main/"
_ROOT = pathlib.Path(__file__).parents[1]


def _links_to_the_repository(app: Sphinx, name: str, content: list[str]) -> None:
    """Relative links to files that are not on the site lead to the repository; a link to nothing is left, and is an error."""

    def absolute(link: re.Match[str]) -> str:
        path = (_ROOT / "docs" / name).parent.joinpath(link[1]).resolve()
        on_site = path.with_suffix("").relative_to(_ROOT / "docs").as_posix() if _ROOT / "docs" in path.parents else ""
        if on_site in app.env.found_docs or path.suffix == ".svg" or not path.exists():
            return link[0]
        return f"]({_REPOSITORY}{path.relative_to(_ROOT).as_posix()}{link[2] or ''})"

    content[0] = re.sub(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", absolute, content[0])


_FIELDS: dict[str, list[str]] = {}
"""Docstrings of fields and properties as they are written, by name."""


def _keep(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what in {"attribute", "property"}:
        _FIELDS[name] = list(lines)


def _put_back(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in the docstring of a field for its type, which is known already."""
    lines[:] = _FIELDS.pop(name, lines)


def _no_signature(app: Sphinx, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, None] | None:
    """The fields of a dataclass are listed below it, each with what it means."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(obj) else None


def _named(app: Sphinx, ctx: click.Context, lines: list[str]) -> None:
    """The options of a command, those of `optimize` by their names only."""
    shared = {(param.name, param.help) for param in optimize.command.params if isinstance(param, click.Option)}
    options = [param for param in ctx.command.params if isinstance(param, click.Option) and not param.hidden]
    found = [max(param.opts, key=len) for param in options if (param.name, param.help) in shared]
    if not found:
        return
    blocks = re.split(r"(?m)^(?=\.\. option:: )", "\n".join(lines))
    kept = [block for block in blocks if not set(re.findall(r"--[\w-]+", block.partition("\n")[0])) & set(found)]
    names = ", ".join(f"``{name}``" for name in found)
    lines[:] = [*"".join(kept).splitlines(), "", f":doc:`Options <options>` explains {names}.", ""]


def _manual(app: Sphinx, ctx: click.Context, lines: list[str]) -> None:
    """Examples and exit statuses of a command."""
    if not isinstance(ctx.command, Manual):
        return
    lines += ["", ".. rubric:: Examples", ""]
    for example in ctx.command.examples:
        lines += [example.what, "", ".. code-block:: console", "", f"   $ {example.line}", ""]
    if ctx.command.statuses:
        lines += [".. rubric:: Exit status", ""]
        for status, what in ctx.command.statuses.items():
            lines += [f":{int(status)}: {what}"]
        lines.append("")
