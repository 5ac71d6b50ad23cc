"""Forecasts for several devices side by side, as rich shows them: attentions down, devices across."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onnx_attnfuse.report.grouping import Row, meaning
from onnx_attnfuse.report.model import Report, SiteReport
from onnx_attnfuse.report.text import columns, plain

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class ForecastTable:
    """Reports on one model by device."""

    reports: Mapping[str, Report]
    fold: bool = True
    """Whether attentions that differ only in the numbers of their names share a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console, options
        sites = [[site for site in report.sites if site.status != "not-attention"] for report in self.reports.values()]
        groups: dict[object, list[tuple[SiteReport, ...]]] = {}
        for place, row in enumerate(zip(*sites, strict=True)):
            groups.setdefault(_key(row) if self.fold else place, []).append(row)
        cells: list[list[Text]] = []
        for rows in groups.values():
            first = rows[0]
            name = Row([row[0] for row in rows], 0).name
            cells.append([plain(name), plain(meaning(first[0])), *(plain(*_cell(site)) for site in first)])
        if groups:
            yield columns(("site", "attention", *self.reports), cells, apart=1)
        else:
            yield plain("found no attention")
        for device, report in self.reports.items():
            if report.session is not None:
                yield from (plain(f"session on {device}: {line}") for line in report.session.lines())


def _key(row: tuple[SiteReport, ...]) -> object:
    return tuple((_NUMBER.sub("0", site.module or site.name), meaning(site), tuple(_cell(site))) for site in row)


def _cell(site: SiteReport) -> Iterator[str]:
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
