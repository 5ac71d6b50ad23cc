"""Check that padding rows, which are 0 once padding was restored, reach no other token.

Tokens may be computed one by one, chosen by their first position, be keys under the mask of another attention, or be pooled. What
mixes them and gives tokens again, as a convolution does, gives other numbers beside padding than the source, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.predicates import Padding
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.fusion.packing.region import Region, below, users
from onnx_attnfuse.fusion.packing.token_axes import Marks, read_marks
from onnx_attnfuse.fusion.packing.tokenwise import Step
from onnx_attnfuse.fusion.packing.tokenwise_ops import read_step
from onnx_attnfuse.graph.constants import attribute, constant_array, is_standard
from onnx_attnfuse.reasons import Refused

_Other = tuple[AttentionSpec, Meaning]


def check_padding_rows(
    region: Region, others: Iterable[_Other], attentions: Iterable[ir.Node], graph: ir.Graph | ir.Function
) -> None:
    """Looks at what reads the restored values.

    Args:
        region: What is packed.
        others: All attentions of the graph that were understood.
        attentions: A node of each attention of the graph.
        graph: The graph.

    Raises:
        Refused: Something mixes positions, and tokens or an attention follow.
    """
    inside = {id(site.spec) for site in region.sites}
    masked = {node: other for other in others if id(other[0]) not in inside for node in _path(other[0])}
    pending = [(node, value, marks) for value, marks in region.exits.items() for node in region.readers[value]]
    seen: set[tuple[ir.Node, ir.Value]] = set()
    by_token, mixing = set[ir.Node](), set[ir.Node]()
    while pending:
        node, value, marks = pending.pop()
        if (node, value) in seen:
            continue
        seen.add((node, value))
        found = _results(node, value, marks, region, masked.get(node))
        (mixing if found is None else by_token).add(node)
        pending += [(user, output, own) for output, own in found or () for user in users(output)]
    later = {value for node in (*by_token, *attentions) for value in (*node.inputs, *node.outputs) if value is not None}
    for node in mixing:
        if not later.isdisjoint(below(node.outputs, graph)):
            raise Refused("operator-between", f"{node.op_type} mixes positions, and tokens follow", node.name)


def _path(spec: AttentionSpec) -> list[ir.Node]:
    """The nodes of an attention, and those that bring its operands into its layout."""
    views = (source.indexed.value.producer() for operand in spec.operands() for source in operand[:-1])
    return [*spec.nodes, *(node for node in views if node is not None)]


def _results(
    node: ir.Node, value: ir.Value, marks: Marks, region: Region, other: _Other | None
) -> list[tuple[ir.Value, Marks]] | None:
    """The results of a node that have rows of their own for padding; None if the node mixes positions."""
    if other is not None:
        spec, meaning = other
        indexed = spec.output[0]
        own = read_marks(indexed.axes, spec.axes.b, spec.axes.i)
        if own is None or not any(isinstance(item, Padding) for item in meaning.predicates):
            return None
        return [(indexed.value, own)] if region.tokens.is_full(indexed.value, own) else []
    if _takes_first(node, marks):
        return []
    step = read_step(node, value, marks, region.tokens)
    return list(zip(node.outputs, step.outputs, strict=False)) if isinstance(step, Step) else None


def _takes_first(node: ir.Node, marks: Marks) -> bool:
    """Whether a node takes the first position, which is never padding."""
    if not is_standard(node, "Gather"):
        return False
    index = constant_array(node.inputs[1])
    axis: int = attribute(node, "axis", 0)
    return index is not None and not index.any() and marks[axis % len(marks)] == "s"
