"""Help that answers what a reader of a manual page asks: examples, and what the exit status says."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click


@dataclasses.dataclass(frozen=True)
class Example:
    """A line to type, and what it does."""

    line: str
    what: str


class Manual(click.Command):
    """A command whose help has its options under headings, and ends in examples and exit statuses."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[Example] = (),
        statuses: Mapping[int, str] | None = None,
        sections: Mapping[str, Collection[str]] | None = None,
        **settings: Any,
    ) -> None:
        """Sets the command up.

        Args:
            *args: As for any command.
            examples: Lines to type.
            statuses: The meaning of each exit status.
            sections: The names of parameters by heading; the others are under `Options`, the last.
            **settings: As for any command.
        """
        super().__init__(*args, **settings)
        self.examples = tuple(examples)
        self.statuses = dict(statuses or {})
        self.sections = {**(sections or {}), "Options": ()}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, each under its heading."""
        headings = {name: heading for heading, names in self.sections.items() for name in names}
        records: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self.sections}
        for parameter in self.get_params(ctx):  # click 8.5 lists arguments among the options, without help
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)) is not None:
                records[headings.get(parameter.name or "", "Options")].append(record)
        for heading, lines in records.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines)

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
