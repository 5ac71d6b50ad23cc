"""The report for a reader: a table where there is room, one paragraph per site where there is not.

`ReportText` is a rich renderable; nothing here prints. Sites that differ only in the numbers of their names share one line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import LaterKernel, PatternReport, Report, SiteReport

_TABLE_WIDTH = 110
_NUMBER = re.compile(r"\d+")
_STYLES = {"fused": "green", "already-fused": "cyan", "skipped": "yellow", "not-attention": "dim"}


@dataclasses.dataclass(frozen=True)
class ReportText:
    """A report as rich shows it."""

    report: Report
    verb: Literal["fused", "would fuse"] = "fused"
    """What the last line says was done."""
    fold: bool = True
    """Whether equal sites share one line."""
    counts: bool = False
    """Whether to tell what each pattern did."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [_Row(sites) for sites in self._folded()]
        if rows and console.is_terminal and options.max_width >= _TABLE_WIDTH:
            yield _table(rows)
        else:
            yield from (paragraph for row in rows for paragraph in row.paragraphs())
        yield from (Text(note) for note in self.report.notes)
        if self.counts:
            yield from map(_counted, sorted(self.report.patterns, key=lambda pattern: -pattern.seconds))
        if self.report.session is not None:
            yield from (Text(f"session: {line}") for line in self.report.session.lines())
        if changes := _op_changes(self.report):
            yield Text(f"operators: {changes}")
        yield Text(_last_line(self.report, self.verb), style="bold")

    def _folded(self) -> list[list[SiteReport]]:
        groups: dict[object, list[SiteReport]] = {}
        for index, site in enumerate(self.report.sites):
            groups.setdefault(_fold_key(site) if self.fold else index, []).append(site)
        return list(groups.values())


def _fold_key(site: SiteReport) -> object:
    plain = dataclasses.replace(site, name="", graph=_skeleton(site.graph), layout=type(site.layout)(), verified=None, reasons=())
    texts = [*_layouts(site), *(reason.code + str(reason) for reason in site.reasons)]
    return plain, site.verified is None, tuple(map(_skeleton, texts))


@dataclasses.dataclass(frozen=True)
class _Row:
    """Sites that share a line, and the line's cells."""

    sites: Sequence[SiteReport]

    @property
    def site(self) -> SiteReport:
        return self.sites[0]

    @property
    def name(self) -> str:
        name = common([site.name for site in self.sites])
        return f"{name} ×{len(self.sites)}" if len(self.sites) > 1 else name

    @property
    def operator(self) -> str:
        if self.site.status == "fused":
            return f"→ {self.site.op}"
        return self.site.op or self.site.status.replace("-", " ")

    @property
    def error(self) -> str:
        errors = [site.verified.max_abs_error for site in self.sites if site.verified]
        return f"{max(errors):.1e}" if errors else ""

    @property
    def layout(self) -> list[str]:
        return [common(list(lines)) for lines in zip(*map(_layouts, self.sites), strict=True)]

    @property
    def reasons(self) -> list[str]:
        return [
            common([_say(reason) for reason in column]) for column in zip(*(site.reasons for site in self.sites), strict=True)
        ]

    @property
    def form(self) -> list[str]:
        """How the mask is handed over, where there is one."""
        return [f"mask: {self.site.mask_form}"] if self.site.mask_form not in {None, "none"} else []

    @property
    def kernels(self) -> list[str]:
        """The kernels that are forecast, and what a change would gain."""
        kernel = self.site.kernel
        if kernel is None:
            return []
        first = LaterKernel(kernel.forecast, kernel.when)
        lines = [f"{item.kernel} if {item.when}" if item.when else item.kernel for item in (first, *kernel.otherwise)]
        lines[1:] = [f"else {line}" for line in lines[1:]]
        return lines + [f"{gain.change}: {gain.kernel}, about {gain.times:g} times as fast" for gain in kernel.gains]

    def paragraphs(self) -> Iterator[Text]:
        yield Text(self.name, style=_STYLES[self.site.status])
        status = self.site.status.replace("-", " ")
        done = f"{status} {self.operator}" if self.site.op else status
        found = f"by {self.site.pattern}" if self.site.pattern else ""
        facts = (done, meaning(self.site), found, f"error {self.error}" if self.error else "")
        yield Text("    " + ", ".join(filter(None, facts)))
        kernels = [f"kernel: {self.kernels[0]}", *self.kernels[1:]] if self.kernels else []
        yield from (Text(f"    {line}") for line in (*self.form, *kernels, *self.layout, *self.reasons))


