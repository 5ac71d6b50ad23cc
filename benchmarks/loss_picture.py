"""Curves of losses as one picture, in SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COLOURS = ("#bbbbbb", "#e08214", "#2166ac", "#b2182b", "#1b7837", "#000000")


def picture(curves: Mapping[str, Sequence[float]]) -> str:
    """The curves one upon the other, the widest first, so that those below show where they differ, and where they do not.

    Args:
        curves: The loss of each step by the name of who trained; six at most, equally long.
    """
    width, height, steps = 640, 320, len(next(iter(curves.values())))
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))

    def place(step: int, loss: float) -> tuple[float, float]:
        return width * step / (steps - 1), height * (high - loss) / (high - low)

    box = f'viewBox="-50 -20 {width + 70} {height + 60}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">']
    for line in range(math.ceil(low), math.floor(high) + 1):
        y = place(0, line)[1]
        parts.append(f'<path d="M0 {y:.1f}H{width}" stroke="#dddddd"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{line}</text>')
    for row, (name, curve) in enumerate(curves.items()):
        points = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in enumerate(curve))
        style = f'stroke="{COLOURS[row]}" stroke-width="{2 * (len(curves) - row) - 0.5}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        parts.append(f'<path d="M{width - 170} {20 + 18 * row}h24" {style}/>')
        parts.append(f'<text x="{width - 140}" y="{24 + 18 * row}">{name}</text>')
    parts.append(f'<text x="{width / 2}" y="{height + 30}" text-anchor="middle">step</text>')
    return "\n".join([*parts, '<text x="-40" y="-6">loss</text></svg>']) + "\n"
