"""Attentions of a decoder that can share one buffer for past and present, and why not; each as the operator that does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import nonzero, position, size, value_of
from onnx_attnfuse.attention.masks.predicates import Padding, Window
from onnx_attnfuse.attention.match.candidates import anchor_of
from onnx_attnfuse.attention.match.operands import appending
from onnx_attnfuse.attention.spec import AttentionSpec, Cache
from onnx_attnfuse.certify.terms import ZERO, Term, add, multiply
from onnx_attnfuse.fusion.commit import check_apart, commit
from onnx_attnfuse.fusion.shared_cache.positions import PositionTables
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import is_standard, needed
from onnx_attnfuse.graph.edit import answer_shapes, connect
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, RESHAPES
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.sizes import Dim, Size, lone_symbol
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import is_copy, is_fed, reached, viewers
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets import group_query_attention as target
from onnx_attnfuse.targets.base import BuildContext, Emitted
from onnx_attnfuse.transforms.rewriting import Edit

_SAME = CASTS | RESHAPES
"""Operators that leave elements in their order, and whole numbers and truth values unchanged."""


@dataclasses.dataclass(frozen=True)
class Filled:
    """A buffer of a fixed length that the source writes new keys and values into."""

    position: ir.Value
    """The graph input that says where, (), (1) or (s)."""
    length: Dim
    """How many positions there are."""
    written: tuple[ir.Value, ir.Value]
    """Keys and values with the new ones, as they were written."""


@dataclasses.dataclass(frozen=True)
class CachedSite:
    """An attention whose cache can be a buffer."""

    node: ir.Node
    """The Softmax or attention node that it is found at."""
    spec: AttentionSpec
    meaning: Meaning
    mask: ir.Value | None
    """The graph input (b, past + s) that tells tokens from padding; None: every key counts."""
    window: int | None
    """How many keys a row sees, itself counted; None: all before it."""
    filled: Filled | None = None
    """The buffer that the source writes into; None: its cache grows."""
    evicts: bool = False
    """Whether its buffer keeps no more than the window."""
    leader: ir.Node | None = None
    """The attention before it that appends the keys and values that both read; None: it appends its own."""

    @property
    def cache(self) -> Cache:
        """How its keys and values come about."""
        assert self.spec.cache is not None
        return self.spec.cache

    @property
    def past(self) -> tuple[ir.Value, ir.Value]:
        """The graph inputs with the earlier keys and values."""
        key, value = self.cache.past
        return key.value, value.value

    @property
    def present(self) -> tuple[ir.Value, ir.Value]:
        """The values in the place of which the operator gives the buffer; graph outputs."""
        key, value = self.cache.present
        return key.value, value.value

    @property
    def past_length(self) -> Size:
        """The symbol for the number of earlier positions."""
        size = length(self.cache.past_axis)
        assert isinstance(size, Size)
        return size


def read_site(node: ir.Node, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> CachedSite:
    """An attention with a cache, as a site that shares a buffer.

    Raises:
        Refused: It cannot.
    """
    facts, cache = context.builder.facts, spec.cache
    assert cache is not None
    reason = target.refuse(spec, meaning, context, is_buffered=True)
    if reason is not None:
        raise Refused(reason.code, reason.message, reason.node)
    if lone_symbol(length(cache.past_axis)) is None:
        raise Refused("cache-kept", "the past length is not a size that the caller can choose", spec.name)
    key, value = (_input_of(indexed) for indexed in cache.past)
    for past, present, indexed in zip((key, value), cache.present, cache.past, strict=True):
        _check_only_appended(past, indexed.value, appending(present.value, facts), spec)
        if not present.value.is_graph_output():
            raise Refused("cache-kept", f"'{present.value.name}', the present keys or values, is not an output", spec.name)
    window, mask = target.window_of(spec, meaning), padding_input(spec, meaning, facts)
    past = IndexedValue(key, cache.past[0].axes), IndexedValue(value, cache.past[1].axes)
    spec = dataclasses.replace(spec, cache=dataclasses.replace(cache, past=past))
    return CachedSite(node, spec, meaning, mask, None if window == -1 else window)


def with_shared_heads(spec: AttentionSpec) -> AttentionSpec:
    """The attention with each axis of a known length that neither keys nor values have as the innermost of its heads.

    So are keys and values that serve the first queries of several rounds, or each a round, no matter how they are repeated.
    """
    own = {leaf for operand in (spec.key, spec.value) for axis in operand[-1].indexed.axes for leaf in leaves(axis)}
    heads = leaves(spec.heads)
    rest = (*heads, *(leaf for leaf in leaves(spec.batch_axis) if leaf not in heads))
    absent = tuple(leaf for leaf in rest if leaf not in own and isinstance(leaf.size, int))
    return dataclasses.replace(spec, heads=(*(leaf for leaf in heads if leaf not in absent), *absent))


def with_leaders(sites: Sequence[CachedSite], *, may_follow: bool) -> list[CachedSite]:
    """Sites of which those that read what an earlier one appends are known to.

    Args:
        sites: All sites, in the order of the graph.
        may_follow: The operator reads a buffer without new keys and values.

    Raises:
        Refused: Two append to the same earlier keys or values, or the operator does not.
    """
    firsts: dict[ir.Value, CachedSite] = {}
    found: list[CachedSite] = []
    for site in sites:
        first = firsts.setdefault(site.past[0], site)
        if first is site:
            found.append(site)
            continue
        if first.past != site.past or first.present != site.present or site.filled is not None:
            raise Refused("caches-differ", "two attentions append to the same past keys or values", first.spec.name)
        if not may_follow:
            message = "it reads keys and values of an earlier attention, and GroupQueryAttention is not known to without new ones"
            raise Refused("caches-differ", message, site.spec.name)
        found.append(dataclasses.replace(site, leader=first.node))
    return found


def evicting(sites: Sequence[CachedSite], most: int | None) -> list[CachedSite]:
    """Sites of which those with a window keep no more than that, unless another reads their buffer.

    Args:
        sites: All sites.
        most: The most positions that there will be; a wider window keeps all of them.
    """
    read = {site.leader for site in sites}

    def evicts(site: CachedSite) -> bool:
        is_alone = site.leader is None and site.node not in read
        return is_alone and site.window is not None and (most is None or site.window < most)

    return [dataclasses.replace(site, evicts=evicts(site)) for site in sites]


def check_together(sites: Sequence[CachedSite], facts: Facts) -> None:
    """Checks that attentions have one cache: the same earlier positions, new ones and padding, each its own keys and values.

    Raises:
        Refused: They have not.
    """
    first = sites[0]
    pasts = [value for site in sites if site.leader is None for value in site.past]
    if len(set(pasts)) < len(pasts):
        raise Refused("caches-differ", "two attentions append to the same past keys or values", first.spec.name)
    for site in sites[1:]:
        if site.past_length != first.past_length or length(site.spec.axes.i) != length(first.spec.axes.i):
            raise Refused("caches-differ", "the caches of two attentions may have different lengths", site.spec.name)
        if length(site.spec.axes.b) != length(first.spec.axes.b):
            raise Refused("caches-differ", "two attentions may have different batches", site.spec.name)
        if site.mask is not first.mask:
            raise Refused("caches-differ", "two attentions have different padding", site.spec.name)
    if first.mask is not None and not _has_length(first.mask, 0, length(first.spec.axes.b), facts):
        raise Refused("caches-differ", "the mask does not have a row for each entry of the batch", first.spec.name)


def _input_of(indexed: IndexedValue) -> ir.Value:
    """The graph input that a value is.

    Raises:
        Refused: It is computed.
    """
    value = indexed.value
    while (node := value.producer()) is not None and is_copy(node):
        value = needed(node, 0)
    if not is_fed(value):
        raise Refused("cache-kept", f"the past keys or values '{value.name}' are not an input of the model")
    return value


def _check_only_appended(past: ir.Value, given: ir.Value, appends: ir.Node | None, spec: AttentionSpec) -> None:
    """Checks that nothing but the appending looks at the elements of the earlier keys or values."""
    copies = list(reached([past], lambda value: (node.outputs[0] for node in viewers(value) if is_copy(node))))
    for value in copies:
        if value.is_graph_output():
            raise Refused("cache-used", f"the past keys or values '{past.name}' are also an output", spec.name)
        for node in viewers(value):
            if node is not appends and not is_copy(node):
                raise Refused("cache-used", f"the past keys or values '{past.name}' have other consumers", node.name)
    assert given in copies


def padding_input(spec: AttentionSpec, meaning: Meaning, facts: Facts) -> ir.Value | None:
    """The graph input whose element at (b, j) says that a key is no padding; None where nothing is padding.

    Raises:
        Refused: Padding is something else.
    """
    paddings = [item for item in meaning.predicates if isinstance(item, Padding)]
    if not paddings:
        return None
    found = {_mask_of(item, spec, facts) for item in paddings}
    mask = found.pop() if len(found) == 1 else None
    if mask is None:
        raise Refused("padding-unread", "padding is not given by an input of shape (b, past + new)", spec.name)
    return mask


def _mask_of(padding: Padding, spec: AttentionSpec, facts: Facts) -> ir.Value | None:
    """The graph input (b, t) of which the element at (b, j) is read, whatever shape it was brought into."""
    element = nonzero(padding.predicate)
    value = None if element is None else value_of(element)
    dims = facts.dims(value)
    if element is None or value is None or dims is None:
        return None
    read = _flat(element.args, dims)
    while (node := value.producer()) is not None:
        if not is_standard(node, *_SAME) or node.inputs[0] is None or _is_fraction(node.inputs[0], facts):
            return None
        value = node.inputs[0]
    shape = facts.dims(value)
    if not value.is_graph_input() or shape is None or len(shape) != 2:
        return None
    if shape[1] == length(spec.axes.i) or not _has_length(value, 1, length(spec.axes.j), facts):
        return None
    wanted = _flat([position(spec.axes.b), position(spec.axes.j)], shape)
    return value if read is wanted else None


def _has_length(mask: ir.Value, axis: int, size: Dim, facts: Facts) -> bool:
    """Whether a mask is as long as the part read of it; a size of its own is taken to be that, where masks fit."""
    dims = facts.dims(mask)
    found = None if dims is None or len(dims) != 2 else dims[axis]
    own = isinstance(found, Size) and len(found.atoms) == 1 and facts.origins.get(found.atoms[0].key) == (mask, axis)
    return found == size or (own and facts.assumed.masks_fit)


def is_fitted(site: CachedSite, facts: Facts) -> bool:
    """Whether the mask of a site has a size of its own that is taken to be that of the part read of it."""
    wanted = length(site.spec.axes.b), length(site.spec.axes.j)
    return site.mask is not None and site.filled is None and facts.dims(site.mask) != wanted


def _is_fraction(value: ir.Value, facts: Facts) -> bool:
    """Whether a cast may turn a number other than 0 into 0."""
    dtype = facts.dtype(value)
    return dtype is None or not (dtype.is_integer() or dtype == ir.DataType.BOOL)


def _flat(at: Sequence[Term], dims: Sequence[Dim]) -> Term:
    """The place of an element when the axes are laid one after the other."""
    total = ZERO
    for form, dim in zip(at, dims, strict=True):
        total = add(multiply(total, size(dim)), form)
    return total


def has_window(sites: Sequence[CachedSite]) -> bool:
    """Whether an attention leaves out keys that lie too far back."""
    return any(isinstance(item, Window) for site in sites for item in site.meaning.predicates)


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
    computed = spec
    spec = computed if tables is None else tables.within(computed)
    (encoding,) = target.encodings(spec, site.meaning)
    buffered = buffered if site.evicts else dataclasses.replace(buffered, evicting=None)
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


def give_out(attended: Attended, builder: Builder) -> None:
    """Gives out the buffer in the place of keys and values that the source put together, once no attention reads these.

    Raises:
        Refused: They are used elsewhere too.
    """
    for old, new in attended.presents:
        answer_shapes(old, builder)
        for node in {node for node, _ in old.uses()}:
            sweep(node.outputs)
        if (others := viewers(old)) or old.uses():
            name = others[0].name if others else None
            raise Refused("cache-used", f"'{old.name}', the present keys or values, has other consumers", name)
        connect(old, new, builder, [])
        sweep([old])