def _counted(pattern: PatternReport) -> Text:
    what = f"{pattern.hits} of {pattern.tries} tries, {pattern.seconds * 1000:.1f} ms"
    return Text(f"{pattern.kind} {pattern.name} ({pattern.owner}): {what}")


def _say(reason: Reason) -> str:
    return f"{reason.code}: {reason}"


def _table(rows: Sequence[_Row]) -> Table:
    cells = {
        "site": [Text(row.name, style=_STYLES[row.site.status]) for row in rows],
        "attention": [Text(meaning(row.site)) for row in rows],
        "pattern": [Text(row.site.pattern or "") for row in rows],
        "layout": [Text("\n".join(row.layout)) for row in rows],
        "operator": [Text("\n".join([row.operator, *row.form])) for row in rows],
        "kernel": [Text("\n".join(row.kernels)) for row in rows],
        "error": [Text(row.error) for row in rows],
        "why": [Text("\n".join(row.reasons)) for row in rows],
    }
    filled = {title: column for title, column in cells.items() if any(column)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in filled:
        table.add_column(title, overflow="fold")
    for row in zip(*filled.values(), strict=True):
        table.add_row(*row)
    return table


def meaning(site: SiteReport) -> str:
    """The attention in the field's terms, such as `causal, 32/8×128`."""
    if site.status == "not-attention":
        return ""
    parts = [site.mask or "no mask", _heads(site)]
    if site.scale is not None and site.head_size and abs(site.scale * site.head_size**0.5 - 1) > 1e-3:
        parts.append(f"scale {site.scale:.4g}")
    return ", ".join(filter(None, parts))


def _heads(site: SiteReport) -> str:
    if site.num_heads is None:
        return ""
    heads = str(site.num_heads)
    if site.kv_num_heads not in (None, site.num_heads):
        heads += f"/{site.kv_num_heads}"
    if site.head_size is None:
        return f"{heads} heads"
    values = f"/{site.v_head_size}" if site.v_head_size not in (None, site.head_size) else ""
    return f"{heads}×{site.head_size}{values}"


def _layouts(site: SiteReport) -> list[str]:
    return [f"{name}: {text}" for name, text in dataclasses.asdict(site.layout).items() if text]


def _skeleton(text: str) -> str:
    return _NUMBER.sub("0", text)


def common(texts: Sequence[str]) -> str:
    """One text for several: numbers that differ become a range, `{0..11}`, or `*` where some are missing."""
    if len({_skeleton(text) for text in texts}) > 1:
        return f"{texts[0]}, …"
    words = _NUMBER.split(texts[0])
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    ranges = [_number_range(column) for column in columns]
    return words[0] + "".join(number + word for number, word in zip(ranges, words[1:], strict=True))


def _number_range(numbers: Sequence[str]) -> str:
    distinct = set(map(int, numbers))
    if len(distinct) == 1:
        return numbers[0]
    low, high = min(distinct), max(distinct)
    return f"{{{low}..{high}}}" if high - low + 1 == len(distinct) else "*"


def _op_changes(report: Report) -> str:
    before, after = report.ops_before, report.ops_after
    changed = {op: (before.get(op, 0), after.get(op, 0)) for op in {**before, **after} if before.get(op, 0) != after.get(op, 0)}
    if not changed:
        return ""
    ordered = sorted(changed.items(), key=lambda item: (item[1][1] - item[1][0], item[0]))
    parts = [f"{op} {old} → {new}" for op, (old, new) in ordered]
    return f"{', '.join(parts)}; all {sum(before.values())} → {sum(after.values())}"


def _last_line(report: Report, verb: str) -> str:
    if not report.candidates:
        line = "found no attention"
    else:
        line = f"{verb} {report.fused} of {report.candidates} attention site{'s' * (report.candidates != 1)}"
    counts = {
        "already fused": report.already_fused,
        "skipped": report.skipped,
        "different when verified": report.differing,
        "Softmax that are not attention": report.candidates and len(report.sites) - report.candidates,
    }
    rest = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{line} ({rest})" if rest else line
