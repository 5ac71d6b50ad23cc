"""The report for a reader: a table where there is room, one paragraph per site where there is not.

`ReportText` is a rich renderable; nothing here prints. Sites that are alike share one line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.grouping import Row, folded, last_line, meaning, mixer_lines, op_changes
from onnx_attnfuse.report.lines import one_line
from onnx_attnfuse.report.model import PatternReport, Report, SiteReport
from onnx_attnfuse.verify.verifier import NOT_VERIFIED

if TYPE_CHECKING:
    from rich.table import Table


_TABLE_WIDTH = 110
_HANGS = 2
_STYLES = {"fused": "green", "already-fused": "cyan", "decomposed": "green", "skipped": "yellow", "not-attention": "dim"}


@dataclasses.dataclass(frozen=True)
class ReportText:
    """A report as rich shows it."""

    report: Report
    verb: Literal["fused", "would fuse"] = "fused"
    """The action in the last line."""
    fold: bool = True
    """Whether equal sites share one line, and only the number of operators is given, not of which."""
    counts: bool = False
    """Whether to tell what each pattern did."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = folded(self.report, fold=self.fold)
        if rows and console.is_terminal and options.max_width >= _TABLE_WIDTH:
            yield _table(rows)
            rows = []
        lines = [*(paragraph for row in rows for paragraph in _paragraphs(row)), *self._lines()]
        yield from (part for line in lines for part in _hanging(line, console, options)) if console.is_terminal else lines

    def _lines(self) -> Iterator[Text]:
        """The lines that belong to no single site."""
        yield from map(plain, mixer_lines(self.report))
        yield from (plain(note, style="yellow" if note == NOT_VERIFIED else "") for note in self.report.notes)
        if self.counts:
            yield from map(_counted, sorted(self.report.patterns, key=lambda pattern: -pattern.seconds))
        if self.report.session is not None:
            yield from (plain(f"session: {line}") for line in self.report.session.lines())
        if self.report.capture is not None:
            yield plain(str(self.report.capture))
        yield from map(plain, _counts_of_operators(self.report, each=not self.fold))
        yield Text(last_line(self.report, self.verb), style="bold")


def _paragraphs(row: Row) -> Iterator[Text]:
    yield plain(row.name, style=_STYLES[row.site.status])
    status = row.site.status.replace("-", " ")
    done = f"{status} {row.operator}" if row.site.op or row.site.status == "decomposed" else status
    found = f"by {row.site.pattern}" if row.site.pattern else ""
    facts = (done, meaning(row.site), found, f"error {row.error}" if row.error else "")
    yield plain("    " + ", ".join(filter(None, facts)))
    kernels = [f"kernel: {row.kernels[0]}", *row.kernels[1:]] if row.kernels else []
    yield from (plain(f"    {line}") for line in (*row.form, *kernels, *row.layout, *row.assumptions, *row.reasons, *row.remedy))


def _hanging(line: Text, console: Console, options: ConsoleOptions) -> Iterator[Text]:
    """A line of a terminal, in parts below each other where it is too long, those after the first indented."""
    indent = len(line.plain) - len(line.plain.lstrip())
    for at, part in enumerate(line[indent:].wrap(console, max(20, options.max_width - indent - _HANGS))):
        yield Text(" " * (indent + _HANGS * bool(at))).append_text(part)


def plain(*lines: str, style: str = "") -> Text:
    """Lines as they are, each of which stays one whatever names in it hold."""
    text = Text("\n".join(map(one_line, lines)), style=style)
    for line in lines:
        _link(text, line)
    return text


def _link(text: Text, line: str) -> None:
    """In a terminal that has links, a code leads to its family."""
    code = line.strip().partition(":")[0]
    if code in reason_codes.by_code():
        text.highlight_words([f"{code}:"], f"link {reason_codes.by_code()[code].url}")


def _counted(pattern: PatternReport) -> Text:
    tries = f"{pattern.hits} of {pattern.tries} tries, {pattern.seconds * 1000:.1f} ms"
    return plain(f"{pattern.kind} {pattern.name} ({pattern.owner}): {tries}")


