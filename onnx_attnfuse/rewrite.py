"""Carrying one site's plan out: the new nodes are built beside the old ones, judged, and only then connected.

Until `commit` nothing that was in the graph has changed, so undoing is removing what was added.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep, sweep_unused
from onnx_attnfuse.graph.uses import shape_nodes, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets.emitted import Emitted


def inner_values(spec: AttentionSpec) -> list[ir.Value]:
    """Values that the fused operator makes needless: all between operands and result, and the result before its last view."""
    values = [value for node in spec.nodes for value in node.outputs]
    return values + [laid.value for laid in spec.output[1:]]


def check_shape_users(spec: AttentionSpec, builder: Builder) -> None:
    """Inner values whose shape is asked for are no obstacle if the answer can be had elsewhere.

    Raises:
        Refused: It cannot.
    """
    inner = inner_values(spec)
    for value in inner:
        for node in shape_nodes(value):
            asked = node.inputs[0]
            if asked is not None and not _known_elsewhere(asked, set(inner), builder):
                message = f"the shape of the inner value '{asked.name}' is used and not known elsewhere"
                raise Refused("shape-used", message, node.name)


def _known_elsewhere(value: ir.Value, inner: set[ir.Value], builder: Builder) -> bool:
    dims = builder.facts.dims(value)
    return dims is not None and all(not (_origins(dim, builder) & inner) for dim in dims)


def _origins(dim: Dim, builder: Builder) -> set[ir.Value]:
    if not isinstance(dim, Size):
        return set()
    found: set[ir.Value] = set()
    for atom in dim.atoms:
        if atom.evaluate is None:
            found.add(builder.facts.origins[atom.key][0])
        for part in atom.parts:
            found |= _origins(part, builder)
    return found


def commit(spec: AttentionSpec, emitted: Emitted, builder: Builder) -> None:
    """Puts the new value in the place of the old one and removes what became needless."""
    old, new = emitted.replaced, emitted.value
    name = old.name
    old.name = builder.name(f"{name}_unfused")
    new.name = name
    new.doc_string = old.doc_string
    new.metadata_props.update(old.metadata_props)
    if old.shape is not None:
        new.shape = old.shape
    if old.type is not None:
        new.type = old.type
    producer = old.producer()
    if producer is not None:
        emitted.node.metadata_props.update(producer.metadata_props)
        emitted.node.doc_string = producer.doc_string
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    builder.facts.copy(old, new)
    inner = inner_values(spec)
    sweep([old, *inner])
    needless = [value for value in emitted.needless if _known_elsewhere(value, {*inner, *emitted.needless}, builder)]
    for value in (*inner, *needless):
        _answer_shapes(value, builder)
    sweep((*inner, *needless))


def _answer_shapes(value: ir.Value, builder: Builder) -> None:
    """Gives what asks for the shape of a needless value the same numbers from elsewhere."""
    if value.graph is None or value.is_graph_output() or viewers(value):
        return
    for node in list(shape_nodes(value)):
        dims = None if node.inputs[0] is None else builder.facts.dims(node.inputs[0])
        if dims is None:
            continue
        apart = Builder(builder.graph, builder.facts, builder.opset, builder.names)
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


def tidy(builder: Builder) -> None:
    """Removes what was built since the builder was last placed and nothing uses: all of it before `commit`."""
    sweep_unused(builder.added)
