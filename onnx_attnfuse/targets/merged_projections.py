"""Products of one input as one product: `x · (W₁ | W₂ | …) + (b₁ | b₂ | …)`.

    parts = [read_product(value, builder) for value in values]      # None where a value is no such product
    whole = merged(parts, builder, "name")                          # (…, all columns), the parts one after the other

Each column of a product is computed by itself, so the columns of the whole are those of its parts. Merged weights are nodes at
first, and constants when all is judged (`graph.folding`). A weight that something else reads too is left: it would be kept twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_tensor, has_unknown_attribute, is_readable, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.targets.projections import joined

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
    """Emits the columns of all products one after the other, (…, all columns), at the builder's position."""
    first, facts, total = products[0], builder.facts, sum(item.columns for item in products)
    dtype = facts.dtype(first.values[0])
    assert dtype is not None
    weights = [builder.transpose(item.weight, [1, 0]) if item.turned else item.weight for item in products]
    inputs = [first.input, joined(builder, weights, 1, [first.channels, total], dtype)]
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
    return joined(builder, parts, 0, [sum(item.columns for item in products)], dtype)


def _is_weight(value: ir.Value) -> bool:
    """Whether a value is a constant, or one that is transposed, whose content is there, and is read once; it is not read."""
    node, table = value.producer(), value
    if is_standard(node, "Transpose") and node.inputs[0] is not None:
        if attribute(node, "perm", [1, 0]) != [1, 0] or not _is_read_once(value):
            return False
        table = node.inputs[0]
    tensor = constant_tensor(table)
    return tensor is not None and _is_read_once(table) and is_readable(tensor)


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _fits(bias: ir.Value, columns: int, facts: Facts) -> bool:
    """Whether a bias has an element for each column, and its content is there."""
    dims, tensor = facts.dims(bias), constant_tensor(bias)
    if not dims or dims[-1] != columns or any(dim != 1 for dim in dims[:-1]):
        return False
    return tensor is not None and is_readable(tensor)
