"""The report as one page that needs nothing else: no file, no network, no script to be read.

    text = page(report, "model.onnx")

Pictures are shown where the run took them (`Options.pictures`). The templates are in `templates/`; their arguments are the
report itself and `_Card`s.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.grouping import Row, folded, last_line, op_changes
from onnx_attnfuse.report.model import LaterKernel, Report, SiteReport
from onnx_attnfuse.report.pictures.drawing import Layout, lay_out, strokes
from onnx_attnfuse.report.pictures.model import Drawing, MaskPicture

if TYPE_CHECKING:
    import jinja2

_MAX_WIDTH_SIDE_BY_SIDE = 800
"""Wider drawings are not placed side by side."""
_NEEDED = {"jinja2": "Jinja2", "grandalf": "grandalf"}


@dataclasses.dataclass(frozen=True)
class _Card:
    """Sites that are alike, and their pictures."""

    row: Row
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
    def site(self) -> SiteReport:
        return self.row.site

    @property
    def name(self) -> str:
        return self.row.place

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
        found += [f"node {site.name}"] if site.module and len(self.row.sites) == 1 else []
        return [*found, f"graph {site.graph}"]

    @property
    def decided(self) -> frozenset[str | None]:
        """Names of the nodes that decided against fusing."""
        return frozenset(reason.node for reason in self.site.reasons) if self.site.status == "skipped" else frozenset()

    @property
    def kernels(self) -> tuple[LaterKernel, ...]:
        """Every kernel that is forecast, the first first."""
        return () if self.site.kernel is None else self.site.kernel.chain

    @property
    def cases(self) -> int:
        """On how many inputs one of the sites was run, at most."""
        return max((site.verified.cases for site in self.row.sites if site.verified), default=0)

    @property
    def layouts(self) -> Mapping[str, str]:
        """The einops expressions by operand, numbers that differ as ranges."""
        return dict(line.split(": ", 1) for line in self.row.layout)


def check_installed() -> None:
    """Whether a page can be made here.

    Raises:
        MissingDependencyError: A package is missing.
    """
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingDependencyError(
            f"the report as a page needs {' and '.join(missing)}; run pip install 'onnx-attnfuse[report]', or write it as .json"
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
        return _Card(row, {}, None)
    after = picture.after if row.site.is_rewritten else None
    before = "As it is" if after is None else "Before, as the pattern reads it" if row.site.pattern else "Before"
    titled = {before: picture.before, "After": after}
    drawn = {title: (drawing, lay_out(drawing)) for title, drawing in titled.items() if drawing is not None}
    return _Card(row, drawn, picture.mask)


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
    return environment
