"""Token-wise operators by name: whether a node computes every token by itself, and how it runs on packed tokens.

`read_step` is asked with a value of the node, its output or an input, whose marks are known. An operator without a rule is taken
to mix positions.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.fusion.packing.token_axes import Marks, Tokens
from onnx_attnfuse.fusion.packing.tokenwise import Step, refusal
from onnx_attnfuse.fusion.packing.tokenwise_rules import RULES
from onnx_attnfuse.graph.constants import has_unknown_attribute, subgraphs
from onnx_attnfuse.graph.ops import read_as
from onnx_attnfuse.reasons import Reason


def read_step(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """How a node runs on packed tokens, or the reason why it cannot be computed token by token."""
    rule = RULES.get(read_as(node))
    if rule is None or has_unknown_attribute(node) or any(True for _ in subgraphs(node)):
        return refusal(node, "is not known to work token by token")
    step = rule(node, value, marks, tokens)
    if isinstance(step, Reason):
        return step
    dims = [tokens.facts.dims(item) for item in node.outputs[: len(step.outputs)]]
    if any(found is None or len(found) != len(own) for found, own in zip(dims, step.outputs, strict=True)):
        return refusal(node, "has outputs of unknown shape")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[len(step.outputs) :]):
        return refusal(node, "has further outputs that are used")
    return step
