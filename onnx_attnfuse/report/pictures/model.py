"""Pictures of a site that a page shows besides its report, as frozen data: drawings of its nodes, and its mask as cells.

A drawing is laid out by grandalf (`lay_out`), and the cells of a mask are the fewest strokes. The result is plain numbers for a
template; places on a page and colours belong to the page.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

_MARGIN = 8
_BETWEEN_COLUMNS, _BETWEEN_ROWS = 22, 26
_HIGH, _LOW = 40, 26
"""Height of a box with two lines, and with one."""
_TITLE_WIDTH, _DETAIL_WIDTH, _PADDING = 7.4, 6.3, 22
"""Width of a character of the first and the second line, and the room beside them."""
_LABEL = 11
"""How far below a box the label of an arrow is."""
BoxKind = Literal["operand", "node", "anchor", "fused", "result"]
"""An operand; a node; the node that names the site; the fused operator; the result."""


@dataclasses.dataclass(frozen=True)
class Box:
    """One box of a drawing."""

    title: str
    """An operator, or the role of an operand."""
    detail: str = ""
    """A second line: attributes, a number, or the shape of the result."""
    kind: BoxKind = "node"
    name: str = ""
    """Name of the node or value in the model."""


@dataclasses.dataclass(frozen=True)
class Arrow:
    """From one box to another, by their places."""

    tail: int
    head: int
    label: str = ""
    """Which branch of an `If` it comes from."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A small graph."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    @property
    def node_count(self) -> int:
        """How many of the boxes are nodes."""
        return sum(box.kind not in {"operand", "result"} for box in self.boxes)


Cells = tuple[str, ...]
"""Rows of a mask, one character a key: `.` not seen, `o` seen, `1` to `4` seen with something added, `a` to `d` with something
taken away, the more the further on."""


@dataclasses.dataclass(frozen=True)
class MaskPanel:
    """A mask for one batch entry and head."""

    title: str
    cells: Cells


@dataclasses.dataclass(frozen=True)
class MaskPicture:
    """A mask as it comes out at small sizes."""

    panels: tuple[MaskPanel, ...]
    step: int = 1
    """Every how many rows and keys there is a cell."""
    by_head: bool = False
    """Heads differ, and the first is shown."""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """One letter for each kind of cell there is, and what it says."""
        found = {letter for panel in self.panels for row in panel.cells for letter in row}
        kinds = (
            (".", ".", "not seen"),
            ("o", "o", "seen"),
            ("1234", "3", "seen, and added to"),
            ("abcd", "c", "seen, and taken from"),
        )
        return tuple((letter, words) for letters, letter, words in kinds if found.intersection(letters))


@dataclasses.dataclass(frozen=True)
class SitePicture:
    """Drawings of one site: before, after, and its mask."""

    before: Drawing | None = None
    after: Drawing | None = None
    """None where the site stays as it is."""
    mask: MaskPicture | None = None


@dataclasses.dataclass(frozen=True)
class PlacedBox:
    """A box and its upper left corner."""

    box: Box
    x: int
    y: int
    width: int
    height: int


@dataclasses.dataclass(frozen=True)
class PlacedArrow:
    """The course of an arrow as the data of an SVG path, and the place of its label."""

    path: str
    label: str
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """A drawing with everything in its place."""

    boxes: tuple[PlacedBox, ...]
    arrows: tuple[PlacedArrow, ...]
    width: int
    height: int


class _View:
    """The interface of a vertex to grandalf, which reads its size and sets its centre."""

    def __init__(self, width: int, height: int) -> None:
        self.w, self.h = width, height
        self.xy = (0.0, 0.0)


