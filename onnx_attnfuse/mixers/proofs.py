"""Proofs that what is built for a mixer equals what it replaces: certificates' meanings execute both from the same values.

    if not are_equal([(old, new)], ends, facts): ...

No solver is asked: two results are equal where they come to one normal form, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_attnfuse.certify.arrays import axes_of
from onnx_attnfuse.certify.execution import UNKNOWN, Execution
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.prover import Prover
from onnx_attnfuse.certify.smt import Obligation
from onnx_attnfuse.certify.terms import size
from onnx_attnfuse.graph.facts import Facts


class _NoSolver:
    """A judge to whom nothing holds that has to be asked."""

    def holds(self, asked: Obligation) -> bool:
        """Whether an obligation holds: never."""
        del asked
        return False


def executed(ends: Collection[ir.Value], facts: Facts) -> Execution:
    """The execution of a graph from some values, each an array of its own."""
    names: dict[ir.Value, str] = {}

    def name(value: ir.Value) -> str:
        return names.setdefault(value, f"v{len(names)}")

    return Execution(facts, name, {}, lambda value: value in ends, facts.opset, size)


def are_equal(pairs: Sequence[tuple[ir.Value, ir.Value]], ends: Collection[ir.Value], facts: Facts) -> bool:
    """Whether the values of each pair are equal in every element, computed from `ends`."""
    with aside():
        execution, prover = executed(ends, facts), Prover(_NoSolver())
        try:
            for old, new in pairs:
                one, other = execution.array(old, beyond=True), execution.array(new, beyond=True)
                place = axes_of(one)
                lengths = [*zip(one.shape, other.shape, strict=True)]
                if not all(prover.equal(*terms, ()) for terms in (*lengths, (one.at(*place), other.at(*place)))):
                    return False
        except UNKNOWN:
            return False
    return True
