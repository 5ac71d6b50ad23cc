"""Rules of enabling transformations: a look at one node, and the nodes that take its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from onnx_attnfuse.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.execution_provider import Paying


@dataclasses.dataclass(frozen=True)
class EnablingChange:
    """New values in the place of old ones, and the operands of both."""

    results: tuple[tuple[ir.Value, ir.Value], ...]
    """Old and new."""
    frontier: tuple[ir.Value, ...]
    assumes: tuple[AssumptionName, ...] = ()
    """Assumptions that the change rests on."""

    def described(self, does: str) -> str:
        """The effect of a change, with its assumptions."""
        return f"{does}; assumes {', '.join(self.assumes)}" if self.assumes else does


@dataclasses.dataclass(frozen=True)
class EnablingRule:
    """One rewrite."""

    does: str
    """The effect of the rule, for the report, after a number."""
    ops: frozenset[tuple[str, str]]
    """The nodes that it starts from, by domain and operator."""
    change: Callable[[ir.Node, Builder], EnablingChange | None]
    """Builds the replacement of a node's result, beside it; None where there is nothing to do."""
    pays: Paying | None
    """The name by which records of execution providers say that it pays there; None: it is for what reads the graph, on each."""
    since: tuple[int, int] = (0, 0)
    """The version of ONNX Runtime from which on its operators exist."""
    with_cache: bool = True
    """Whether it pays where an attention has a cache too, so that a run may see one position."""


def enabling(
    does: str, ops: str, pays: Paying | None, *, since: tuple[int, int] = (0, 0), with_cache: bool = True
) -> Callable[[Callable[[ir.Node, Builder], EnablingChange | None]], EnablingRule]:
    """Makes a rule of its change; arguments are its fields, `ops` apart by blanks, those of com.microsoft with their domain."""
    starts = frozenset((domain, op) for domain, _, op in (name.rpartition(".") for name in ops.split()))
    return lambda change: EnablingRule(does, starts, change, pays, since, with_cache)
