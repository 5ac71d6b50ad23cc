"""The biases of MultiHeadAttention: that of the queries is left, that of the values goes into the next product.

    softmax(s · (q + a) · (k + b)ᵀ + m) · (v + c)  =  softmax(s · (q + a) · kᵀ + m) · v + c

The bias of the keys adds one number to all scores of a row, which a softmax does not see. The weights of a row sum to 1,
so the bias of the values comes out as it is, and goes through the product after the attention into its bias, as constants.
Where -1e5 is added to all scores of a row, how these are rounded depends on that number: so biases stay beside an added mask,
unless queries are 0 in such rows.

On a GPU the operator adds its three biases by a kernel each, which reads and writes all queries, keys or values. Rows of queries
that are 0 with their bias take a plain 0 then, by a condition as large as they are: a faster kernel than one that repeats it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.emptied_rows import EmptiedRows
from onnx_attnfuse.fusion.enabling.helpers import added_bias, only_use
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, attributes, constant_array, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.targets.projection_bias import MAX_BIAS_ELEMENTS

_BIAS, _FIRST_OF_CACHE = 3, 6
"""Inputs of MultiHeadAttention."""
_PLACES: Mapping[str, tuple[int, ...]] = {"PackedMultiHeadAttention": (4, 5)}
"""Inputs that say where tokens are."""


def with_fewer_biases(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """MultiHeadAttention that adds the bias of its queries only, before it, and that of its values after it."""
    facts = builder.facts
    found = _Biased.read(node, facts)
    if found is None:
        return None
    emptied = _emptied(found, facts)
    if emptied is None and found.mask is not None:
        return None
    query, frontier = _query(found, emptied, builder)
    inputs: list[ir.Value | None] = [query, found.key, found.value, None, *node.inputs[_BIAS + 1 :]]
    while inputs[-1] is None:
        inputs.pop()
    result = node.outputs[0]
    fused = builder.node(node.op_type, inputs, attributes(node), domain=node.domain, hint=node.name)
    if found.biases[2].any():
        fused = builder.elementwise("Add", [fused, builder.constant(found.biases[2])])
    return EnablingChange(((result, fused),), (*frontier, *(value for value in inputs[1:] if value is not None)))


@dataclasses.dataclass(frozen=True)
class _Biased:
    """MultiHeadAttention with a constant bias and without a cache."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    biases: tuple[Array, Array, Array]
    mask: ir.Value | None

    @staticmethod
    def read(node: ir.Node, facts: Facts) -> _Biased | None:
        """The operator; None where a cache holds keys with their bias, or rows may be left without weights that sum to 1."""
        query, key, value, bias, padding, mask = (given(node, place) for place in range(_FIRST_OF_CACHE))
        if query is None or key is None or value is None or padding is not None or any(node.inputs[_FIRST_OF_CACHE:]):
            return None
        if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
            return None
        widths = [(facts.dims(item) or ("",))[-1] for item in (query, key, value) if facts.rank(item) == 3]
        added = constant_array(bias, limit=MAX_BIAS_ELEMENTS)
        if added is None or len(widths) != 3 or not np.isfinite(added).all():
            return None
        first, second, third = widths
        if not (isinstance(first, int) and isinstance(second, int) and isinstance(third, int)):
            return None
        if added.size != first + second + third:
            return None
        return _Biased(query, key, value, (added[:first], added[first : first + second], added[first + second :]), mask)


