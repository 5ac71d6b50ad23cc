"""Queries, keys and values for GroupQueryAttention as one tensor: (b, s, heads of queries, of keys and of values · h).

    x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── q, k, v      becomes      x ── MatMul(Wq | Wk | Wv) ── q | k | v

Enter by `undivided` where one value was split into all three, and by `merge_products` where each is a product of its own. Merged
weights are nodes at first, and constants when all is judged (`graph.folding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.axes.views import is_short
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_tensor, is_readable, is_standard
from onnx_attnfuse.graph.edit import answer_needless, known_elsewhere
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import slice_bounds
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.targets.layout import Grouped
from onnx_attnfuse.targets.projections import in_order, joined

_OPERANDS = 3
"""Queries, keys and values, the first inputs of the operator."""
_RANK = 3
"""The axes of each: batch, positions, heads · channels."""


def undivided(operands: Grouped, spec: AttentionSpec, builder: Builder) -> ir.Value | None:
    """The value of which queries, keys and values are the pieces, in this order and nothing besides; None if there is none."""
    return _split(operands.values, builder.facts) or _viewed(operands, spec, builder)


def _split(values: Sequence[ir.Value], facts: Facts) -> ir.Value | None:
    """The input of a Split or of three Slices along the last axis, whose results are the operands as they are."""
    nodes = [value.producer() for value in values]
    first = nodes[0]
    whole = None if first is None or not first.inputs else first.inputs[0]
    dims = None if whole is None else facts.dims(whole)
    if first is None or dims is None or len(dims) != _RANK:
        return None
    if is_standard(first, "Split"):
        is_last = attribute(first, "axis", 0) % len(dims) == len(dims) - 1
        return whole if is_last and tuple(values) == tuple(first.outputs) else None
    end = 0
    for node in nodes:
        bounds = slice_bounds(node, len(dims), facts) if is_standard(node, "Slice") and node.inputs[0] is whole else None
        start, stop, step = (bounds or {}).get(len(dims) - 1, (0, 0, 0))
        total = dims[-1]
        if (
            bounds is None
            or len(bounds) != 1
            or not (isinstance(start, int) and isinstance(stop, int) and isinstance(total, int))
        ):
            return None
        begin, stop, _ = slice(start, stop).indices(total)
        if step != 1 or begin != end or stop <= begin:
            return None
        end = stop
    return whole if end == dims[-1] else None


def _viewed(operands: Grouped, spec: AttentionSpec, builder: Builder) -> ir.Value | None:
    """The value that three equal parts are read from, by whatever views."""
    facts, axes = builder.facts, spec.axes
    indexed = [source.indexed for source in operands.chosen]
    if any(source.rotary is not None for source in operands.chosen) or spec.scale_values or operands.scale == 0:
        return None
    value = in_order(indexed, [target[-1] for target in operands.targets], len(indexed[0].axes))
    if value is None or facts.dtype(value) != spec.dtype or any(is_short(item, facts) for item in indexed):
        return None
    rows = [[leaf for axis in item.axes[:-1] for leaf in leaves(axis)] for item in indexed]
    if rows != [[*leaves(target[0]), *leaves(target[1])] for target in operands.targets]:
        return None
    total = sum(length(target[-1]) for target in operands.targets)
    return builder.reshape(value, [length(axes.b), length(axes.i), total])


@dataclasses.dataclass(frozen=True)
class _Product:
    """An operand that is `input · weight + bias`, read by the operator alone."""

    input: ir.Value
    weight: ir.Value
    """(channels, columns), a constant or one that is transposed."""
    channels: int
    columns: int
    bias: ir.Value | None
    """A constant with as many elements as there are columns."""
    values: tuple[ir.Value, ...]
    """The operand, and the product before a bias was added."""


def merge_products(node: ir.Node, builder: Builder) -> bool:
    """Makes one product of those that give an operator its queries, keys and values; whether that was done.

    Args:
        node: GroupQueryAttention, in the place of the source's nodes already.
        builder: What to build with.
    """
    found = [_product(value, node, builder) for value in node.inputs[:_OPERANDS]]
    products = [item for item in found if item is not None]
    if len(products) < _OPERANDS or any(item.input is not products[0].input for item in products):
        return False
    builder.at(node)
    first, facts, total = products[0], builder.facts, sum(item.columns for item in products)
    dims, dtype = facts.dims(first.values[0]), facts.dtype(first.values[0])
    assert dims is not None
    assert dtype is not None
    weights = [item.weight for item in products]
    weight = joined(builder, weights, 1, [first.channels, total], dtype)
    packed = builder.node("MatMul", [first.input, weight], dims=[*dims[:-1], total], dtype=dtype, hint=f"{node.name}/products")
    if any(item.bias is not None for item in products):
        packed = builder.elementwise("Add", [packed, _bias(products, builder, dtype)], dtype)
    for place, value in enumerate((packed, None, None)):
        node.replace_input_with(place, value)
    for value in (value for item in products for value in item.values):
        answer_needless(value, builder)
        sweep([value])
    return True


def _bias(products: Sequence[_Product], builder: Builder, dtype: ir.DataType) -> ir.Value:
    """The biases one after the other, zeros where there is none."""
    parts = [
        builder.constant(np.zeros(item.columns, dtype.numpy()))
        if item.bias is None
        else builder.reshape(item.bias, [item.columns])
        for item in products
    ]
    return joined(builder, parts, 0, [sum(item.columns for item in products)], dtype)


def _product(value: ir.Value | None, reader: ir.Node, builder: Builder) -> _Product | None:
    """An operand as a product with a constant; None if it is none, or needed besides."""
    facts = builder.facts
    if value is None or not _is_read_by(value, reader):
        return None
    node, bias, values = value.producer(), None, (value,)
    if is_standard(node, "Add"):
        added = next((item for item in node.inputs if constant_tensor(item) is not None), None)
        inner = next((item for item in node.inputs if item is not None and item is not added), None)
        if added is None or inner is None or facts.dims(inner) != facts.dims(value) or not _is_read_by(inner, node):
            return None
        node, bias, values = inner.producer(), added, (value, inner)
    if not is_standard(node, "MatMul") or node.graph is not reader.graph:
        return None
    multiplied, weight = node.inputs
    if multiplied is None or weight is None or not _is_weight(weight):
        return None
    dims, wide = facts.dims(weight), facts.dims(multiplied)
    if dims is None or wide is None or (len(dims), len(wide)) != (2, 3):
        return None
    channels, columns = dims
    if (
        not isinstance(channels, int)
        or not isinstance(columns, int)
        or not all(_is_known(item, values, builder) for item in values)
    ):
        return None
    if bias is not None and not _fits(bias, columns, facts):
        return None
    return _Product(multiplied, weight, channels, columns, bias, values)


def _is_read_by(value: ir.Value, reader: ir.Node) -> bool:
    """Whether one node looks at a value, once, and nothing else does."""
    return not value.is_graph_output() and viewers(value) == [reader]


def _is_known(value: ir.Value, needless: Sequence[ir.Value], builder: Builder) -> bool:
    """Whether whoever asks for the shape of a value can be answered without it."""
    return known_elsewhere(value, set(needless), builder)


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is a constant, or one that is transposed, whose content is there; it is not read."""
    node = value.producer()
    if is_standard(node, "Transpose"):
        tensor = constant_tensor(node.inputs[0]) if attribute(node, "perm", [1, 0]) == [1, 0] else None
    else:
        tensor = constant_tensor(value)
    return tensor is not None and is_readable(tensor)


def _fits(bias: ir.Value, columns: int, facts: Facts) -> bool:
    """Whether a bias has an element for each column, and its content is there."""
    dims, tensor = facts.dims(bias), constant_tensor(bias)
    if not dims or dims[-1] != columns or any(dim != 1 for dim in dims[:-1]):
        return False
    return tensor is not None and is_readable(tensor)
