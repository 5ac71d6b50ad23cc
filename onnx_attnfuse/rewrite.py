"""Carrying one site's plan out: the new nodes are built beside the old ones, judged, and only then connected.

Until `commit` nothing that was in the graph has changed, so undoing is removing what was added.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim, Size
from onnx_attnfuse.graph.sweep import sweep
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
        for user, _ in value.uses():
            if user.op_type == "Shape" and not _known_elsewhere(value, set(inner), builder):
                raise Refused(
                    "shape-used", f"the shape of the inner value '{value.name}' is used and not known elsewhere", user.name
                )


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
    for value in inner:
        _answer_shapes(value, builder)
    sweep(inner)


def _answer_shapes(value: ir.Value, builder: Builder) -> None:
    """Gives what asks for the shape of a needless value the same numbers from elsewhere."""
    users = [user for user, _ in value.uses()]
    dims = builder.facts.dims(value)
    if value.graph is None or value.is_graph_output() or dims is None or any(user.op_type != "Shape" for user in users):
        return
    for user in users:
        start, end = (user.attributes[key].value if key in user.attributes else None for key in ("start", "end"))
        apart = Builder(builder.graph, builder.facts, builder.opset, builder.names)
        apart.at(user)
        user.outputs[0].replace_all_uses_with(apart.shape(dims[start:end]), replace_graph_outputs=True)
        sweep([user.outputs[0]])


def undo(builder: Builder) -> None:
    """Removes everything that was built since the builder was last placed."""
    sweep(output for node in reversed(builder.added) for output in node.outputs)
