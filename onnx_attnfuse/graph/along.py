"""The axes that operators go along: at each index of them they do the same, with nothing but that index of their inputs.

    along(node, facts)          # {0: (0, 1, None), 1: (None, 1, None)}: of what is at index i, along axes 0 and 1
    again(node, operands, ...)  # the operator once more, with such axes as one in front

Callers take indices apart or put them in another order: tokens of a batch that are packed, sorted or of many requests, and turns
of a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, attributes, given, has_unknown_attribute, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, CONTRIB, ELEMENTWISE, REARRANGES, REDUCTIONS, REPEATS, read_as
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds, softmax_axis
from onnx_attnfuse.graph.schemas import schema_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import producer_of

Marks: TypeAlias = tuple[str, ...]
"""For each axis of a value the letters of those that are marked, or nothing."""
Along: TypeAlias = tuple[int | None, ...]
"""For each axis of an input, counted from the last, the axis of the outputs that goes along with it; None: none does."""
_Item = TypeVar("_Item")
_MATRIX = 2
"""The axes of a matrix."""


def others(marks: Marks, items: Sequence[_Item]) -> tuple[_Item, ...]:
    """The items, one for each axis, that belong to axes without a mark."""
    return tuple(item for mark, item in zip(marks, items, strict=True) if not mark)


_Rule = Callable[[ir.Node, int, Facts], "Mapping[int, Along] | str"]
"""Given a node, the rank of its first input, and facts, the axes of the inputs that may consist of tokens; or why none may."""


def _but(rank: int, axes: Collection[int] = ()) -> Along:
    """All axes but some, each as it is."""
    left = {axis % rank for axis in axes} if rank else ()
    return tuple(None if axis in left else axis for axis in range(rank))


def _elementwise(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along]:
    return dict.fromkeys(range(len(node.inputs)), _but(facts.rank(node.outputs[0]) or 0))


def _along_one(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """All axes but the one that is split, joined or summed over."""
    axis: int | None = softmax_axis(node, facts, facts.opset) if "Softmax" in node.op_type else attribute(node, "axis", 0)
    if axis is None:
        return "sums over several axes"
    return dict.fromkeys(range(len(node.inputs) if node.op_type == "Concat" else 1), _but(rank, [axis]))


def _slice(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    bounds = slice_bounds(node, rank, facts)
    if bounds is None or not all(isinstance(end, int) for bound in bounds.values() for end in bound):
        return "takes a part that is not known"
    return {0: _but(rank, bounds)}


def _gather(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """Channels, or rows of a table, chosen by an index."""
    width = facts.rank(given(node, 1))
    if width is None:
        return "chooses by an index of unknown shape"
    axis: int = attribute(node, "axis", 0) % rank
    return {0: (*range(axis), None, *range(axis + width, rank + width - 1)), 1: tuple(range(axis, axis + width))}


def _product(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """All axes but the one that is summed over, and something added."""
    second = given(node, 1)
    other = 0 if second is None else facts.rank(second) or 0
    if min(rank, other) < _MATRIX or any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return "transposes tokens, or is no product of matrices"
    wide = max(rank, other)
    columns = (wide - 1, None) if attribute(node, "transB", 0) else (None, wide - 1)
    return {0: _but(wide, [-1]), 1: (*range(wide - _MATRIX), *columns), 2: _but(wide)}


def _rows(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along]:
    """Rows of the last axis, or sums of two of them, which the fourth output is then."""
    return dict.fromkeys((0,) if node.op_type == "MatMulNBits" else (0, 1), _but(rank, [-1]))


def _normalised(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along]:
    """Axes from one on, times a weight and plus a shift."""
    return {0: _but(rank, range(attribute(node, "axis", -1) % rank, rank)), 1: _but(rank), 2: _but(rank)}


def _reduced(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """Axes that stay with length 1 or go."""
    axes = axes_of(node, 1, rank, facts)
    if not axes:
        return "reduces axes that are not known"
    if attribute(node, "keepdims", 1):
        return {0: _but(rank, axes)}
    return {0: tuple(None if axis in axes else axis - sum(gone < axis for gone in axes) for axis in range(rank))}


def _rotated(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """Rows (b, s, n·h) or (b, n, s, h), each by the row of its position in tables; without positions, by its place."""
    places = given(node, 1)
    if places is None or facts.rank(places) != 2:
        return "counts positions"
    return {0: _but(rank, [-1]), 1: (0, rank - 2)}


def _repeated(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along] | str:
    """All axes but those of which elements are repeated."""
    before, after = facts.dims(given(node, 0)), facts.dims(node.outputs[0])
    if before is None or after is None or len(before) > len(after):
        return "repeats axes that are not known"
    pairs = list(enumerate(zip(before, after[len(after) - rank :], strict=True), len(after) - rank))
    if any(old not in (1, new) and not (isinstance(old, int) and isinstance(new, int)) for _, (old, new) in pairs):
        return "repeats axes of unknown length"
    return {0: tuple(axis if old == new else None for axis, (old, new) in pairs)}


def _view(node: ir.Node, rank: int, facts: Facts) -> Mapping[int, Along]:
    """Axes that are joined, split or moved, which a rule does not say."""
    return {0: (None,) * rank}


def _rules(domain: str, names: Iterable[str], rule: _Rule) -> dict[tuple[str, str], _Rule]:
    return {(domain, name): rule for name in names}


_ELEMENTWISE = (ELEMENTWISE | CASTS).union(
    "Celu Dropout Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Selu Softplus Softsign Swish ThresholdedRelu".split()
)
_RULES: dict[tuple[str, str], _Rule] = {
    **_rules("", _ELEMENTWISE, _elementwise),
    **_rules("", REDUCTIONS, _reduced),
    **_rules("", REARRANGES, _view),
    **_rules("", ["Concat", "LogSoftmax", "Softmax", "Split"], _along_one),
    **_rules("", ["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"], _normalised),
    **_rules("", ["Gemm", "MatMul"], _product),
    **_rules("", ["Gather"], _gather),
    **_rules("", REPEATS, _repeated),
    **_rules("", ["Slice"], _slice),
    **_rules(CONTRIB, ["BiasGelu", "FastGelu", "Gelu", "QuickGelu"], _elementwise),
    **_rules(CONTRIB, ["FusedMatMul"], _product),
    **_rules(CONTRIB, ["MatMulNBits", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"], _rows),
    **_rules(CONTRIB, ["RotaryEmbedding"], _rotated),
}
"""By domain and name; an operator without a rule is taken to mix all axes."""


def along(node: ir.Node, facts: Facts) -> Mapping[int, Along] | str:
    """The axes of a node's inputs, by place, that go along with its outputs; or, in words, why none is known to."""
    rule, first = _RULES.get(read_as(node)), given(node, 0)
    if rule is None or has_unknown_attribute(node) or any(True for _ in subgraphs(node)):
        return "is not known to work along any axis"
    rank = facts.rank(first)
    if rank is None or facts.rank(node.outputs[0]) is None:
        return "has inputs or outputs of unknown shape"
    return rule(node, rank, facts)


