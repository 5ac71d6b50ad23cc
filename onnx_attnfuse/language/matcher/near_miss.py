"""Why patterns were not found: for each Softmax the attempt that came furthest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_attnfuse.language.matcher.discrimination_net import NetBranch


@dataclasses.dataclass(frozen=True)
class Miss:
    """An attempt that ended."""

    depth: int
    """Operators found before it ended."""
    found: str
    """The node found there."""
    node: str | None
    expected: tuple[str, ...]
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        wanted = " or ".join(self.expected) or "another operand"
        return f"{self.found} where {wanted} was expected, {self.depth} operators matched"


class Trace:
    """Collects the nearest misses."""

    def __init__(self, patterns: Collection[str]) -> None:
        """Collects the misses of some patterns.

        Args:
            patterns: Their names.
        """
        self._patterns = patterns
        self.nearest: dict[ir.Node | None, Miss] = {}
        """By Softmax; under None those of attempts that met none."""

    def miss(self, depth: int, softmaxes: Sequence[ir.Node], value: ir.Value, branch: NetBranch) -> None:
        """Notes an attempt that ended at a value."""
        patterns = tuple(name for name in branch.names if name.partition("(")[0] in self._patterns)
        if not patterns:
            return
        node = value.producer()
        found = f"{node.op_type} '{node.name}'" if node is not None else f"'{value.name}'"
        made = Miss(depth, found, node.name if node is not None else None, tuple(dict.fromkeys(branch.expected())), patterns)
        for softmax in softmaxes or (None,):
            known = self.nearest.get(softmax)
            if known is None or known.depth < depth:
                self.nearest[softmax] = made
