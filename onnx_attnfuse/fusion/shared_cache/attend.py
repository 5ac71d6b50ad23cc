"""One attention of a decoder as the operator that reads and writes the buffer, in the place of the source's nodes."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.candidates import anchor_of
from onnx_attnfuse.fusion.commit import check_apart, commit
from onnx_attnfuse.fusion.shared_cache.counted import PositionTables
from onnx_attnfuse.fusion.shared_cache.qualify import CachedSite
from onnx_attnfuse.graph.edit import answer_shapes, connect
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.rewriting import Edit
from onnx_attnfuse.targets import group_query_attention as target
from onnx_attnfuse.targets.base import BuildContext, Emitted

KEY, VALUE = 1, 2
"""Which outputs of the operator are the buffer."""


@dataclasses.dataclass(frozen=True)
class Attended:
    """An attention that shares a buffer."""

    site: CachedSite
    emitted: Emitted
    present: tuple[ir.Value, ir.Value]
    """The outputs of the model that are the buffer afterwards."""
    presents: tuple[tuple[ir.Value, ir.Value], ...]
    """The keys and values that the source put together, each with the buffer in its place."""
    has_tables: bool
    """Whether it is rotated by rows of tables, which positions have to be inside of."""

    @property
    def node(self) -> ir.Node:
        """The operator."""
        return self.emitted.node

    @property
    def form(self) -> str:
        """The form in which the mask and the operands are passed, for a reader."""
        return self.emitted.mask if self.node.inputs[KEY] is not None else f"{self.emitted.mask}, packed qkv"


def attend(
    site: CachedSite,
    buffered: target.Buffered,
    context: BuildContext,
    order: NodeOrder,
    edit: Edit,
    *,
    tables: PositionTables | None,
    leader: Attended | None = None,
) -> Attended:
    """Builds the operator and puts it in the place of the attention.

    Args:
        site: The attention.
        buffered: The operator's lengths of the buffer.
        context: The builder and its facts.
        order: The order of the nodes.
        edit: New nodes are part of this.
        tables: Where cosines and sines become tables, if they are computed of positions alone.
        leader: The attention that appends the keys and values, if this one does not.

    Raises:
        Refused: An operand cannot be brought into its layout, or keys and values are used elsewhere.
    """
    builder, spec, count = context.builder, site.spec, len(edit.added)
    check_apart(spec, order)
    builder.at(anchor_of(spec))
    pasts = [IndexedValue(value, indexed.axes) for value, indexed in zip(site.past, site.cache.past, strict=True)]
    spec = dataclasses.replace(spec, cache=dataclasses.replace(site.cache, past=(pasts[0], pasts[1])))
    computed = spec
    spec = computed if tables is None else tables.within(computed)
    (encoding,) = target.encodings(spec, site.meaning)
    if leader is not None:
        buffered = dataclasses.replace(buffered, holds_new=leader.present)
    emitted = target.emit(spec, site.meaning, context, encoding, buffered=buffered)
    earlier = site.past if leader is None else leader.present
    given = [item for item in emitted.node.inputs if item in earlier]
    if given != list(earlier) or any(
        new is not output for (_, new), output in zip(emitted.presents, emitted.node.outputs[KEY:], strict=False)
    ):
        raise Refused("cache-layout", "the cache layout is not batch, heads, positions, channels", spec.name)
    order.add(edit.added[count:], anchor_of(spec))
    commit(spec, dataclasses.replace(emitted, presents=()), builder, order, edit)
    present = (emitted.node.outputs[KEY], emitted.node.outputs[VALUE]) if leader is None else leader.present
    return Attended(site, emitted, present, emitted.presents, spec is not computed)


def give_out(attended: Attended, context: BuildContext) -> None:
    """Gives out the buffer once no attention of the source reads its concatenation.

    Raises:
        Refused: It is used elsewhere too.
    """
    for old, new in attended.presents:
        _give_out(old, new, context)


def _give_out(old: ir.Value, new: ir.Value, context: BuildContext) -> None:
    """Gives out the buffer in the place of keys or values that the source put together.

    Raises:
        Refused: They are used elsewhere too.
    """
    builder = context.builder
    answer_shapes(old, builder)
    for node in {node for node, _ in old.uses()}:
        sweep(node.outputs)
    if (others := viewers(old)) or old.uses():
        name = others[0].name if others else None
        raise Refused("cache-used", f"'{old.name}', the present keys or values, has other consumers", name)
    connect(old, new, builder, [])
    sweep([old])