def again(
    node: ir.Node,
    operands: Mapping[int, ir.Value],
    builder: Builder,
    marks: Marks,
    results: Sequence[Marks],
    beside: Collection[int] = (),
    hint: str | None = None,
) -> Sequence[ir.Value]:
    """The outputs of a node on operands of which the marked axes have become one in front of the others.

    Args:
        node: The node.
        operands: They take the place of inputs, and go along with the outputs on the marked axes.
        builder: The builder.
        marks: The marks of the first input, if it is one of them.
        results: The marks of the outputs.
        beside: The places of other inputs that broadcast against them.
        hint: The name of the new node.
    """
    facts = builder.facts
    count = dims_of(builder, next(iter(operands.values())))[0]
    dims = [(count, *others(own, facts.dims(old) or ())) for old, own in zip(node.outputs, results, strict=False)]
    inputs = [operands.get(place, value) for place, value in enumerate(node.inputs)]
    kept = attributes(node)
    if node.op_type == "Transpose":
        perm: list[int] = attribute(node, "perm") or [*range(len(marks))][::-1]
        return [builder.transpose(operands[0], [0, *(1 + _before(marks, axis) for axis in perm if not marks[axis])])]
    if node.op_type in REARRANGES:
        return [builder.reshape(operands[0], dims[0])]
    if node.op_type in REDUCTIONS:
        axes, keep = axes_of(node, 1, len(marks), facts) or [], bool(attribute(node, "keepdims", 1))
        return [builder.reduce(node.op_type, operands[0], [1 + _before(marks, axis) for axis in axes], keep=keep)]
    if node.op_type in REPEATS:
        return [_again_repeated(operands[0], dims[0], builder)]
    if node.op_type == "Slice":
        bounds = slice_bounds(node, len(marks), facts) or {}
        taken = [(*bound[:2], 1 + _before(marks, axis), bound[2]) for axis, bound in bounds.items()]
        inputs, kept = [operands[0], *(builder.constant(column) for column in zip(*taken, strict=True))], {}
    elif 0 in operands and (axis := _axis_of(node)) is not None:
        kept["axis"] = _before(marks, axis % len(marks)) - _before(marks, len(marks))
    inputs = [_without_rows(builder, value, results[0]) if place in beside else value for place, value in enumerate(inputs)]
    first = builder.node(node.op_type, inputs, kept, domain=node.domain, hint=hint, outputs=len(results))
    made = producer_of(first)
    made.metadata_props.update(node.metadata_props)
    for old, new, shape in zip(node.outputs, made.outputs, dims, strict=False):
        dtype = facts.dtype(old)
        facts.record(new, shape, dtype)
        if dtype is not None:
            new.dtype = dtype
    return made.outputs


def _again_repeated(value: ir.Value, dims: Sequence[Dim], builder: Builder) -> ir.Value:
    """A value repeated to other lengths, along an axis as often as these tell."""
    count, *rest = dims_of(builder, value)
    own = [count, *[1] * (len(dims) - 1 - len(rest)), *rest]
    value = builder.reshape(value, own)
    differs = [old != new for old, new in zip(own, dims, strict=True)]
    if all(old == 1 for old, is_other in zip(own, differs, strict=True) if is_other):
        return builder.expand(value, dims, differs)
    times = [new // old if isinstance(old, int) and isinstance(new, int) else 1 for old, new in zip(own, dims, strict=True)]
    return builder.node("Tile", [value, builder.constant(times)], dims=dims, dtype=builder.facts.dtype(value))


def _axis_of(node: ir.Node) -> int | None:
    """The axis of the first input that an attribute counts; None where there is none."""
    schema = schema_of(node)
    known = None if schema is None else schema.attributes.get("axis")
    found: int | None = None if known is None else attribute(node, "axis", known.default)
    return found


def _before(marks: Marks, axis: int) -> int:
    """How many axes of channels are before an axis."""
    return sum(not mark for mark in marks[:axis])


def _without_rows(builder: Builder, value: ir.Value | None, marks: Marks) -> ir.Value | None:
    """An operand that is the same along the marked axes, so that it broadcasts against one without them."""
    dims = () if value is None else dims_of(builder, value)
    last = max(axis for axis, mark in enumerate(marks) if mark)
    if value is None or len(dims) < len(marks) - last:
        return value
    return builder.reshape(value, others(marks, (1,) * (len(marks) - len(dims)) + tuple(dims)))
