"""Contests as one picture in SVG: a bar for the time of each contender, and how many times as fast it is."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from onnx_attnfuse.bench.compare import Figures
from onnx_attnfuse.bench.run import Contest

_WIDTH, _LEFT, _RIGHT, _ROW = 680, 130, 210, 26


def picture(contests: Sequence[Contest]) -> str:
    """The picture of all contests that have figures, each to a scale of its own.

    Args:
        contests: The results for a model.

    Returns:
        A document that needs nothing else.
    """
    parts: list[str] = []
    top = 0
    for contest in contests:
        sizes = ", ".join(f"{name}={number}" for name, number in contest.lengths.items())
        title = html.escape(f"{contest.what} ({sizes})" if sizes else contest.what)
        parts.append(f'<text x="8" y="{top + 18}" font-weight="bold">{title}</text>')
        top += _ROW
        longest = max((item.ms for item in contest.figures if item.ms is not None), default=1.0)
        for item in contest.figures:
            parts += _bar(item, top, longest)
            top += _ROW
    style = 'font-family="sans-serif" font-size="13" fill="#1b2028"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 8}" {style}>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top + 8}" fill="#fff"/>', *parts, "</svg>", ""])


def _bar(item: Figures, top: int, longest: float) -> Iterator[str]:
    """The name, the bar and the numbers of a contender."""
    width = 0.0 if item.ms is None else (_WIDTH - _LEFT - _RIGHT) * item.ms / longest
    said = "failed" if item.ms is None or item.ratio is None else f"{item.ms:.3g} ms, {item.ratio:.2f} times as fast"
    yield f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{html.escape(item.name)}</text>'
    yield f'<rect x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="18" rx="3" fill="#3451c6"/>'
    yield f'<text x="{_LEFT + width + 8:.1f}" y="{top + 17}">{said}</text>'
