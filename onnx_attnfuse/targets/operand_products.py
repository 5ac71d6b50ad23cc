"""Products that give queries, keys and values: one as three whose columns lie as an operator wants them, and three as one.

    x ── MatMul(Wq | Wk | Wv) ── Add ── Slice, Slice, Slice ── q, k, v      becomes      x ── MatMul(Wq), MatMul(Wk), MatMul(Wv)
    x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── q, k, v                      becomes      x ── MatMul(Wq | Wk | Wv) ── q | k | v

Columns sliced from a wide result, or transposed, are rearranged in the weight instead, once: each column of a product is
computed by itself. GroupQueryAttention takes one tensor (b, s, heads of queries, of keys and of values · h): `undivided` where
one value was split into all three, and `merge_products` where each is a product of its own. Weights are rearranged and merged by
nodes first, and constants when all is judged (`graph.folding`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, leaves, length, refined
from onnx_attnfuse.attention.axes.rearrange import arrange
from onnx_attnfuse.attention.axes.views import IndexedValue, is_short
from onnx_attnfuse.attention.spec import AttentionSpec, Source
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import (
    Array,
    attribute,
    both_ways,
    constant_array,
    constant_tensor,
    has_unknown_attribute,
    is_readable,
    is_standard,
)
from onnx_attnfuse.graph.edit import known_elsewhere, replace_inputs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.folding import content
from onnx_attnfuse.graph.rules.reading import read_part, sorted_parts
from onnx_attnfuse.graph.uses import is_read_once, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.layout import Operands
from onnx_attnfuse.targets.projections import LinearProjection, in_order, joined, read_projections


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
    products = [_own_product(builder, given, part, target) for part, target in zip(found.operands, targets, strict=True)]
    chosen = tuple(
        Source(IndexedValue(product, target), part.factor)
        for product, target, part in zip(products, targets, found.operands, strict=True)
    )
    biases = [_own_bias(builder, part, target) for part, target in zip(found.operands, targets, strict=True)]
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


def _own_product(builder: Builder, given: ir.Value, part: LinearProjection, target: Axes) -> ir.Value:
    """The input times the columns of one operand, (batch, positions, heads · channels)."""
    weight = part.arranged(builder, part.weight, (part.channels, target[-1]))
    builder.rearranged.append(weight)
    return builder.node("MatMul", [given, weight])


def _own_bias(builder: Builder, part: LinearProjection, target: Axes) -> Array:
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
    if len(viewers(value)) != 1 or value.is_graph_output():
        return None
    for one, other in both_ways(value.producer(), "Add"):
        array = constant_array(other, limit=MAX_BIAS_ELEMENTS)
        if array is None or array.size != width or array.shape[-1:] != (width,):
            continue
        if facts.dims(one) == facts.dims(value) and facts.dtype(one) == facts.dtype(value):
            return one, array.reshape(-1)
    return None


_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""The attributes of a Gemm that is a product and a bias."""


@dataclasses.dataclass(frozen=True)
class MergedProduct:
    """A value that is `input · weight + bias`."""

    input: ir.Value
    """(…, channels)."""
    weight: ir.Value
    """(channels, columns), or (columns, channels) if it is turned: a constant or one that is transposed."""
    turned: bool
    channels: int
    columns: int
    bias: ir.Value | None
    """A constant with as many elements as there are columns."""
    values: tuple[ir.Value, ...]
    """The value, and the product before a bias was added."""
    op: str
    """MatMul, or Gemm for a product of two axes."""

    def constants(self) -> list[ir.Value]:
        """The constants that the product is computed from."""
        node = self.weight.producer()
        table = self.weight if node is None or not node.inputs else node.inputs[0]
        return [value for value in (table, self.bias) if value is not None]


