"""Attention over a buffer of a fixed length, as attention with a cache that grows.

New keys and values are written at `position`, and row i sees no key after `position + i`. So keys after the new ones
count for nothing, and the buffer holds `position` earlier keys and the new ones: the same as a cache that they are appended to.
Both are read as formulas over the source; the caller only counts the position.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axis, Factor, leaves, length, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue, is_short, views_above, views_below
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.index_reader import Reader, scattered_to
from onnx_attnfuse.attention.masks.mask_terms import dim_of, element_of, elements_of, index, position, size, truth, value_of
from onnx_attnfuse.attention.masks.operators import is_measure
from onnx_attnfuse.attention.masks.predicates import Causal, Other, Padding, Predicate, Window, kinds
from onnx_attnfuse.attention.match.operands import new_sources
from onnx_attnfuse.attention.spec import AttentionSpec, Cache, Source
from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.terms import ONE, ZERO, Term, add, subtract
from onnx_attnfuse.fusion.shared_cache.sites import CachedSite, Filled, padding_input
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given, is_standard, needed
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import is_fed
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.targets import group_query_attention as target
from onnx_attnfuse.targets.base import BuildContext

_OPERATORS = "ScatterND", "ScatterElements", "TensorScatter"


@dataclasses.dataclass(frozen=True)
class Write:
    """New entries that take the place of some of a buffer."""

    node: ir.Node
    axis: int
    """The axis of positions in the buffer, the new entries and the result alike."""
    position: ir.Value
    """The input of the model that says where the first of the new entries goes, (), (1) or (s)."""

    @property
    def buffer(self) -> ir.Value:
        """The buffer that a write goes into."""
        return needed(self.node, 0)

    @property
    def new(self) -> ir.Value:
        """The new keys or values that are written."""
        return needed(self.node, 1 if self.node.op_type == "TensorScatter" else 2)

    @property
    def written(self) -> ir.Value:
        """The buffer afterwards."""
        return self.node.outputs[0]


def writer(value: ir.Value) -> ir.Node | None:
    """The node that gives a value by writing into another one; None where none does."""
    node = value.producer()
    return node if is_standard(node, *_OPERATORS) else None


def written_at(node: ir.Node) -> ir.Value | None:
    """The indices at which a node writes into another value; None where it does not."""
    if not is_standard(node, *_OPERATORS):
        return None
    return given(node, 2 if node.op_type == "TensorScatter" else 1)


def read_write(node: ir.Node, reader: Reader) -> Write | str:
    """A node that writes new entries one after the other, or why it is not known to do so.

        write = read_write(value, reader)   # present[..., position + i, :] = new[..., i, :]

    Whatever the operator, the positions are read as a formula: entry i of the new ones goes to `position + i`, and everything
    along the other axes goes where it is.

    Args:
        node: The node that `writer` has found.
        reader: Reads the indices that it writes at.
    """
    buffer, new = (reader.facts.dims(value) for value in (node.inputs[0], node.inputs[-1]))
    if node.op_type == "TensorScatter":
        new = reader.facts.dims(node.inputs[1])
    if buffer is None or new is None or len(buffer) != len(new):
        return "the written part of the buffer is unknown"
    if attribute(node, "reduction", "none") != "none" or attribute(node, "mode", "linear") != "linear":
        return "new entries are combined with those that are there, or go round"
    where = [ZERO if dim == 1 else index(Factor(dim)) for dim in new]
    forms = scattered_to(node, where, reader)
    moved = [axis for axis, form in enumerate(forms) if form is not where[axis]]
    if len(moved) != 1 or any(
        one != other for axis, (one, other) in enumerate(zip(buffer, new, strict=True)) if axis != moved[0]
    ):
        return "it is not known that new entries are written whole, along one axis of the buffer"
    (axis,) = moved
    position = _position(forms[axis], where[axis])
    return Write(node, axis, position) if position is not None else "new entries do not go to a position that an input says"


def counted(position: ir.Value, place: Term) -> tuple[Term, ...]:
    """The forms of `position + place`, where an input says the position, or that of every place."""
    rank = None if position.shape is None else len(position.shape)
    if rank == 0:
        return (add(place, element_of(position, (), position.dtype)),)
    return tuple(add(rest, element_of(position, (at,), position.dtype)) for rest, at in ((place, ZERO), (ZERO, place)))


def _position(form: Term, place: Term) -> ir.Value | None:
    """The input that a form is counted from."""
    inputs = list(map(value_of, elements_of(form)))
    if len(inputs) != 1 or not is_fed(inputs[0]) or inputs[0].shape is None:
        return None
    return inputs[0] if len(inputs[0].shape) < 2 and form in counted(inputs[0], place) else None


def is_static(spec: AttentionSpec, facts: Facts) -> bool:
    """Whether keys or values are an input or an output of the model that something was written into."""
    return spec.cache is None and any(_is_written(operand[-1].indexed, facts) for operand in (spec.key, spec.value))


def _is_written(indexed: IndexedValue, facts: Facts) -> bool:
    node = writer(indexed.value)
    if node is None or node.inputs[0] is None:
        return False
    *_, above = views_above(IndexedValue(node.inputs[0], indexed.axes), facts)
    return above.value.is_graph_input() or any(item.value.is_graph_output() for item in views_below(indexed, facts))


def read_static(node: ir.Node, spec: AttentionSpec, meaning: Meaning, context: BuildContext) -> CachedSite:
    """An attention over a buffer that new keys and values are written into, as a site that shares a buffer.

    Args:
        node: The Softmax or attention node that it is found at.
        spec: The attention.
        meaning: The meaning of its mask.
        context: The reader.

    Raises:
        Refused: It cannot be shown to see the keys up to its own position only, or the operator cannot compute it.
    """
    reader, facts = context.reader, context.builder.facts
    writes = tuple(_write(operand[-1], spec, reader) for operand in (spec.key, spec.value))
    key, value = writes
    if key.position is not value.position:
        raise Refused("cache-kept", "keys and values are written at positions that two inputs say", spec.name)
    _check_factors(spec)
    if meaning.biases:
        raise Refused("mask-form", "a bias over keys in a buffer of a fixed length is not read", spec.name)
    _check_position(key.position, spec, facts)
    earlier = sizes.symbol(f"{key.position.name}.first")
    predicates = _grown(spec, meaning, key.position, earlier)
    mask = padding_input(spec, dataclasses.replace(meaning, predicates=tuple(predicates)), facts)
    predicates = [item for item in predicates if not _is_length(item, mask, spec, facts)]
    past_axis, new_axis = (Factor(earlier),), spec.axes.i
    new_axis = () if length(new_axis) == 1 else (Factor(length(new_axis)),)
    key_axis = (Factor(earlier + length(spec.axes.i)),)
    pairs = [
        _indexed(write, operand[-1], past_axis, new_axis, key_axis, facts)
        for write, operand in zip(writes, (spec.key, spec.value), strict=True)
    ]
    channels = spec.head_axis, ()
    new = [
        new_sources(fresh, operand[-1].factor, axis, facts)
        for (_, fresh, _), operand, axis in zip(pairs, (spec.key, spec.value), channels, strict=True)
    ]
    (past_key, _, present_key), (past_value, _, present_value) = pairs
    cache = Cache((past_key, past_value), (new[0], new[1]), (present_key, present_value), past_axis, new_axis)
    grown = dataclasses.replace(spec, cache=cache, key_axis=key_axis, mask=())
    if mask is not None:
        seen = truth(element_of(mask, (position(grown.axes.b), position(key_axis)), facts.dtype(mask)))
        predicates = [Padding(seen) if isinstance(item, Padding) else item for item in predicates]
    meaning = dataclasses.replace(meaning, predicates=tuple(predicates), kind=" + ".join(kinds(predicates, grown)))
    if (reason := target.refuse(grown, meaning, context)) is not None:
        raise Refused(reason.code, reason.message, reason.node)
    window = target.window_of(grown, meaning)
    filled = Filled(key.position, length(spec.key_axis), (key.written, value.written))
    return CachedSite(node, grown, meaning, mask, None if window == -1 else window, filled)


def _write(source: Source, spec: AttentionSpec, reader: Reader) -> Write:
    """How keys or values were written into their buffer.

    Raises:
        Refused: It cannot be read, or not along the keys.
    """
    node = writer(source.indexed.value)
    if node is None:
        raise Refused("cache-kept", "only one of keys and values is a buffer", spec.name)
    found = read_write(node, reader)
    if isinstance(found, str):
        raise Refused("cache-kept", f"{found}, in '{node.name}'", spec.name)
    along = leaves(source.indexed.axes[found.axis]) == leaves(spec.key_axis) and not is_short(source.indexed, reader.facts)
    if source.rotary is not None or not along:
        raise Refused("cache-kept", f"what '{node.name}' writes into is not the keys or values position by position", spec.name)
    dims = reader.facts.dims(found.new)
    if dims is None or dims[found.axis] != length(spec.axes.i):
        raise Refused("cache-kept", f"'{node.name}' does not write one position for each row", spec.name)
    return found


def _check_factors(spec: AttentionSpec) -> None:
    """Checks that factors that are computed at run time do not differ by key.

    Raises:
        Refused: One does.
    """
    factors = [
        leaf for scale in (*spec.scale_values, *spec.result_scales) for axis in scale.indexed.axes for leaf in leaves(axis)
    ]
    if set(factors) & set(leaves(spec.key_axis)):
        raise Refused("cache-kept", "the scores are scaled by a factor that differs by key", spec.name)


def _check_position(value: ir.Value, spec: AttentionSpec, facts: Facts) -> None:
    """Checks that an input says one position, or one for each row.

    Raises:
        Refused: It does not.
    """
    dims = facts.dims(value)
    if dims is None or dims not in {(), (1,), (length(spec.axes.i),)}:
        raise Refused(
            "cache-kept", f"'{value.name}', which says where new keys go, is not known to be one for each row", spec.name
        )


def _grown(spec: AttentionSpec, meaning: Meaning, start: ir.Value, earlier: Dim) -> list[Predicate]:
    """A mask as it is where the position is the number of earlier keys.

    Raises:
        Refused: It does not say that no row sees beyond its own position.
    """
    column = position(spec.key_axis)
    heres = counted(start, position(spec.query_axis))
    found = [_one_grown(item, column, heres, earlier) for item in meaning.predicates]
    if spec.causal or not any(isinstance(item, Causal) for item in found):
        message = "the mask is not known to hide later keys in their buffer, as one computed from"
        raise Refused("cache-kept", f"{message} '{start.name}' and a mask (b, positions) does", spec.name)
    return found


def _one_grown(item: Predicate, column: Term, heres: tuple[Term, ...], earlier: Dim) -> Predicate:
    if not isinstance(item, Other) or item.predicate.op != "le0":
        return item
    form = item.predicate.args[0]
    for here in heres:
        if subtract(column, here) is form:
            return Causal(earlier)
        ahead = subtract(subtract(here, column), form)
        if is_measure(ahead):
            return Window(dim_of(ahead) - earlier)
    return item


def _is_length(item: Predicate, mask: ir.Value | None, spec: AttentionSpec, facts: Facts) -> bool:
    """Whether a predicate says that a key has a place in the mask, which is as long as all positions so far."""
    dims = facts.dims(mask)
    if dims is None or not isinstance(item, (Other, Causal)):
        return False
    last = subtract(add(position(spec.key_axis), ONE), size(dims[1]))
    return isinstance(item, Other) and item.predicate is arithmetic.at_most_zero(last)


def _indexed(
    write: Write, source: Source, past_axis: Axis, new_axis: Axis, key_axis: Axis, facts: Facts
) -> tuple[IndexedValue, IndexedValue, IndexedValue]:
    """The earlier entries, the new ones and both, each with its axes; the first and the last as the model takes and gives them.

    Raises:
        Refused: They are no input or no output.
    """
    axes = source.indexed.axes
    *_, past = views_above(IndexedValue(write.buffer, replaced(axes, write.axis, past_axis)), facts)
    if not is_fed(past.value):
        raise Refused(
            "cache-kept", f"the buffer '{past.value.name}' is no input of the model; export it with its cache as inputs"
        )
    views = views_below(IndexedValue(write.written, replaced(axes, write.axis, key_axis)), facts)
    present = next((item for item in views if item.value.is_graph_output()), None)
    if present is None:
        message = f"the buffer that '{write.node.name}' writes is no output of the model; export it with its cache as outputs"
        raise Refused("cache-kept", message)
    new = IndexedValue(write.new, replaced(axes, write.axis, new_axis))
    return past, new, present
