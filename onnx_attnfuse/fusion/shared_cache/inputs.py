"""Inputs of a model in the place of others, which hold the same in another layout."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim, Size


def new_input(builder: Builder, given: ir.Value, dims: Sequence[Dim]) -> ir.Value:
    """An input with what another holds, of which sizes are asked from now on; whoever asks for it puts it into the graph."""
    facts = builder.facts
    noted = dict(zip(facts.dims(given) or (), given.shape or (), strict=False))
    shape = ir.Shape([dim if isinstance(dim, int) else noted.get(dim, str(dim)) for dim in dims])
    new = ir.Value(name=builder.name(f"{given.name}_laid_out"), shape=shape, type=given.type)
    facts.record(new, dims, facts.dtype(given))
    for axis, dim in enumerate(dims):
        if isinstance(dim, Size) and len(dim.atoms) == 1 and facts.origins.get(dim.atoms[0].key, (None, 0))[0] is given:
            facts.origins[dim.atoms[0].key] = (new, axis)
    return new
