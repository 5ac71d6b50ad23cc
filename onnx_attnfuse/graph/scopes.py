"""Every graph of a model: the main graph, the graphs nested in nodes, and model-local functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.calls import Calls
from onnx_attnfuse.graph.constants import all_nodes, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import STANDARD
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.tensors import all_graphs, bodies


@dataclasses.dataclass(frozen=True)
class Scope:
    """One graph with the facts about its values."""

    path: str
    """Its place: the main graph's name, `If_0/then_branch`, or a function's identifier."""
    graph: ir.Graph
    facts: Facts
    opset: int
    is_function: bool = False
    """Whether it is the graph of a function, which holds no initializers."""


def scopes(model: ir.Model, assumed: Assumed = Assumed()) -> Iterator[Scope]:  # noqa: B008 - frozen
    """All graphs of `model`, outer before inner; functions with the facts common to all their calls."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    calls: dict[ir.OperatorIdentifier, list[tuple[ir.Node, Facts]]] = {name: [] for name in model.functions}

    def note(graph: ir.Graph, facts: Facts) -> None:
        for node in all_nodes(graph) if calls else ():
            if node.op_identifier() in calls:
                calls[node.op_identifier()].append((node, facts))

    known = Calls(model.functions, assumed) if calls else None
    facts = Facts(model.graph, assumed=assumed, calls=known)
    note(model.graph, facts)
    yield from _nested(model.graph, model.graph.name or "main", facts, opset)
    for function in callers_first(model):
        agreed = _agreed_inputs(function, [item for item in calls[function.identifier()] if item[0].graph])
        facts = Facts(function.graph, agreed, assumed, known)
        note(function.graph, facts)
        path = f"{function.domain}::{function.name}"
        yield from _nested(function.graph, path, facts, function.opset_imports.get("", opset), is_function=True)


def callers_first(model: ir.Model) -> list[ir.Function]:
    """Functions ordered so that each comes after those that call it."""
    ordered: list[ir.Function] = []
    seen: set[ir.OperatorIdentifier] = set()
    pending = [(function, False) for function in reversed(model.functions.values())]
    while pending:
        function, done = pending.pop()
        if done:
            ordered.append(function)
        elif function.identifier() not in seen:
            seen.add(function.identifier())
            called = (model.functions.get(node.op_identifier()) for node in function.all_nodes())
            pending.append((function, True))
            pending += reversed([(item, False) for item in called if item is not None])
    return ordered[::-1]


def _agreed_inputs(function: ir.Function, calls: Sequence[tuple[ir.Node, Facts]]) -> list[tuple[Dims | None, ir.DataType | None]]:
    """Shape and type of each input of a function as far as all calls agree; a length they differ in is unknown."""
    agreed: list[tuple[Dims | None, ir.DataType | None]] = []
    own: dict[tuple[Dim, ...], Dim] = {}
    for index, value in enumerate(function.inputs):
        given = [(node.inputs[index] if index < len(node.inputs) else None, facts) for node, facts in calls]
        shapes = [facts.dims(argument) for argument, facts in given]
        types = {facts.dtype(argument) for argument, facts in given}
        agreed.append((_common(shapes, value, own), types.pop() if len(types) == 1 else None))
    return agreed


def _common(shapes: list[Dims | None], value: ir.Value, own: dict[tuple[Dim, ...], Dim]) -> Dims | None:
    """The shape of a function's input; lengths that are one symbol in every call are one symbol of the function's own."""
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes) or len({len(shape) for shape in known}) > 1:
        return None
    dims: list[Dim] = []
    for axis, column in enumerate(zip(*known, strict=True)):
        fixed = isinstance(column[0], int) and len(set(column)) == 1
        dims.append(column[0] if fixed else own.setdefault(column, sizes.symbol(f"{value.name}.{axis}")))
    return tuple(dims)


def _nested(graph: ir.Graph, path: str, facts: Facts, opset: int, *, is_function: bool = False) -> Iterator[Scope]:
    yield Scope(path, graph, facts, opset, is_function)
    for node in graph:
        for inner in subgraphs(node):
            name = next((key for key, item in node.attributes.items() if item.value is inner), "body")
            yield from _nested(inner, f"{node.name or node.op_type}/{name}", facts, opset)


def count_ops(model: ir.Model) -> Counter[str]:
    """Nodes by `domain::op_type` (`op_type` alone in the standard domain), everywhere in the model."""
    nodes = (node for graph in bodies(model) for node in all_nodes(graph))
    counted = Counter((node.domain, node.op_type) for node in nodes)
    return Counter({f"{domain}::{op}" if domain not in STANDARD else op: count for (domain, op), count in counted.items()})


def all_names(model: ir.Model) -> set[str]:
    """Every name of a value or node in the model."""
    names = set[str | None]()
    for graph in all_graphs(model):
        names.update(graph.initializers)
        names.update([value.name for value in graph.inputs])
        for node in graph:
            names.add(node.name)
            names.update([value.name for value in node.outputs])
    return {name for name in names if name}
