"""Questions that enabling rules share: is this the only use of a value, which bias is added to it."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.constants import constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts


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
