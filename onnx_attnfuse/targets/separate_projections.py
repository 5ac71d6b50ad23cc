"""One product of queries, keys and values as three, whose columns lie as the operator wants them.

    x ── MatMul(Wq | Wk | Wv) ── Add ── Slice, Slice, Slice ── q, k, v      becomes      x ── MatMul(Wq), MatMul(Wk), MatMul(Wv)

Columns sliced from a wide result, or transposed, are rearranged in the weight instead, once: each column of a product is
computed by itself. Weights are rearranged by nodes first, and constants when all is judged (`graph.folding`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, length
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array
from onnx_attnfuse.graph.folding import content
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.projection_bias import Projected
from onnx_attnfuse.targets.projections import LinearProjection, read_projections


@dataclasses.dataclass(frozen=True)
class OwnProducts:
    """Queries, keys and values as products of their own."""

    projected: Projected
    chosen: tuple[Source, ...]
    """The products, each as (batch, positions, heads · channels)."""
    frontier: tuple[ir.Value, ...]
    """The input of the products and the weights that they are made of."""
    needless: tuple[ir.Value, ...]
    """The wide product and its slices."""


def own_products(spec: AttentionSpec, builder: Builder, targets: tuple[Axes, Axes, Axes]) -> OwnProducts | None:
    """Emits a product for each operand where all three are columns of one that nothing else reads; None elsewhere.

    Not for an attention with a cache: a step of one position wants one wide product (docs/decisions/0025).

    Args:
        spec: The attention.
        builder: The builder.
        targets: The layouts wanted of queries, keys and values: (batch, positions, heads · channels).
    """
    if spec.cache is not None or any(source.rotary is not None for operand in spec.operands() for source in operand):
        return None
    try:
        found = read_projections(spec, builder.facts)
    except Refused:
        return None
    widths = [length(target[-1]) for target in targets]
    if len({operand.weight.value for operand in found.operands}) != 1 or not all(isinstance(width, int) for width in widths):
        return None
    given = arrange(builder, found.input, (*targets[0][:2], found.operands[0].channels))
    products = [_product(builder, given, part, target) for part, target in zip(found.operands, targets, strict=True)]
    chosen = tuple(
        Source(IndexedValue(product, target), part.factor)
        for product, target, part in zip(products, targets, found.operands, strict=True)
    )
    biases = [_bias(builder, part, target) for part, target in zip(found.operands, targets, strict=True)]
    query, key, value = products
    bias = (
        builder.constant(np.concatenate(biases), "attnfuse/projection_bias")
        if any(item.bias for item in found.operands)
        else None
    )
    return OwnProducts(
        Projected((query, key, value), bias, biases[0]),
        chosen,
        (found.input.value, *dict.fromkeys(part.weight.value for part in found.operands)),
        tuple(found.values),
    )


def _product(builder: Builder, given: ir.Value, part: LinearProjection, target: Axes) -> ir.Value:
    """The input times the columns of one operand, (batch, positions, heads · channels)."""
    weight = part.arranged(builder, part.weight, (part.channels, target[-1]))
    builder.rearranged.append(weight)
    dims = builder.facts.dims(given)
    assert dims is not None
    return builder.node("MatMul", [given, weight])


def _bias(builder: Builder, part: LinearProjection, target: Axes) -> Array:
    """The bias of one operand's columns, (heads · channels,); zeros where there is none."""
    if part.bias is not None:
        return content(part.arranged(builder, part.bias, (target[-1],))).reshape(-1)
    size, dtype = length(target[-1]), builder.facts.dtype(part.weight.value)
    assert isinstance(size, int)
    assert dtype is not None
    return np.zeros(size, dtype.numpy())
