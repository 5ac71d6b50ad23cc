"""Biases of the projections that queries, keys and values come from, taken into the operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, length, refined
from onnx_attnfuse.attention.axes.views import is_short
from onnx_attnfuse.attention.spec import Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, constant_array, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import viewers

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
