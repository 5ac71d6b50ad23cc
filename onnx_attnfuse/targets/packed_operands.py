"""Queries, keys and values for GroupQueryAttention as one tensor: (b, s, heads of queries, of keys and of values · h).

    x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── q, k, v      becomes      x ── MatMul(Wq | Wk | Wv) ── q | k | v

Enter by `undivided` where one value was split into all three, and by `merge_products` where each is a product of its own. Merged
weights are nodes at first, and constants when all is judged (`graph.folding`).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.axes.views import is_short
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import answer_needless, known_elsewhere
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.targets.layout import Grouped
from onnx_attnfuse.targets.merged_projections import MergedProduct, are_of_one_input, is_read_by, merged, read_product
from onnx_attnfuse.targets.projections import in_order

_OPERANDS = 3
"""Queries, keys and values, the first inputs of the operator."""
_RANK = 3
"""The axes of each: batch, positions, heads · channels."""


def undivided(operands: Grouped, spec: AttentionSpec, builder: Builder) -> ir.Value | None:
    """The value of which queries, keys and values are the pieces, in this order and nothing besides; None if there is none."""
    return _split(operands.values, builder.facts) or _viewed(operands, spec, builder)


def _split(values: Sequence[ir.Value], facts: Facts) -> ir.Value | None:
    """The value whose parts along the last axis, one after the other, are the operands as they are: by Split or Slices."""
    parts = [part for value in values if (part := read_part(value, facts)) is not None]
    dims = facts.dims(parts[0].whole) if parts else None
    if len(parts) < len(values) or dims is None or len(dims) != _RANK:
        return None
    if any((part.whole, part.axis, part.step) != (parts[0].whole, _RANK - 1, 1) for part in parts):
        return None
    borders = [part.stop for part in parts]
    is_whole = [part.start for part in parts] == [0, *borders[:-1]] and borders[-1] == dims[-1]
    return parts[0].whole if is_whole and 0 not in borders else None


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


def merge_products(node: ir.Node, builder: Builder) -> bool:
    """Makes one product of those that give an operator its queries, keys and values; whether that was done.

    Args:
        node: GroupQueryAttention, in the place of the source's nodes already.
        builder: The builder.
    """
    products = products_of(node, builder)
    if products is None:
        return False
    builder.at(node)
    for place, value in enumerate((merged(products, builder, node.name or ""), None, None)):
        node.replace_input_with(place, value)
    for value in (value for item in products for value in item.values):
        answer_needless(value, builder)
        sweep([value])
    return True


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
