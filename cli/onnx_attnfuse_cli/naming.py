"""Names that Python can have, for files and functions that are called what a user asks for."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import keyword
import re
import sys
import unicodedata

import click


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