def read_product(value: ir.Value | None, builder: Builder) -> MergedProduct | None:
    """A value as a product with a constant that nothing else reads; None if it is none."""
    facts = builder.facts
    node, bias = None if value is None else value.producer(), None
    if value is None or node is None or node.graph is not builder.graph:
        return None
    values = (value,)
    if is_standard(node, "Add"):
        added = next((item for item in node.inputs if constant_tensor(item) is not None), None)
        inner = next((item for item in node.inputs if item is not None and item is not added), None)
        if added is None or inner is None or facts.dims(inner) != facts.dims(value) or not is_read_by(inner, node):
            return None
        node, bias, values = inner.producer(), added, (value, inner)
    if not is_standard(node, "MatMul", "Gemm") or has_unknown_attribute(node) or (bias is not None and node.op_type == "Gemm"):
        return None
    if any(attribute(node, name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    multiplied, weight, *more = node.inputs
    bias = more[0] if more else bias
    if multiplied is None or weight is None or not _is_weight(weight):
        return None
    dims, wide = facts.dims(weight), facts.dims(multiplied)
    if dims is None or wide is None or len(dims) != 2 or len(wide) < 2:
        return None
    turned = bool(attribute(node, "transB", 0))
    channels, columns = reversed(dims) if turned else dims
    if not isinstance(channels, int) or not isinstance(columns, int) or (bias is not None and not _fits(bias, columns, facts)):
        return None
    return MergedProduct(multiplied, weight, turned, channels, columns, bias, values, node.op_type)


def merged(products: Sequence[MergedProduct], builder: Builder, hint: str) -> ir.Value:
    """Emits the columns of all products one after the other, (…, all columns), at the builder's position.

        parts = [read_product(value, builder) for value in values]      # None where a value is no such product
        whole = merged(parts, builder, "name")                          # (…, all columns), the parts one after the other

    Each column of a product is computed by itself, so the columns of the whole are those of its parts. Merged weights are nodes
    at first, and constants when all is judged (`graph.folding`). A weight that something else reads too is left: it would be kept
    twice.
    """
    first = products[0]
    dtype = builder.facts.dtype(first.values[0])
    assert dtype is not None
    weights = [builder.transpose(item.weight, [1, 0]) if item.turned else item.weight for item in products]
    inputs = [first.input, joined(builder, weights, 1)]
    has_bias, op = any(item.bias is not None for item in products), first.op
    bias = _bias(products, builder, dtype) if has_bias else None
    if bias is not None and op == "Gemm":
        inputs.append(bias)
    whole = builder.node(op, inputs, hint=f"{hint}/products")
    return whole if bias is None or op == "Gemm" else builder.elementwise("Add", [whole, bias])


def are_of_one_input(products: Sequence[MergedProduct]) -> bool:
    """Whether products that are not the same read one value, by one operator."""
    values = {item.values[-1] for item in products}
    return len(values) == len(products) and len({(item.input, item.op) for item in products}) == 1


def is_read_by(value: ir.Value, reader: ir.Node) -> bool:
    """Whether one node looks at a value, once, and nothing else does."""
    return not value.is_graph_output() and viewers(value) == [reader]


def _bias(products: Sequence[MergedProduct], builder: Builder, dtype: ir.DataType) -> ir.Value:
    """The biases one after the other, zeros where there is none."""
    parts = [
        builder.constant(np.zeros(item.columns, dtype.numpy()))
        if item.bias is None
        else builder.reshape(item.bias, [item.columns])
        for item in products
    ]
    return joined(builder, parts, 0)


def weight_of(operand: ir.Value) -> tuple[ir.Value, bool] | None:
    """The constant that a product reads, and whether its transpose is read, by that product alone; None if it is none."""
    node, turned = operand.producer(), False
    if is_standard(node, "Transpose") and node.inputs[0] is not None:
        if attribute(node, "perm", [1, 0]) != [1, 0] or not is_read_once(operand):
            return None
        operand, turned = node.inputs[0], True
    return None if constant_tensor(operand) is None else (operand, turned)


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is a constant, or one that is transposed, whose content is there, and is read once; it is not read."""
    found = weight_of(value)
    tensor = None if found is None else constant_tensor(found[0])
    return found is not None and tensor is not None and is_read_once(found[0]) and is_readable(tensor)


def _fits(bias: ir.Value, columns: int, facts: Facts) -> bool:
    """Whether a bias has an element for each column, and its content is there."""
    dims, tensor = facts.dims(bias), constant_tensor(bias)
    if not dims or dims[-1] != columns or any(dim != 1 for dim in dims[:-1]):
        return False
    return tensor is not None and is_readable(tensor)


_OPERANDS = 3
"""Queries, keys and values, the first inputs of the operator."""
_RANK = 3
"""The axes of each: batch, positions, heads · channels."""


def undivided(operands: Operands, spec: AttentionSpec, builder: Builder) -> ir.Value | None:
    """The value of which queries, keys and values are the pieces, in this order and nothing besides; None if there is none."""
    return _split(operands.values, builder.facts) or _viewed(operands, spec, builder)


def _split(values: Sequence[ir.Value], facts: Facts) -> ir.Value | None:
    """The value whose parts along the last axis, one after the other, are the operands as they are: by Split or Slices."""
    part = read_part(values[0], facts)
    is_whole = part is not None and facts.rank(part.whole) == _RANK and sorted_parts(values, facts) == list(values)
    return part.whole if part is not None and is_whole else None


def _viewed(operands: Operands, spec: AttentionSpec, builder: Builder) -> ir.Value | None:
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


def merge_products(node: ir.Node, builder: Builder) -> None:
    """Makes one product of those that give queries, keys and values to a GroupQueryAttention of the graph, if they do."""
    products = products_of(node, builder)
    if products is not None:
        builder.at(node)
        whole, needless = merged(products, builder, node.name or ""), [value for item in products for value in item.values]
        replace_inputs(node, [whole, None, None], needless, builder)


def products_of(node: ir.Node, builder: Builder) -> list[MergedProduct] | None:
    """Queries, keys and values of GroupQueryAttention as products of one input that nothing else needs; None if they are not."""
    found = [_product(value, node, builder) for value in node.inputs[:_OPERANDS]]
    products = [item for item in found if item is not None]
    return products if len(products) == _OPERANDS and are_of_one_input(products) else None


def _product(value: ir.Value | None, reader: ir.Node, builder: Builder) -> MergedProduct | None:
    """An operand as a product with a constant; None if it is none, or needed besides."""
    found = read_product(value, builder) if value is not None and is_read_by(value, reader) else None
    if found is None or len(builder.facts.dims(found.input) or ()) != _RANK:
        return None
    return found if all(known_elsewhere(item, set(found.values), builder) for item in found.values) else None
