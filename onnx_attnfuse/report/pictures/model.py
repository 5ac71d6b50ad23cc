"""Pictures of a site that a page shows besides its report, as frozen data: drawings of its nodes, and its mask as cells.

Nothing here knows where it is on a page, or which colour it has.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

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
