"""Who looks at a value: at its elements, or at its shape only."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, REARRANGES

_VIEWS = REARRANGES | CASTS


def label(node: ir.Node) -> str:
    """The name of a node for people: its own, or that of its first result where it has none."""
    return node.name or node.outputs[0].name or ""


def module_of(node: ir.Node) -> str | None:
    """The path of the torch module that a node was exported from, for people; None if the exporter wrote none."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    if scopes is not None:
        paths = re.findall(r"'([^']*)'", scopes)
    else:
        paths = [part.partition(":")[0] for part in node.metadata_props.get("namespace", "").split("/")]
    return next(filter(None, reversed(paths[:-1])), None)  # the last one names the node itself


def producer_of(value: ir.Value) -> ir.Node:
    """The node that computes a value, which is no input and no initializer."""
    node = value.producer()
    assert node is not None
    return node


def viewers(value: ir.Value) -> list[ir.Node]:
    """The nodes that look at the elements of a value; not those that ask for its shape, themselves or through views."""
    return [node for node, _ in value.uses() if not _asks_for_shape(node)]


def reads_input(value: ir.Value) -> bool:
    """Whether the elements of a value depend on what the graph is given at run time, and not on shapes and constants alone."""
    pending, seen = [value], {value}
    for item in pending:
        node = item.producer()
        if node is None:
            if item.const_value is None or item.is_graph_input():
                return True
            continue
        read = () if is_standard(node, *ASKS_SHAPE) else node.inputs
        fresh = [part for part in read if part is not None and part not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def shape_nodes(value: ir.Value) -> Iterator[ir.Node]:
    """The Shape nodes that ask for the shape of a value, or of a view of it that nothing else looks at."""
    for node, _ in value.uses():
        if node.op_type == "Shape":
            yield node
        elif _asks_for_shape(node):
            yield from shape_nodes(node.outputs[0])


def _asks_for_shape(node: ir.Node) -> bool:
    if not is_standard(node):
        return False
    if node.op_type == "Shape":
        return True
    output = node.outputs[0]
    if node.op_type not in _VIEWS or output.is_graph_output() or not output.uses():
        return False
    return all(_asks_for_shape(user) for user, _ in output.uses())
