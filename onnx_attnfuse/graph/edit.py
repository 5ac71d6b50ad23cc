"""Edits of a graph in which new values were built beside old ones: connecting them, answering for shapes.

`connect` gives the users of a value another one. Values that become needless may still be asked for their shapes: `check_shapes`
refuses where the answer is known nowhere else, `answer_shapes` gives it. A `Snapshot` puts everything back after a
change that failed halfway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import all_parts, attribute, subgraphs
from onnx_attnfuse.graph.sizes import Dim, symbols
from onnx_attnfuse.graph.sweep import Detached, sweep
from onnx_attnfuse.graph.uses import shape_nodes, viewers
from onnx_attnfuse.reasons import Refused


def check_shapes(inner: Sequence[ir.Value], builder: Builder) -> None:
    """Checks that values which become needless are not asked for shapes that nothing else tells.

    Raises:
        Refused: The shape of one is asked for and not known elsewhere.
    """
    within = set(inner)
    for value in inner:
        for node in shape_nodes(value):
            asked = node.inputs[0]
            if asked is not None and not known_elsewhere(asked, within, builder):
                message = f"the shape of the intermediate value '{asked.name}' is used and not known elsewhere"
                raise Refused("shape-used", message, node.name)


def known_elsewhere(value: ir.Value, inner: set[ir.Value], builder: Builder) -> bool:
    """Whether the shape of `value` can be computed from values outside `inner`."""
    dims = builder.facts.dims(value)
    return dims is not None and all(not (_origins(dim, builder) & inner) for dim in dims)


def _origins(dim: Dim, builder: Builder) -> set[ir.Value]:
    return {builder.facts.origins[name][0] for name in symbols(dim)}


def connect(old: ir.Value, new: ir.Value, builder: Builder, users: Iterable[ir.Node]) -> None:
    """Gives `users` and whoever runs the graph the new value, by the old one's name; nodes just built keep the old one."""
    name = old.name
    old.name = builder.name(f"{name}_unfused")
    new.name = name
    new.doc_string = old.doc_string
    new.metadata_props.update(old.metadata_props)
    if old.shape is not None:
        new.shape = old.shape
    if old.type is not None:
        new.type = old.type
    own = set(builder.added)
    for node in dict.fromkeys(users):
        if node not in own:
            for place, value in enumerate(node.inputs):
                if value is old:
                    node.replace_input_with(place, new)
    graph = old.graph
    assert graph is not None
    for place, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[place] = new
    builder.facts.succeed(old, new)


def put_back(old: ir.Value, new: ir.Value, removed: Detached, builder: Builder) -> bool:
    """Puts removed nodes back, with the value that they give, if the new one and all that they read is there; whether it is."""
    made, inner = new.producer(), {node for node, _ in removed.nodes}
    read = [value.producer() for _, inputs in removed.nodes for value in inputs if value is not None]
    gone = any(node is not None and node not in inner and node.graph is None for node in read)
    if made is None or made.graph is None or gone:
        return False
    removed.restore(made)
    shape = old.shape
    connect(new, old, builder, [user for user, _ in new.uses() if user not in inner])
    old.shape = shape
    sweep([new])
    return True


def answer_needless(value: ir.Value, builder: Builder) -> None:
    """Answers for the shape of a value of which nothing else is asked any more."""
    if value.graph is not None and not value.is_graph_output() and not viewers(value):
        answer_shapes(value, builder)


def replace_inputs(node: ir.Node, inputs: Sequence[ir.Value | None], needless: Iterable[ir.Value], builder: Builder) -> None:
    """Gives a node other first inputs, and removes values that nothing else needs then."""
    node.resize_inputs(max(len(inputs), len(node.inputs)))
    for place, value in enumerate(inputs):
        node.replace_input_with(place, value)
    for value in needless:
        answer_needless(value, builder)
        sweep([value])


def answer_shapes(value: ir.Value, builder: Builder) -> None:
    """Gives readers of the shape of a value the same numbers from elsewhere."""
    for node in list(shape_nodes(value)):
        dims = builder.facts.dims(node.inputs[0])
        if dims is None:
            continue
        assert isinstance(node.graph, ir.Graph)
        is_function = builder.is_function and node.graph is builder.graph
        apart = Builder(node.graph, builder.facts, builder.opset, builder.names, is_function=is_function)
        apart.at(node)
        answer = apart.shape(dims[slice(attribute(node, "start", 0), attribute(node, "end"))])
        asked = node.outputs[0]
        if asked.is_graph_output():
            answer = apart.node(
                "Identity", [answer], dims=apart.facts.dims(answer), dtype=ir.DataType.INT64, hint=node.name or None
            )
            answer.name, asked.name = asked.name, builder.name(f"{asked.name}_unfused")
        asked.replace_all_uses_with(answer, replace_graph_outputs=True)
        sweep([asked])


class Snapshot:
    """One graph and those nested in it: inputs, order, connections, names, types and initializers. Taken in linear time."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._given = graph, tuple(graph.inputs)
        self._parts = [(part, tuple(part), tuple(part.outputs), tuple(part.initializers.values())) for part in all_parts(graph)]
        self._inputs = [(node, tuple(node.inputs)) for _, nodes, _, _ in self._parts for node in nodes]
        values = [value for part, nodes, _, held in self._parts for value in _values(part, nodes, held)]
        self._values = [(value, value.name, value.shape, value.type) for value in values]

    def restore(self) -> None:
        """Puts everything back; nodes that were added since are taken out and read nothing any more."""
        kept = {node for node, _ in self._inputs}
        added = [node for node in self._graph.all_nodes() if node not in kept]
        for part, _, outputs, _ in self._parts:
            part.outputs.clear()
            part.outputs.extend(outputs)
        for node in (*added, *kept):
            if node.graph is not None:
                node.graph.remove(node)
        for node in added:
            for inner in subgraphs(node):
                inner.outputs.clear()
            for place in range(len(node.inputs)):
                node.replace_input_with(place, None)
        for node, inputs in self._inputs:
            for place, value in enumerate(inputs):
                node.replace_input_with(place, value)
        for part, nodes, _, _ in self._parts:
            part.extend(nodes)
        if tuple(self._graph.inputs) != self._given:
            self._graph.inputs.clear()
            self._graph.inputs.extend(self._given)
        self._restore_values()

    def _restore_values(self) -> None:
        """Names first: initializers are held by them."""
        for part, _, _, _ in self._parts:
            part.initializers.clear()
        for value, name, shape, element in self._values:
            value.name, value.shape, value.type = name, shape, element
        for part, _, _, held in self._parts:
            for value in held:
                part.initializers.add(value)


def _values(part: ir.Graph, nodes: tuple[ir.Node, ...], held: tuple[ir.Value, ...]) -> Iterator[ir.Value]:
    yield from part.inputs
    yield from held
    for node in nodes:
        yield from node.outputs
