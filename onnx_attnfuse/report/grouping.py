"""Equal sites reported as one, in words that the text and the page share.

Sites are alike if they differ only in the numbers of their names.
"""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterator, Mapping, Sequence

from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.model import Report, SiteReport

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """Sites that are reported as one, and the words for them."""

    sites: Sequence[SiteReport]
    first: int
    """Place of the first of them among all sites of the report."""

    @property
    def site(self) -> SiteReport:
        """The first site of the group."""
        return self.sites[0]

    @property
    def name(self) -> str:
        """The common path of the sites' modules, or else their common name: `layer.{0..11} ×12`."""
        if len(self.sites) == 1:
            return f"{self.site.module} ({self.site.name})" if self.site.module else self.site.name
        return f"{self.place} ×{len(self.sites)}"

    @property
    def place(self) -> str:
        """The common path of the sites' modules, or else their common name."""
        modules = [site.module for site in self.sites if site.module]
        return common(modules if len(modules) == len(self.sites) else [site.name for site in self.sites])

    @property
    def operator(self) -> str:
        """The fused operator of a row's sites, or else their status."""
        if self.site.status == "fused":
            return f"→ {self.site.op}"
        if self.site.status == "decomposed" and self.site.kernel is not None:
            return f"for {self.site.kernel.device}"
        return self.site.op or self.site.status.replace("-", " ")

    @property
    def error(self) -> str:
        """The largest error that was measured; empty if none was."""
        errors = [site.verified.max_abs_error for site in self.sites if site.verified]
        return f"{max(errors):.1e}" if errors else ""

    @property
    def layout(self) -> list[str]:
        """How operands and result are laid out."""
        return [common(list(lines)) for lines in zip(*map(layouts, self.sites), strict=True)]

    @property
    def reasons(self) -> list[str]:
        """Why the sites of the group are not fused, or not better."""
        return [common([say(reason) for reason in column]) for column in zip(*(site.reasons for site in self.sites), strict=True)]

    @property
    def remedy(self) -> list[str]:
        """The remedy for the first reason of sites that are left, where something can be done."""
        if self.site.status != "skipped" or not self.site.reasons:
            return []
        remedy = reason_codes.remedy(self.site.reasons[0].code)
        return [f"to do: {remedy}"] if remedy else []

    @property
    def form(self) -> list[str]:
        """How the mask is passed, where there is one."""
        if self.site.status == "decomposed":
            return [f"as: {self.site.mask_form}"] if self.site.mask_form else []
        return [f"mask: {self.site.mask_form}"] if self.site.mask_form not in {None, "none"} else []

    @property
    def assumptions(self) -> list[str]:
        """The assumptions of a row's sites on a line; none where nothing is fused."""
        return [f"assumes {', '.join(self.site.assumptions)}"] if self.site.assumptions and self.site.is_rewritten else []

    @property
    def kernels(self) -> list[str]:
        """The kernels that are forecast, and what a change would gain."""
        kernel = self.site.kernel
        if kernel is None:
            return []
        lines = [f"{item.kernel} if {item.when}" if item.when else item.kernel for item in kernel.chain]
        lines[1:] = [f"else {line}" for line in lines[1:]]
        return lines + [f"{gain.change}: {gain.kernel}, about {gain.times:g} times as fast" for gain in kernel.gains]


def folded(report: Report, *, fold: bool = True) -> list[Row]:
    """The sites of a report, those that are alike together unless `fold` is false."""
    groups: dict[object, list[int]] = {}
    for place, site in enumerate(report.sites):
        groups.setdefault(_fold_key(site) if fold else place, []).append(place)
    return [Row([report.sites[place] for place in places], places[0]) for places in groups.values()]


def _fold_key(site: SiteReport) -> object:
    plain = dataclasses.replace(
        site, name="", module=None, graph=_skeleton(site.graph), layout=type(site.layout)(), verified=None, reasons=(), nodes=()
    )
    plain = dataclasses.replace(plain, roundings=tuple(dataclasses.replace(item, nodes=()) for item in site.roundings))
    texts = [*layouts(site), *(reason.code + str(reason) for reason in site.reasons)]
    return plain, site.verified is None, tuple(map(_skeleton, texts))


def say(reason: Reason) -> str:
    """A reason on one line."""
    return f"{reason.code}: {reason}"


def meaning(site: SiteReport) -> str:
    """The attention in the field's terms, such as `causal, 32/8×128`; of a mask that was not read nothing is said."""
    if site.status == "not-attention":
        return ""
    parts = [site.mask, _heads(site)]
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


def layouts(site: SiteReport) -> list[str]:
    """The layouts of a site that is laid out anew."""
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


def op_changes(report: Report) -> Mapping[str, tuple[int, int]]:
    """Operators of which there are more or fewer than before, most vanished first."""
    before, after = report.ops_before, report.ops_after
    changed = {op: (before.get(op, 0), after.get(op, 0)) for op in {**before, **after} if before.get(op, 0) != after.get(op, 0)}
    return dict(sorted(changed.items(), key=lambda item: (item[1][1] - item[1][0], item[0])))


def last_line(report: Report, verb: str) -> str:
    """The run in one sentence."""
    if not report.candidates:
        line = "found no attention"
    else:
        line = f"{verb} {report.fused} of {report.candidates} attention site{'s' * (report.candidates != 1)}"
    counts = {
        "already fused": report.already_fused,
        "decomposed for their provider": report.decomposed,
        "skipped": report.skipped,
        "of these different when verified": report.differing_sites,
        "Softmax that are not attention": report.candidates and len(report.sites) - report.candidates,
    }
    rest = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    taken_back = f"; {report.differing} rewrite{'s' * (report.differing != 1)} taken back" if report.differing else ""
    count, done = len(report.mixers), sum(item.operator is not None for item in report.mixers)
    counted = f"{count} other sequence mixer{'s' * (count != 1)}"
    others = "" if not count else f"; fused {done} of {counted}" if done else f"; {counted} left"
    return f"{line} ({rest}){others}{taken_back}" if rest else f"{line}{others}{taken_back}"


def mixer_lines(report: Report) -> Iterator[str]:
    """A line on the sequence mixers that are no softmax attention, those that are alike together."""
    alike: dict[str, list[str]] = {}
    for item in report.mixers:
        why = "; ".join(reason.message for reason in item.reasons)
        line = f"{item.kind} left, {why}" if item.operator is None else f"{item.kind} fused → {item.operator}"
        alike.setdefault(line, []).append(item.name)
    for line, names in alike.items():
        yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {line}"


def table(report: Report) -> str:
    """The table as HTML, without scripts, styles or anything from elsewhere."""
    titles = ("site", "status", "attention", "operator", "why")
    rows = [
        (row.name, row.site.status, meaning(row.site), row.site.op or "", "; ".join((*row.reasons, *row.remedy)))
        for row in folded(report)
    ]
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    last = f"<p>{html.escape(last_line(report, 'fused'))}</p>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{listed}{last}"
