"""Nodes around fused operators taken into them, or out: biases of MultiHeadAttention, and what GroupQueryAttention does itself.

    softmax(s · (q + a) · (k + b)ᵀ + m) · (v + c)  =  softmax(s · (q + a) · kᵀ + m) · v + c

The bias of the queries is added before MultiHeadAttention, and that of the values goes into the next product.
The bias of the keys adds one number to all scores of a row, which a softmax does not see. The weights of a row sum to 1,
so the bias of the values comes out as it is, and goes through the product after the attention into its bias, as constants.
Where -1e5 is added to all scores of a row, how these are rounded depends on that number: so biases stay beside an added mask,
unless queries are 0 in such rows.

On a GPU the operator adds its three biases by a kernel each, which reads and writes all queries, keys or values. Rows of queries
that are 0 with their bias take a plain 0 then, by a condition as large as they are: a faster kernel than one that repeats it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.fusion.enabling.rule import (
    EnablingChange,
    added_bias,
    enabling,
    lengths_follow_from_shapes,
    only_use,
    own_bias,
    same_node,
)
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import Array, attributes, constant_array, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import origin
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.targets.masked_rows import Refill, filled
from onnx_attnfuse.targets.operand_products import MAX_BIAS_ELEMENTS, merged, products_of
from onnx_attnfuse.targets.rms_norm import EPSILON, before_norms

_BIAS, _MASK = 3, 5
"""Inputs of MultiHeadAttention; those after the mask are of a cache."""
_PLACES = {4, 5}
"""Inputs of PackedMultiHeadAttention that say where tokens are."""


@enabling(
    "key biases dropped (softmax ignores them) and value biases moved after the attention",
    "com.microsoft.MultiHeadAttention com.microsoft.PackedMultiHeadAttention",
    "fewer-biases",
)
def with_fewer_biases(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """An attention that adds no bias to its keys, and that of its values after it; that of its queries is added before it.

    That takes rows whose weights sum to 1: those of MultiHeadAttention without lengths, and those of PackedMultiHeadAttention,
    each of a token, which sees itself. A mask takes queries that are 0 in rows without a key.
    """
    facts, is_packed = builder.facts, node.op_type == "PackedMultiHeadAttention"
    operands = [given(node, place) for place in range(_BIAS)]
    others = {place for place in range(_BIAS, len(node.inputs)) if node.inputs[place] is not None}
    if any(item.uses() or item.is_graph_output() for item in node.outputs[1:]):
        return None
    if None in operands or not others <= (_PLACES if is_packed else {_BIAS, _MASK}):
        return None
    query, key, value = (item for item in operands if item is not None)
    inside = _inside(node, facts) if _BIAS in others else None
    if inside is None:
        keys, values = _apart(key, facts), _apart(value, facts)
        if others - (_PLACES if is_packed else set()) or (keys is None and values is None):
            return None
        key, value = key if keys is None else keys[0], value if values is None else values[0]
        added, frontier = None if values is None else values[1], [query, key, value]
    else:
        emptied = _emptied(query, inside[0], facts)
        if emptied is None and _MASK in others:
            return None
        frontier = [*([query] if emptied is None else [emptied.rows, emptied.test]), key, value]
        query = _biased(query, inside[0], emptied, builder)
        added = builder.constant(inside[2]) if inside[2].any() else None
    inputs: list[ir.Value | None] = [query, key, value, None, *node.inputs[_BIAS + 1 :]]
    while inputs[-1] is None:
        inputs.pop()
    dims = facts.dims(node.outputs[0])
    fused = builder.node(node.op_type, inputs, attributes(node), domain=node.domain, dims=dims, hint=node.name)
    result = fused if added is None else builder.elementwise("Add", [fused, added])
    frontier += [item for item in inputs[_BIAS:] if item is not None]
    return EnablingChange(((node.outputs[0], result),), tuple(frontier))


def _inside(node: ir.Node, facts: Facts) -> tuple[Array, Array, Array] | None:
    """The finite constant biases of queries, keys and values that an operator adds itself."""
    widths = [(facts.dims(item) or ("",))[-1] for item in node.inputs[:_BIAS] if item is not None and facts.rank(item) == 3]
    known = [width for width in widths if isinstance(width, int)]
    bias = constant_array(node.inputs[_BIAS], limit=MAX_BIAS_ELEMENTS)
    if bias is None or len(known) != _BIAS or not np.isfinite(bias).all() or bias.size != sum(known):
        return None
    first, second = known[0], known[0] + known[1]
    return bias[:first], bias[first:second], bias[second:]


def _apart(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """A value without the finite bias that is added to it for one reader alone, and the bias."""
    found = own_bias(value, facts)
    bias = None if found is None else constant_array(found[1], limit=MAX_BIAS_ELEMENTS)
    return found if bias is not None and np.isfinite(bias).all() else None


@dataclasses.dataclass(frozen=True)
class _Emptied:
    """Queries that are the opposite of their bias where a test holds, as `targets/masked_rows.py` writes them.

    where(test, filling, rows)        rows · cast(not test)        rows · cast(not test) + cast(test) · filling
    """

    test: ir.Value
    rows: ir.Value
    filling: ir.Value | None
    """None is 0."""
    keeps_nan: bool


def _read_emptied(node: ir.Node | None) -> _Emptied | None:
    """The last node of each form."""
    if is_standard(node, "Where"):
        test, filling, rows = node.inputs
        return None if test is None or rows is None else _Emptied(test, rows, filling, keeps_nan=False)
    if is_standard(node, "Mul"):
        rows, kept = node.inputs
        test = origin(origin(kept, "Cast"), "Not")
        return None if test is None or rows is None else _Emptied(test, rows, None, keeps_nan=True)
    if not is_standard(node, "Add"):
        return None
    product, dropped = (None if item is None else item.producer() for item in node.inputs)
    found = _read_emptied(product) if is_standard(product, "Mul") else None
    if found is None or not is_standard(dropped, "Mul") or origin(dropped.inputs[0], "Cast") is not found.test:
        return None
    return dataclasses.replace(found, filling=dropped.inputs[1])


def _emptied(query: ir.Value, bias: Array, facts: Facts) -> _Emptied | None:
    """Queries that are the opposite of the bias in some rows, so that they are 0 with their bias."""
    emptied = _read_emptied(query.producer()) if len(query.uses()) == 1 else None
    if emptied is None or facts.rank(emptied.test) != 3 or facts.dims(emptied.rows) != facts.dims(query):
        return None
    filling = np.zeros(1) if emptied.filling is None else constant_array(emptied.filling, limit=MAX_BIAS_ELEMENTS)
    if filling is None or filling.size not in {1, bias.size}:
        return None
    return emptied if (filling.reshape(-1) == -bias).all() else None


def _biased(query: ir.Value, bias: Array, emptied: _Emptied | None, builder: Builder) -> ir.Value:
    """The queries with their bias, 0 where they are emptied, by a condition as large as they are."""
    rows = query if emptied is None else emptied.rows
    rows = builder.elementwise("Add", [rows, builder.constant(bias)]) if bias.any() else rows
    if emptied is None:
        return rows
    test = builder.expand(emptied.test, dims_of(builder, rows))
    zero, refill = (
        builder.scalar(0.0, builder.facts.dtype(rows)),
        Refill(IndexedValue(test, ()), True, keeps_nan=emptied.keeps_nan),
    )
    return filled(builder, rows, test, zero, refill)


@enabling("value biases merged into those of the output projections", "MatMul", "bias-after")
def with_bias_after(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`(x + b) @ w + c` of constants b, w and c as `x @ w + (b @ w + c)`, whose bias is computed when the model is written."""
    facts = builder.facts
    if node.inputs[0] is None or node.inputs[1] is None:
        return None
    x, weight = node.inputs[0], node.inputs[1]
    biased = own_bias(x, facts)
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