class _Course:
    """The interface of an edge to grandalf, which sets its points."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []

    def setpath(self, points: Sequence[tuple[float, float]]) -> None:
        """Takes the points of the edge."""
        self.points = list(points)


def lay_out(drawing: Drawing) -> Layout:
    """Places the boxes of a drawing in layers from operands to results, with few crossings."""
    graphs: Any = importlib.import_module("grandalf.graphs")
    vertices = [graphs.Vertex(place) for place in range(len(drawing.boxes))]
    for vertex, box in zip(vertices, drawing.boxes, strict=True):
        vertex.view = _View(*_size(box))
    edges = [graphs.Edge(vertices[arrow.tail], vertices[arrow.head], data=arrow.label) for arrow in drawing.arrows]
    for edge in edges:
        edge.view = _Course()
    left: float = _MARGIN
    boxes: list[PlacedBox] = []
    arrows: list[PlacedArrow] = []
    for component in graphs.Graph(vertices, edges).C:
        _arrange(component)
        views = [vertex.view for vertex in component.sV]
        right = left - min(view.xy[0] - view.w / 2 for view in views)
        down = _MARGIN - min(view.xy[1] - view.h / 2 for view in views)
        for vertex in component.sV:
            view, place = vertex.view, int(vertex.data)
            corner = view.xy[0] - view.w / 2 + right, view.xy[1] - view.h / 2 + down
            boxes.append(PlacedBox(drawing.boxes[place], round(corner[0]), round(corner[1]), view.w, view.h))
        arrows += [_arrow(edge, right, down) for edge in component.sE]
        left = max(box.x + box.width for box in boxes) + _BETWEEN_COLUMNS
    width = max(box.x + box.width for box in boxes) + _MARGIN
    height = max(box.y + box.height for box in boxes) + _MARGIN
    return Layout(tuple(boxes), tuple(arrows), width, height)


def _arrange(component: Any) -> None:
    layouts: Any = importlib.import_module("grandalf.layouts")
    layout = layouts.SugiyamaLayout(component)
    layout.xspace, layout.yspace = _BETWEEN_COLUMNS, _BETWEEN_ROWS
    layout.init_all(optimize=True)
    layout.draw(6)
    for layer in layout.layers:
        _spread([vertex.view for vertex in layer if isinstance(vertex.view, _View)])


def _spread(views: Sequence[_View]) -> None:
    """Moves boxes of a layer to the right that others reach into; where widths differ much, grandalf lets that happen."""
    ordered = sorted(views, key=lambda view: view.xy[0])
    for before, view in itertools.pairwise(ordered):
        least = before.xy[0] + (before.w + view.w) / 2 + _BETWEEN_COLUMNS / 2
        view.xy = max(view.xy[0], least), view.xy[1]


def _size(box: Box) -> tuple[int, int]:
    width = max(len(box.title) * _TITLE_WIDTH, len(box.detail) * _DETAIL_WIDTH) + _PADDING
    return 2 * round(width / 2), _HIGH if box.detail else _LOW


def _arrow(edge: Any, right: float, down: float) -> PlacedArrow:
    """From the lower side of a box to the upper side of another, by way of the points in between."""
    tail, head = edge.v[0].view, edge.v[1].view
    start = tail.xy[0], tail.xy[1] + tail.h / 2
    end = head.xy[0], head.xy[1] - head.h / 2
    points = [start, *edge.view.points[1:-1], end]
    moved = [(round(x + right), round(y + down)) for x, y in points]
    return PlacedArrow(_curve(moved), edge.data or "", moved[0][0], moved[0][1] + _LABEL)


def _curve(points: Sequence[tuple[int, int]]) -> str:
    """A line through points that leaves and enters each of them straight down."""
    parts = [f"M{points[0][0]} {points[0][1]}"]
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        middle = round((y + to_y) / 2)
        parts.append(f"V{to_y}" if x == to_x else f"C{x} {middle} {to_x} {middle} {to_x} {to_y}")
    return "".join(parts)


def strokes(cells: Cells) -> dict[str, str]:
    """For each letter, the data of an SVG path that fills its cells, each of them one unit wide."""
    found: dict[str, list[str]] = {}
    for row, line in enumerate(cells):
        for letter, start, count in _runs(line):
            found.setdefault(letter, []).append(f"M{start} {row}h{count}v1h-{count}z")
    return {letter: "".join(parts) for letter, parts in sorted(found.items())}


def _runs(line: str) -> Iterator[tuple[str, int, int]]:
    """Letter, start and length of each run of a letter."""
    start = 0
    for letter, run in itertools.groupby(line):
        count = len(list(run))
        yield letter, start, count
        start += count
