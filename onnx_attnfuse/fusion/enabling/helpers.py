"""What enabling rules share: is this the only use of a value, which bias is added to it, the same operator with other inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import producer_of, reads_input
from onnx_attnfuse.kernels.operators import group_query_attention


def only_use(value: ir.Value, op: str) -> ir.Node | None:
    """The one node that looks at a value, if it is an `op` of the standard."""
    users = [node for node, _ in value.uses()]
    return users[0] if len(users) == 1 and is_standard(users[0], op) and not value.is_graph_output() else None


def added_bias(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The two operands of an Add whose second is a constant along the last axis."""
    node = value.producer()
    if not is_standard(node, "Add"):
        return None
    left, right = node.inputs
    dims = facts.dims(value)
    for one, other in ((left, right), (right, left)):
        if one is None or other is None or dims is None or constant_tensor(other) is None:
            continue
        if facts.dims(one) == dims and facts.dims(other) == dims[-1:] and facts.dtype(other) == facts.dtype(value):
            return one, other
    return None


def lengths_follow_from_shapes(node: ir.Node) -> bool:
    """Whether a GroupQueryAttention is told lengths that shapes and constants make, so that any inputs judge it."""
    lengths = [group_query_attention.INFO.first(node, role) for role in ("last", "total")]
    return not any(value is None or reads_input(value) for value in lengths)


def same_node(
    node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], builder: Builder
) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """The operator with other inputs and attributes: its results that are used, old and new."""
    made = builder.node(node.op_type, inputs, attributes, domain=node.domain, hint=node.name, outputs=len(node.outputs))
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for old, new in zip(node.outputs, producer_of(made).outputs, strict=True):
        builder.facts.copy(old, new)
        new.type, new.shape = old.type, old.shape
        pairs += [(old, new)] if old.uses() or old.is_graph_output() else []
    return tuple(pairs)