_INFO = group_query_attention.INFO
_OPERANDS = 3
"""Queries, keys and values, its first inputs."""


@enabling(
    "normalizations of queries and keys moved into GroupQueryAttention", "com.microsoft.GroupQueryAttention", "norms-inside"
)
def with_norms_inside(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention that normalizes each head of queries and keys itself.

    A cache in one buffer has it done before the whole decoder is judged (`fusion.shared_cache.share`).
    """
    found = before_norms(node, builder) if lengths_follow_from_shapes(node) else None
    if found is None:
        return None
    pairs = same_node(node, found.inputs, {**attributes(node), EPSILON: found.epsilon}, builder)
    others = [_INFO.input(node, name) for name in ("value", "past_key", "past_value")]
    return EnablingChange(pairs, (*found.sources, *(value for value in others if value is not None)))


@enabling(
    "projections of queries, keys and values merged for GroupQueryAttention",
    "com.microsoft.GroupQueryAttention",
    "merged-projections",
)
def with_packed_projections(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention with queries, keys and values as one product, where lengths follow from shapes.

        x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── GroupQueryAttention
        x ── MatMul(Wq | Wk | Wv) ── GroupQueryAttention

    Where a Split would have to cut the product again, as in front of other operators and in gated MLPs, prompts lose by it
    (docs/decisions/0025).
    """
    products = products_of(node, builder) if lengths_follow_from_shapes(node) else None
    if products is None:
        return None
    whole = merged(products, builder, node.name or "")
    pairs = same_node(node, [whole, None, None, *node.inputs[_OPERANDS:]], attributes(node), builder)
    frontier = dict.fromkeys([products[0].input, *(value for item in products for value in item.constants())])
    past = [_INFO.input(node, name) for name in ("past_key", "past_value")]
    return EnablingChange(pairs, (*frontier, *(value for value in past if value is not None)))
