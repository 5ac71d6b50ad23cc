"""One product of queries, keys and values as three, whose columns lie as the operator wants them.

    x ── MatMul(Wq | Wk | Wv) ── Add ── Slice, Slice, Slice ── q, k, v      becomes      x ── MatMul(Wq), MatMul(Wk), MatMul(Wv)

Columns sliced from a wide result, or transposed, are rearranged in the weight instead, once: each column of a product is
computed by itself. Weights are rearranged by nodes first, and constants when all is judged (`graph.folding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, length, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, is_short
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.folding import content
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.reasons import Refused
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
    return builder.node("MatMul", [given, weight])


def _bias(builder: Builder, part: LinearProjection, target: Axes) -> Array:
    """The bias of one operand's columns, (heads · channels,); zeros where there is none."""
    if part.bias is not None:
        return content(part.arranged(builder, part.bias, (target[-1],))).reshape(-1)
    size, dtype = length(target[-1]), builder.facts.dtype(part.weight.value)
    assert isinstance(size, int)
    assert dtype is not None
    return np.zeros(size, dtype.numpy())


MAX_BIAS_ELEMENTS = 1 << 20
"""Elements of a bias that is still read."""


@dataclasses.dataclass(frozen=True)
class Projected:
    """Operands without their biases, and the biases."""

    operands: tuple[ir.Value, ir.Value, ir.Value]
    bias: ir.Value | None
    """Biases of query, key and value, concatenated; zeros where there is none; None if nothing is added to any of them."""
    query_bias: Array
    """The first of them, (n·h,)."""


def read_projection(builder: Builder, chosen: Sequence[Source], targets: Sequence[Axes], dtype: ir.DataType) -> Projected | None:
    """The operands before their biases were added; None if there are no biases, or something else is done to the operands too."""
    operands: list[ir.Value] = []
    biases: list[Array] = []
    found = False
    for source, target in zip(chosen, targets, strict=True):
        value, width = source.indexed.value, length(target[-1])
        if refined(source.indexed.axes) != refined(target) or builder.facts.dtype(value) != dtype or not isinstance(width, int):
            return None
        if source.rotary is not None or is_short(source.indexed, builder.facts):
            return None
        added = _added(value, width, builder.facts)
        found |= added is not None
        operand, bias = added or (value, np.zeros(width, dtype.numpy()))
        operands.append(operand)
        biases.append(bias)
    if not found:
        return None
    query, key, value = operands
    return Projected((query, key, value), builder.constant(np.concatenate(biases), "attnfuse/projection_bias"), biases[0])


def _added(value: ir.Value, width: int, facts: Facts) -> tuple[ir.Value, Array] | None:
    """The two operands of an Add whose second is a bias along the last axis; nothing else may read the sum."""
    node = value.producer()
    if not is_standard(node, "Add") or len(viewers(value)) != 1:
        return None
    if value.is_graph_output():
        return None
    for one, other in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        array = constant_array(other, limit=MAX_BIAS_ELEMENTS)
        if one is None or array is None or array.size != width or array.shape[-1:] != (width,):
            continue
        if facts.dims(one) == facts.dims(value) and facts.dtype(one) == facts.dtype(value):
            return one, array.reshape(-1)
    return None
