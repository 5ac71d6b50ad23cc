"""Model-local functions put in place of their calls, so that changes in them are claimed and proved."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
import onnx_ir.passes.common

from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.ops import CONTRIB, STANDARD

_ORIGIN = "attnfuse.origin"


def inlined(model: ir.Model) -> ir.Model:
    """The model without calls of functions; the model itself where they cannot all be put in place.

    A function that has the name of a known operator stays: it is read as that operator.
    """
    if not model.functions:
        return model
    copy = model.clone()
    for function in copy.functions.values():
        for node in function:
            for value in node.outputs:
                value.metadata_props[_ORIGIN] = value.name or ""
    try:
        onnx_ir.passes.common.InlinePass(lambda function: function.domain not in {*STANDARD, CONTRIB})(copy)
    except (ValueError, ir.passes.PassError):  # another opset, or a graph as a parameter
        return model
    return copy if _interface(copy) == _interface(model) and _is_unique(copy.graph) else model


def origin(value: ir.Value) -> str:
    """The name that a value has in the function that it is from."""
    return value.metadata_props.get(_ORIGIN) or value.name or ""


def run_by(model: ir.Model, node: ir.Node) -> Iterator[ir.Node]:
    """A node, and all those in its branches and in the functions that it calls, directly or not."""
    called: set[ir.OperatorIdentifier] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        yield item
        for graph in subgraphs(item):
            pending.extend(graph)
        name = item.op_identifier()
        if name in model.functions and name not in called:
            called.add(name)
            pending.extend(model.functions[name])


def _interface(model: ir.Model) -> list[str | None]:
    return [value.name for value in (*model.graph.inputs, *model.graph.outputs)]


def _is_unique(graph: ir.Graph) -> bool:
    """Whether no two values have one name: a function that returns its input renames it."""
    given = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    names = [value.name for node in graph for value in node.outputs if value.name]
    return len(names) == len(set(names)) and given.isdisjoint(names)
