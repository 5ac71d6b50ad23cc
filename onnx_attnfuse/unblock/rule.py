"""What a rule is: a look at one node, and what to put in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder


@dataclasses.dataclass(frozen=True)
class Change:
    """New values in the place of old ones, and what both are computed from."""

    results: tuple[tuple[ir.Value, ir.Value], ...]
    """Old and new."""
    stops: tuple[ir.Value, ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rewrite."""

    does: str
    """What it does, for the report, after a number."""
    change: Callable[[ir.Node, Builder], Change | None]
    """Builds what takes the place of a node's result, beside it; None where there is nothing to do."""
    providers: frozenset[str] = frozenset(["cpu", "cuda"])
    """The execution providers on which it pays."""
