"""The report as one page that needs nothing else: no file, no network, no script to be read.

    text = page(report, "model.onnx")

Pictures are shown where the run took them (`Options.pictures`). The templates are in `templates/`; their arguments are the
report itself and `_Card`s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.kernels.conformance import USUAL_HEADS, Conformance, Form, Outcome, Verdict
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.grouping import Row, folded, last_line, op_changes
from onnx_attnfuse.report.model import LaterKernel, Report
from onnx_attnfuse.report.pictures.model import Drawing, Layout, MaskPicture, lay_out, strokes

if TYPE_CHECKING:
    import jinja2

_MAX_WIDTH_SIDE_BY_SIDE = 800
"""Wider drawings are not placed side by side."""
_NEEDED = {"jinja2": "Jinja2", "grandalf": "grandalf"}
_WORST_FIRST: tuple[Verdict, ...] = ("wrong", "unsupported", "on-cpu", "right")
WORDS: Mapping[Verdict, str] = {"right": "right", "wrong": "wrong", "unsupported": "refused", "on-cpu": "on the CPU"}
"""Verdicts for a reader."""
_MANY, _USUAL_HEAD_SIZE = 100, 64
SIZES = ("few rows", "many rows", "one row on a cache", "rows on a cache", "odd number of heads", "other head sizes")
"""Classes of sizes: the columns."""


@dataclasses.dataclass(frozen=True)
class _Card(Row):
    """Sites that are alike, and their pictures."""

    drawn: Mapping[str, tuple[Drawing, Layout]]
    """The drawings by title, laid out."""
    mask: MaskPicture | None

    @property
    def is_wide(self) -> bool:
        """Whether a drawing needs the whole width, or there is none."""
        return (
            max((layout.width for _, layout in self.drawn.values()), default=_MAX_WIDTH_SIDE_BY_SIDE + 1)
            > _MAX_WIDTH_SIDE_BY_SIDE
        )

    @property
    def facts(self) -> list[str]:
        """Short facts about an attention, apart from its mask: heads, scale, pattern, graph."""
        site = self.site
        found: list[str] = []
        if site.num_heads is not None:
            heads = f"{site.num_heads} head{'s' * (site.num_heads != 1)}"
            found.append(f"{heads} of {site.head_size}" if site.head_size else heads)
        if site.kv_num_heads not in {None, site.num_heads}:
            found.append(f"{site.kv_num_heads} for keys and values")
        if site.v_head_size not in {None, site.head_size}:
            found.append(f"values of {site.v_head_size}")
        if site.scale is not None:
            found.append(f"scale {site.scale:.4g}")
        if site.pattern:
            found.append(f"found by {site.pattern}")
        found += [f"node {site.name}"] if site.module and len(self.sites) == 1 else []
        return [*found, f"graph {site.graph}"]

    @property
    def decided(self) -> frozenset[str | None]:
        """Names of the nodes that decided against fusing."""
        return frozenset(reason.node for reason in self.site.reasons) if self.site.status == "skipped" else frozenset()

    @property
    def chain(self) -> tuple[LaterKernel, ...]:
        """Every kernel that is forecast, the first first."""
        return () if self.site.kernel is None else self.site.kernel.chain

    @property
    def cases(self) -> int:
        """On how many inputs one of the sites was run, at most."""
        return max((site.verified.cases for site in self.sites if site.verified), default=0)

    @property
    def layouts(self) -> Mapping[str, str]:
        """The einops expressions by operand, numbers that differ as ranges."""
        return dict(line.split(": ", 1) for line in self.layout)


def check_installed() -> None:
    """Whether a page can be made here.

    Raises:
        MissingDependencyError: A package is missing.
    """
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingDependencyError(
            f"the report as a page needs {' and '.join(missing)}; run pip install 'onnx-attnfuse[report]'"
        )


def page(report: Report, title: str, verb: Literal["fused", "would fuse"] = "fused") -> str:
    """Makes the page.

    Args:
        report: The report.
        title: Name of the model.
        verb: The action in the headline.

    Returns:
        A complete HTML document.

    Raises:
        MissingDependencyError: A package is missing.
    """
    rows = folded(report)
    attentions = [_card(row, report) for row in rows if row.site.status != "not-attention"]
    others = [row for row in rows if row.site.status == "not-attention"]
    kernels = [site.kernel for site in report.sites if site.kernel is not None]
    verified = [site.verified for site in report.sites if site.verified is not None]
    return (
        templates()
        .get_template("report.html")
        .render(
            title=title,
            report=report,
            headline=last_line(report, verb),
            verb=verb,
            cards=attentions,
            others=others,
            device=next(iter(dict.fromkeys(kernel.device for kernel in kernels)), None),
            error=max((item.max_abs_error for item in verified), default=None),
            cases=sum(item.cases for item in verified),
            changes=op_changes(report),
            nodes=(sum(report.ops_before.values()), sum(report.ops_after.values())),
        )
    )


def _card(row: Row, report: Report) -> _Card:
    picture = report.pictures[row.first] if report.pictures else None
    if picture is None:
        return _Card(row.sites, row.first, {}, None)
    after = picture.after if row.site.is_rewritten else None
    before = "As it is" if after is None else "Before, as the pattern reads it" if row.site.pattern else "Before"
    titled = {before: picture.before, "After": after}
    drawn = {title: (drawing, lay_out(drawing)) for title, drawing in titled.items() if drawing is not None}
    return _Card(row.sites, row.first, drawn, picture.mask)


def templates() -> jinja2.Environment:
    """The Jinja environment with the page's templates.

    Raises:
        MissingDependencyError: A package is missing.
    """
    check_installed()
    return _environment()


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("onnx_attnfuse.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names: dict[str, Any] = environment.globals
    names.update(strokes=strokes, families=reason_codes.by_code())
    environment.filters["breaks"] = _breaks
    return environment


def _breaks(name: str) -> str:
    """A path whose line may break at its parts."""
    import markupsafe

    return markupsafe.Markup("<wbr>").join(re.split(r"(?<=/)|(?=\.[^\W\d])", name))


@dataclasses.dataclass(frozen=True)
class FormCell:
    """The outcomes of the forms of one kind in one class of sizes."""

    outcomes: Sequence[Outcome]

    @property
    def worst(self) -> Verdict:
        """The verdict that colours it."""
        found = {outcome.verdict for outcome in self.outcomes}
        return next(verdict for verdict in _WORST_FIRST if verdict in found)

    @property
    def words(self) -> str:
        """How many forms have the worst verdict, of how many."""
        count = sum(outcome.verdict == self.worst for outcome in self.outcomes)
        of = "" if count == len(self.outcomes) else f" of {len(self.outcomes)}"
        return f"{WORDS[self.worst]} {count}{of}"

    @property
    def reported(self) -> list[Outcome]:
        """The outcomes that are reported."""
        return [outcome for outcome in self.outcomes if outcome.detail]


@dataclasses.dataclass(frozen=True)
class Line:
    """A kind of attention in an element type, with a cell for each class of sizes; None: nothing of it was tried."""

    kind: str
    dtype: str
    cells: tuple[FormCell | None, ...]


def size_of(form: Form) -> str:
    """The class of sizes of a form."""
    if form.cached:
        return "one row on a cache" if form.rows == 1 else "rows on a cache"
    if form.rows >= _MANY:
        return "many rows"
    if form.heads != USUAL_HEADS:
        return "odd number of heads"
    return "few rows" if form.head_size == _USUAL_HEAD_SIZE else "other head sizes"


def _kind(form: Form) -> str:
    mask = {"none": "no mask", "bias": f"bias, {form.bias}", "raw": "0 and 1", "ranges": "lengths with offsets"}.get(
        form.mask, form.mask
    )
    marks = [name for name in ("causal", "windowed", "grouped", "capped") if getattr(form, name)]
    return ", ".join([mask, *marks])


def lines_of(outcomes: Iterable[Outcome]) -> list[Line]:
    """The lines of one operator, in the order in which its forms were tried."""
    found: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        line = found.setdefault((_kind(outcome.form), outcome.form.dtype), {})
        line.setdefault(size_of(outcome.form), []).append(outcome)
    return [
        Line(kind, dtype, tuple(FormCell(line[size]) if size in line else None for size in SIZES))
        for (kind, dtype), line in found.items()
    ]


def conformance_page(table: Conformance) -> str:
    """Makes the page of a table of conformance: for each operator its forms by kind and size, coloured by their outcomes.

    Args:
        table: The outcomes of the forms.

    Returns:
        A complete HTML document.

    Raises:
        MissingDependencyError: A package is missing.
    """
    by_op: dict[str, list[Outcome]] = {}
    for outcome in table.cases:
        by_op.setdefault(outcome.form.op, []).append(outcome)
    return (
        templates()
        .get_template("conformance.html")
        .render(
            table=table,
            sizes=SIZES,
            words=WORDS,
            operators={op: lines_of(outcomes) for op, outcomes in by_op.items()},
            counts={
                op: {verdict: sum(item.verdict == verdict for item in outcomes) for verdict in WORDS}
                for op, outcomes in by_op.items()
            },
            totals={verdict: sum(item.verdict == verdict for item in table.cases) for verdict in WORDS},
        )
    )
