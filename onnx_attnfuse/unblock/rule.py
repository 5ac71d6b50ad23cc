"""What a rule is: a look at one node, and what to put in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder


@dataclasses.dataclass(frozen=True)
class Change:
    """A value to replace, and what it is computed from."""

    old: ir.Value
    new: ir.Value
    stops: tuple[ir.Value, ...]
    """The values that both are computed from."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rewrite."""

    does: str
    """What it does, for the report, after a number."""
    change: Callable[[ir.Node, Builder], Change | None]
    """Builds what takes the place of a node's result, beside it; None where there is nothing to do."""