def _table(rows: Sequence[Row]) -> Table:
    cells = {
        "site": [plain(row.name, style=_STYLES[row.site.status]) for row in rows],
        "attention": [plain(meaning(row.site)) for row in rows],
        "pattern": [plain(row.site.pattern or "") for row in rows],
        "layout": [plain(*row.layout) for row in rows],
        "operator": [plain(row.operator, *row.form) for row in rows],
        "kernel": [plain(*row.kernels) for row in rows],
        "error": [plain(row.error) for row in rows],
        "why": [plain(*row.assumptions, *row.reasons, *row.remedy) for row in rows],
    }
    filled = {title: column for title, column in cells.items() if any(column)}
    return columns(filled, zip(*filled.values(), strict=True))


def columns(
    titles: Iterable[str], rows: Iterable[Iterable[Text | str]], *, numbers: Container[str] = (), apart: int = 0, title: str = ""
) -> Table:
    """A table as all commands print theirs.

    Args:
        titles: Those of the columns.
        rows: The cells of each row.
        numbers: The titles of columns to align on the right.
        apart: Empty lines between rows.
        title: That of the table.
    """
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, apart, 0), header_style="bold"
    )
    for name in titles:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _counts_of_operators(report: Report, *, each: bool) -> Iterator[str]:
    changes = op_changes(report)
    if changes:
        parts = ", ".join(f"{op} {old} → {new}" for op, (old, new) in changes.items())
        total = f"operators: {sum(report.ops_before.values())} → {sum(report.ops_after.values())}"
        yield f"{total} ({parts})" if each else total


_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class ForecastText:
    """Reports on one model by device: a paragraph for each attention, with each device's kernels."""

    reports: Mapping[str, Report]
    fold: bool = True
    """Whether attentions that differ only in the numbers of their names share a paragraph."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sites = [[site for site in report.sites if site.status != "not-attention"] for report in self.reports.values()]
        groups: dict[object, list[tuple[SiteReport, ...]]] = {}
        for place, row in enumerate(zip(*sites, strict=True)):
            groups.setdefault(_key(row) if self.fold else place, []).append(row)
        lines = [line for rows in groups.values() for line in self._paragraph(rows)] or [plain("found no attention")]
        for device, report in self.reports.items():
            if report.session is not None:
                lines += [plain(f"session on {device}: {line}") for line in report.session.lines()]
        yield from (part for line in lines for part in _hanging(line, console, options)) if console.is_terminal else lines

    def _paragraph(self, rows: Sequence[tuple[SiteReport, ...]]) -> Iterator[Text]:
        yield plain(Row([row[0] for row in rows], 0).name, style="bold")
        yield plain(f"    {meaning(rows[0][0])}")
        for device, site in zip(self.reports, rows[0], strict=True):
            lines = list(_kernels(site))
            yield plain(f"    {': '.join([device, *lines[:1]])}")
            yield from (plain(f"        {line}") for line in lines[1:])


def _key(row: tuple[SiteReport, ...]) -> object:
    return tuple((_NUMBER.sub("0", site.module or site.name), meaning(site), tuple(_kernels(site))) for site in row)


def _kernels(site: SiteReport) -> Iterator[str]:
    """The kernels in the order in which they are tried, the gain of a change, and why faster kernels refuse."""
    kernel = site.kernel
    if kernel is None:
        yield from (f"{site.op or 'decomposed'}: {reason.code}: {reason.message}" for reason in site.reasons[:3])
        return
    if site.status == "decomposed":
        yield f"decomposed: {site.mask_form or 'as it is'}"
        return
    yield f"{site.op}, mask: {site.mask_form}" if site.mask_form not in {None, "none"} else f"{site.op}"
    for place, item in enumerate(kernel.chain):
        yield f"{'else ' * bool(place)}{item.kernel}{f' if {item.when}' if item.when else ''}"
    yield from (f"not {item.kernel}: {item.message}" for item in kernel.refused)
    yield from (f"{gain.change}: {gain.kernel}, about {gain.times:g} times as fast" for gain in kernel.gains)
