"""Products of one input as one: queries, keys and values of an attention, and the two products of a gated MLP.

    x ── MatMul(Wq), MatMul(Wk), MatMul(Wv) ── attention     becomes     x ── MatMul(Wq | Wk | Wv) ── attention
    x ── MatMul(Wg) ── act ── Mul ── MatMul(Wu) ── x         becomes     x ── MatMul(Wu | Wg) ── Split ── act ── Mul

GroupQueryAttention takes the three as one tensor. Whoever does not reads them from a Split, which is a launch of its own and
writes them once more: that pays, if at all, where products are bound by their launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.ops import CASTS, CONTRIB, ELEMENTWISE, REARRANGES
from onnx_attnfuse.graph.uses import producer_of, reads_input
from onnx_attnfuse.kernels.operators import group_query_attention, info_of
from onnx_attnfuse.targets.merged_products import Product, are_of_one_input, merged, read_product
from onnx_attnfuse.targets.packed_operands import products_of

GROUPED = group_query_attention.INFO
_ROLES = ("query", "key", "value")
_OPERANDS = 3
"""Queries, keys and values, the first inputs of every attention that does not project them itself."""
_SPLIT_SINCE = 13
"""The opset from which on the lengths of a Split's parts are an input."""
_MOST_NODES = 24
"""Nodes of an activation that are looked at."""
_ACTIVATIONS = ELEMENTWISE | CASTS | frozenset("Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish Selu Softplus Swish".split())
_CONTRIB_ACTIVATIONS = frozenset(["FastGelu", "Gelu", "QuickGelu"])
"""Those of com.microsoft, each element computed from one element."""


def with_packed_projections(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """GroupQueryAttention with queries, keys and values as one product, where lengths follow from shapes."""
    facts = builder.facts
    lengths = [GROUPED.first(node, role) for role in ("last", "total")] if info_of(node) is GROUPED else [None]
    if any(value is None or reads_input(value) for value in lengths):
        return None
    products = products_of(node, builder)
    if products is None:
        return None
    whole = merged(products, builder, node.name or "")
    attributes = {name: item.value for name, item in node.attributes.items()}
    fused = builder.node(
        node.op_type,
        [whole, None, None, *node.inputs[_OPERANDS:]],
        attributes,
        domain=CONTRIB,
        hint=node.name,
        outputs=len(node.outputs),
    )
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for old, new in zip(node.outputs, producer_of(fused).outputs, strict=True):
        facts.copy(old, new)
        new.type, new.shape = old.type, old.shape
        pairs += [(old, new)] if old.uses() or old.is_graph_output() else []
    past = [GROUPED.input(node, name) for name in ("past_key", "past_value")]
    return EnablingChange(tuple(pairs), (*_frontier(products), *(value for value in past if value is not None)))


def with_split_projections(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """Queries, keys and values of an attention as parts of one product, however they are rearranged and rotated before."""
    info = info_of(node)
    if info is None or tuple(map(info.role, range(_OPERANDS))) != _ROLES or len(node.inputs) < _OPERANDS:
        return None
    found = [_projection(value, builder) for value in node.inputs[:_OPERANDS]]
    products = [item for item in found if item is not None]
    return _split(products, builder, node) if len(products) == _OPERANDS else None


def with_one_gated_product(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`act(x Wg) · (x Wu)` with both as parts of one product, biases included."""
    if not is_standard(node, "Mul"):
        return None
    left, right = node.inputs
    for plain, activated in ((left, right), (right, left)):
        up = read_product(plain, builder)
        gate = None if up is None else _gate(activated, builder)
        if up is not None and gate is not None and up.columns == gate.columns:
            return _split([up, gate], builder, node)
    return None


def _split(products: Sequence[Product], builder: Builder, node: ir.Node) -> EnablingChange | None:
    """Parts of one product in the place of products."""
    facts = builder.facts
    if not are_of_one_input(products) or builder.opset < _SPLIT_SINCE:
        return None
    builder.at(producer_of(products[0].values[-1]))
    whole = merged(products, builder, node.name or node.op_type)
    dims, dtype = facts.dims(whole), facts.dtype(whole)
    assert dims is not None
    first = builder.node(
        "Split",
        [whole, builder.constant([item.columns for item in products])],
        {"axis": len(dims) - 1},
        dtype=dtype,
        hint=f"{node.name or node.op_type}/parts",
        outputs=len(products),
    )
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for item, part in zip(products, producer_of(first).outputs, strict=True):
        facts.record(part, [*dims[:-1], item.columns], dtype)
        pairs.append((item.values[0], part))
    return EnablingChange(tuple(pairs), tuple(_frontier(products)))


def _frontier(products: Sequence[Product]) -> list[ir.Value]:
    """The values that products of one input are computed from."""
    return list(dict.fromkeys([products[0].input, *(value for item in products for value in item.constants())]))


def _projection(value: ir.Value | None, builder: Builder) -> Product | None:
    """The product that an operand of an attention is, rearranged, rotated or put behind a cache."""
    for _ in range(_MOST_NODES):
        product = read_product(value, builder)
        node = None if value is None else value.producer()
        if product is not None or node is None:
            return product
        info = info_of(node)
        if (info is None or info.kind != "rotation") and not is_standard(node, "Concat", *REARRANGES):
            return None
        value = node.inputs[-1 if node.op_type == "Concat" else 0]
    return None


def _gate(value: ir.Value | None, builder: Builder) -> Product | None:
    """The one product that a value is computed from, element by element."""
    pending, seen, found = [value], {value}, list[Product]()
    while pending and len(seen) <= _MOST_NODES:
        item = pending.pop()
        product = read_product(item, builder)
        if product is not None:
            found.append(product)
        elif item is None or constant_tensor(item) is None:
            node = None if item is None else item.producer()
            if node is None or node.graph is not builder.graph or not _is_activation(node):
                return None
            fresh = [given for given in node.inputs if given is not None and given not in seen]
            seen.update(fresh)
            pending += fresh
    return found[0] if len(found) == 1 and not pending else None


def _is_activation(node: ir.Node) -> bool:
    """Whether each element is computed from one element of what it reads."""
    if node.domain == CONTRIB:
        return node.op_type in _CONTRIB_ACTIVATIONS and len([value for value in node.inputs if value is not None]) == 1
    return is_standard(node, *_ACTIVATIONS)
