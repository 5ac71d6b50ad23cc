"""The commit of one site: verified new nodes take the place of the old ones, which are removed.

Until `commit` nothing that was in the graph has changed, so undoing removes the new nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.edit import answer_needless, known_elsewhere
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import shape_nodes, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets.base import Emitted
from onnx_attnfuse.transforms.rewriting import Edit


def inner_values(spec: AttentionSpec) -> list[ir.Value]:
    """Values that the fused operator makes needless: all between operands and result, and the result before its last view."""
    values = [value for node in spec.nodes for value in node.outputs]
    return values + [indexed.value for indexed in spec.output[1:]]


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
            raise Refused("empty-axis", f"there is nothing to compute: {name} is empty", spec.name)


def check_apart(spec: AttentionSpec, order: NodeOrder) -> None:
    """Checks that no input of the fused operator, a mask above all, is computed from nodes that it makes needless.

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
        message = f"'{given.name}', an input of the operator, depends on scores or weights of the attention"
        raise Refused("inner-value-used", message, spec.name)


def commit(spec: AttentionSpec, emitted: Emitted, builder: Builder, order: NodeOrder, edit: Edit) -> None:
    """Puts the new values in the place of the old ones and removes unused nodes.

    The operator's own operands still read the keys and values that the source appended to earlier ones; other
    earlier nodes may now read the operator's outputs; re-sort the graph afterwards.
    """
    producer = emitted.replaced.producer()
    if producer is not None:
        emitted.node.metadata_props.update(producer.metadata_props)
        emitted.node.doc_string = producer.doc_string
    presents = [old for old, _ in emitted.presents]
    edit.connect([(emitted.replaced, emitted.value)])
    inner = [*inner_values(spec), *presents]
    sweep([emitted.replaced, *inner])
    needless = [value for value in emitted.needless if known_elsewhere(value, {*inner, *emitted.needless}, builder)]
    for value in (*inner, *needless):
        answer_needless(value, builder)
    sweep((*inner, *needless))
    between = dict.fromkeys(source.indexed.value for operand in spec.operands() for source in operand[:-1])
    for views in (_rotated_values(spec), [*between]):  # nearest first
        _drop_views(views, builder)
    own = set(edit.added)
    for old, new in emitted.presents:
        if old.graph is not None:
            edit.connect([(old, new)], order.free([node for node in viewers(old) if node not in own], new))
            answer_needless(old, builder)
    sweep([value for pair in emitted.presents for value in pair])


def _drop_views(values: Sequence[ir.Value], builder: Builder) -> None:
    """Removes those of `values`, nearest first, of which nothing but the shape is asked, and that is known elsewhere."""
    for value in values:
        if all(known_elsewhere(asked, set(values), builder) for node in shape_nodes(value) if (asked := node.inputs[0])):
            answer_needless(value, builder)
            sweep([value])


def _rotated_values(spec: AttentionSpec) -> list[ir.Value]:
    """Values that are rotated without the operator, nearest first: needless where it does that, unless others look at them."""
    found: list[ir.Value] = []
    for operand in (*spec.operands(), *(spec.cache.new if spec.cache is not None else ())):
        rotary = operand[-1].rotary
        if rotary is not None and rotary.is_decomposed:
            found += [source.indexed.value for source in operand if source.rotary is None]
            found += [value for node in rotary.nodes for value in node.outputs]
    return list(dict.fromkeys(found))
