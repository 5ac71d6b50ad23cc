"""Carrying one site's plan out: the new nodes are built beside the old ones, judged, and only then connected.

Until `commit` nothing that was in the graph has changed, so undoing is removing what was added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.order import Order
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


def check_lengths(spec: AttentionSpec) -> None:
    """An attention that is known to compute nothing is left alone: kernels divide by the number of heads and their width.

    Raises:
        Refused: An axis is empty.
    """
    axes = spec.axes
    named = {
        "batch entries": axes.b,
        "heads": axes.n,
        "rows": axes.i,
        "keys": axes.j,
        "channels": axes.h,
        "value channels": axes.v,
    }
    for name, axis in named.items():
        if length(axis) == 0:
            raise Refused("empty-axis", f"it computes nothing: there are no {name}", spec.name)


def check_shape_users(spec: AttentionSpec, builder: Builder, *, cached: bool) -> None:
    """Inner values whose shape is asked for are no obstacle if the answer can be had elsewhere.

    Args:
        spec: The attention.
        builder: What to build with.
        cached: The operator is to give the keys and values with those of earlier positions too.

    Raises:
        Refused: It cannot.
    """
    presents = spec.cache.present if cached and spec.cache is not None else ()
    check_shapes([*inner_values(spec), *(laid.value for laid in presents)], builder)


def check_shapes(inner: Sequence[ir.Value], builder: Builder) -> None:
    """The same for any values that become needless.

    Raises:
        Refused: The shape of one is asked for and not known elsewhere.
    """
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


def check_apart(spec: AttentionSpec, order: Order) -> None:
    """What the operator is given, a mask above all, must not be computed from what it makes needless.

    Args:
        spec: The attention.
        order: The places of the nodes.

    Raises:
        Refused: It is, as where scores are added to themselves.
    """
    own = set(spec.nodes)
    anchor = spec.output[0].value.producer()
    between = [value for node in spec.nodes if node is not anchor for value in node.outputs]
    users = [user for value in between for user in viewers(value) if user not in own]
    if not users or anchor is None:
        return
    below = order.leads(users, order.place(anchor)) - own
    given = next((value for value in spec.values() if value.producer() in below), None)
    if given is not None:
        message = f"'{given.name}', which the operator would be given, is computed from scores or weights of the attention"
        raise Refused("inner-value-used", message, spec.name)


def commit(spec: AttentionSpec, emitted: Emitted, builder: Builder, order: Order) -> None:
    """Puts the new values in the place of the old ones and removes what became needless.

    What the operator itself is computed from goes on reading the keys and values that the source appended to earlier ones; other
    earlier nodes may read what the operator gives now, so that the graph is to be sorted afterwards.
    """
    producer = emitted.replaced.producer()
    if producer is not None:
        emitted.node.metadata_props.update(producer.metadata_props)
        emitted.node.doc_string = producer.doc_string
    presents = [old for old, _ in emitted.presents]
    connect(emitted.replaced, emitted.value, builder, [node for node, _ in emitted.replaced.uses()])
    inner = [*inner_values(spec), *presents]
    sweep([emitted.replaced, *inner])
    needless = [value for value in emitted.needless if _known_elsewhere(value, {*inner, *emitted.needless}, builder)]
    for value in (*inner, *needless):
        _answer_shapes(value, builder)
    sweep((*inner, *needless))
    for views in (_turning(spec), _views(spec)):
        _drop_views(views, builder)
    own = set(builder.added)
    for old, new in emitted.presents:
        if old.graph is not None:
            connect(old, new, builder, order.free([node for node in viewers(old) if node not in own], new))
            _answer_shapes(old, builder)
    sweep([value for pair in emitted.presents for value in pair])


def _drop_views(values: Sequence[ir.Value], builder: Builder) -> None:
    """Removes those of `values`, nearest first, of which nothing but the shape is asked, and that is known elsewhere."""
    for value in values:
        if all(_known_elsewhere(asked, set(values), builder) for node in shape_nodes(value) if (asked := node.inputs[0])):
            _answer_shapes(value, builder)
            sweep([value])


def _views(spec: AttentionSpec) -> list[ir.Value]:
    """What stands between the operands and what they are views of, nearest first."""
    return list(dict.fromkeys(source.laid.value for operand in spec.operands() for source in operand[:-1]))


def _turning(spec: AttentionSpec) -> list[ir.Value]:
    """Values that are rotated without the operator, nearest first: needless where it does that, unless others look at them."""
    found: list[ir.Value] = []
    for operand in (*spec.operands(), *(spec.cache.new if spec.cache is not None else ())):
        rotary = operand[-1].rotary
        if rotary is not None and rotary.is_spelled:
            found += [source.laid.value for source in operand if source.rotary is None]
            found += [value for node in rotary.nodes for value in node.outputs]
    return list(dict.fromkeys(found))


def connect(old: ir.Value, new: ir.Value, builder: Builder, users: Iterable[ir.Node]) -> None:
    """Gives `users` and whoever runs the graph the new value, by the old one's name; what was just built keeps the old one."""
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
    builder.facts.copy(old, new)


def _answer_shapes(value: ir.Value, builder: Builder) -> None:
    """Gives what asks for the shape of a needless value the same numbers from elsewhere."""
    if value.graph is not None and not value.is_graph_output() and not viewers(value):
        answer_shapes(value, builder)


def answer_shapes(value: ir.Value, builder: Builder) -> None:
    """Gives what asks for the shape of a value the same numbers from elsewhere."""
    for node in list(shape_nodes(value)):
        dims = None if node.inputs[0] is None else builder.facts.dims(node.inputs[0])
        if dims is None:
            continue
        assert node.graph is not None
        apart = Builder(node.graph, builder.facts, builder.opset, builder.names)
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