def with_biases_outside(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """An attention without the bias that was added to its keys, and with that of its values after it.

    That takes rows whose weights sum to 1: those of MultiHeadAttention without a mask, and those of PackedMultiHeadAttention,
    each of a token, which sees itself.
    """
    facts, places = builder.facts, _PLACES.get(node.op_type, ())
    query, key, value = (given(node, place) for place in range(_BIAS))
    others = [place for place, item in enumerate(node.inputs) if place >= _BIAS and item is not None]
    if query is None or key is None or value is None or not set(others) <= set(places):
        return None
    if any(item.uses() or item.is_graph_output() for item in node.outputs[1:]):
        return None
    keys, values = _apart(key, facts), _apart(value, facts)
    if keys is None and values is None:
        return None
    key, value = key if keys is None else keys[0], value if values is None else values[0]
    result, inputs = node.outputs[0], [query, key, value, *node.inputs[_BIAS:]]
    dims = facts.dims(result)
    fused = builder.node(node.op_type, inputs, attributes(node), domain=node.domain, dims=dims, hint=node.name)
    if values is not None:
        fused = builder.elementwise("Add", [fused, values[1]])
    return EnablingChange(((result, fused),), tuple(item for item in inputs if item is not None))


def _apart(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """A value without the finite bias that is added to it for one reader alone, and the bias."""
    found = added_bias(value, facts) if len(value.uses()) == 1 and not value.is_graph_output() else None
    bias = None if found is None else constant_array(found[1], limit=MAX_BIAS_ELEMENTS)
    return found if bias is not None and np.isfinite(bias).all() else None


def _query(found: _Biased, emptied: EmptiedRows | None, builder: Builder) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """The queries with their bias, and their operands."""
    bias = found.biases[0]
    rows = found.query if emptied is None else emptied.rows
    biased = builder.elementwise("Add", [rows, builder.constant(bias)]) if bias.any() else rows
    if emptied is None:
        return biased, (rows,)
    return emptied.emptied(biased, _full(emptied.test, biased, builder), builder), (emptied.test, rows)


def _emptied(found: _Biased, facts: Facts) -> EmptiedRows | None:
    """Queries that are the opposite of the bias in some rows, so that they are 0 with their bias."""
    emptied = EmptiedRows.read(found.query.producer()) if len(found.query.uses()) == 1 else None
    if emptied is None or facts.rank(emptied.test) != 3 or facts.dims(emptied.rows) != facts.dims(found.query):
        return None
    filling = np.zeros(1) if emptied.filling is None else constant_array(emptied.filling, limit=MAX_BIAS_ELEMENTS)
    opposite = -found.biases[0]
    if filling is None or filling.size not in {1, opposite.size}:
        return None
    return emptied if (filling.reshape(-1) == opposite).all() else None


def _full(test: ir.Value, like: ir.Value, builder: Builder) -> ir.Value:
    """A condition as large as its alternatives; one for all attentions of that size."""
    dims, known = builder.facts.dims(like), builder.facts.dims(test)
    assert dims is not None
    assert known is not None
    for node, _ in test.uses():
        if is_standard(node, "Expand") and builder.facts.dims(node.outputs[0]) == dims:
            return node.outputs[0]
    return builder.expand(test, dims, [old != new for old, new in zip(known, dims, strict=True)])


def with_bias_after(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`(x + b) @ w + c` of constants b, w and c as `x @ w + (b @ w + c)`, whose bias is computed when the model is written."""
    facts = builder.facts
    if not is_standard(node, "MatMul") or node.inputs[0] is None or node.inputs[1] is None:
        return None
    x, weight = node.inputs[0], node.inputs[1]
    biased = added_bias(x, facts) if len(x.uses()) == 1 and not x.is_graph_output() else None
    addition = only_use(node.outputs[0], "Add")
    if biased is None or addition is None or facts.rank(weight) != 2 or constant_tensor(weight) is None:
        return None
    found = added_bias(addition.outputs[0], facts)
    if found is None or found[0] is not node.outputs[0]:
        return None
    summed, bias = biased
    through = builder.node("MatMul", [bias, weight])
    total = builder.node("Add", [through, found[1]])
    builder.rearranged.append(total)
    builder.at(addition)
    result = addition.outputs[0]
    product = builder.node("MatMul", [summed, weight], hint=node.name)
    return EnablingChange(((result, builder.elementwise("Add", [product, total])),), (summed, weight))
