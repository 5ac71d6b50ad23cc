"""The replacement of a mixer's results, built beside them."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.mixers.proofs import Ends


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One fused operator for a mixer, not yet proved to equal it."""

    operator: str
    pairs: tuple[tuple[ir.Value, ir.Value], ...]
    """Results of the mixer, each with its new value."""
    ends: Ends
    """Whether a value is one that both are computed from."""
    folds: tuple[ir.Value, ...] = ()
    """New values made of constants alone."""


def with_state(builder: Builder, value: ir.Value, dims: tuple[Dim, ...]) -> ir.Value:
    """The second output of a node that was just built, the state that goes out, whose shape is now known."""
    node, dtype = value.producer(), builder.facts.dtype(value)
    assert node is not None
    state = node.outputs[1]
    builder.facts.record(state, dims, dtype)
    state.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])
    return state
