"""Help that answers what a reader of a manual page asks: examples, and what the exit status says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click


@dataclasses.dataclass(frozen=True)
class Example:
    """A line to type, and what it does."""

    line: str
    what: str


class Manual(click.Command):
    """A command whose help ends in examples and exit statuses."""

    def __init__(
        self, *args: Any, examples: Sequence[Example] = (), statuses: Mapping[int, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)
        self.statuses = dict(statuses or {})

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes what follows the options."""
        write_examples(self.examples, formatter)
        if self.statuses:
            with formatter.section("Exit status"):
                formatter.write_dl([(str(int(status)), what) for status, what in self.statuses.items()])
        super().format_epilog(ctx, formatter)


def write_examples(examples: Sequence[Example], formatter: click.HelpFormatter) -> None:
    """Writes examples, lines to type uncut."""
    if not examples:
        return
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example.line}\n")
            with formatter.indentation():
                formatter.write_text(example.what)
