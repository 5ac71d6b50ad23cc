"""Token-wise operators, which compute every token by itself, and how each runs on packed tokens.

A rule says of an operator which axes of its inputs go along with which of its outputs: at each index along them it does the same,
with nothing but that index of these inputs. `read_step` asks it whether the axes of tokens are among those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.attention.match.softmax import softmax_axis
from onnx_attnfuse.fusion.packing.tokens import Marks, Tokens, count_of, others, through
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, given, has_unknown_attribute, subgraphs
from onnx_attnfuse.graph.ops import CONTRIB, REARRANGES, REDUCTIONS, read_as
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds
from onnx_attnfuse.graph.schemas import schema_of
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Reason

Along: TypeAlias = tuple[int | None, ...]
"""For each axis of an input, counted from the last, the axis of the outputs that goes along with it; None: none does."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node that computes every token by itself."""

    node: ir.Node
    marks: Mapping[int, Marks]
    """The inputs of the node that consist of tokens, by place, and their marks."""
    outputs: tuple[Marks, ...]
    """The marks of its outputs."""
    beside: Collection[int] = ()
    """The places of other inputs that broadcast against tokens."""

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The inputs that consist of tokens."""
        found = [(self.node.inputs[place], marks) for place, marks in self.marks.items()]
        return [(value, marks) for value, marks in found if value is not None]

    def free(self) -> list[ir.Value]:
        """The inputs that are the same for all tokens."""
        return [value for place, value in enumerate(self.node.inputs) if value is not None and place not in self.marks]

    def on_packed(self, builder: Builder, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The outputs for packed tokens, which take the place of `inputs`."""
        node, packed, facts = self.node, dict(zip(self.marks, operands, strict=True)), builder.facts
        marks, count = self.marks.get(0, ()), count_of(operands[0], facts)
        dims = [(count, *others(own, facts.dims(old) or ())) for old, own in zip(node.outputs, self.outputs, strict=False)]
        inputs = [packed.get(place, value) for place, value in enumerate(node.inputs)]
        attributes = {name: item.value for name, item in node.attributes.items()}
        if node.op_type == "Transpose":
            perm: list[int] = attribute(node, "perm") or [*range(len(marks))][::-1]
            return [builder.transpose(packed[0], [0, *(1 + _before(marks, axis) for axis in perm if not marks[axis])])]
        if node.op_type in REARRANGES:
            return [builder.reshape(packed[0], dims[0])]
        if node.op_type in REDUCTIONS:
            axes, keep = axes_of(node, 1, len(marks), facts) or [], bool(attribute(node, "keepdims", 1))
            return [builder.reduce(node.op_type, packed[0], [1 + _before(marks, axis) for axis in axes], keep=keep)]
        if node.op_type == "Slice":
            bounds = slice_bounds(node, len(marks), facts) or {}
            taken = [(*bound[:2], 1 + _before(marks, axis), bound[2]) for axis, bound in bounds.items()]
            inputs = [packed[0], *(builder.constant(column) for column in zip(*taken, strict=True))]
            attributes = {}
        elif 0 in packed and (axis := _axis_of(node)) is not None:
            attributes["axis"] = _before(marks, axis % len(marks)) - _before(marks, len(marks))
        inputs = [
            _without_tokens(builder, value, self.outputs[0]) if place in self.beside else value
            for place, value in enumerate(inputs)
        ]
        hint = f"{node.name or node.op_type}/packed"
        first = builder.node(node.op_type, inputs, attributes, domain=node.domain, hint=hint, outputs=len(self.outputs))
        made = producer_of(first)
        made.metadata_props.update(node.metadata_props)
        for old, new, shape in zip(node.outputs, made.outputs, dims, strict=False):
            dtype = facts.dtype(old)
            facts.record(new, shape, dtype)
            if dtype is not None:
                new.dtype = dtype
        return made.outputs


def _axis_of(node: ir.Node) -> int | None:
    """The axis of the first input that an attribute counts; None where there is none."""
    schema = schema_of(node)
    known = None if schema is None else schema.attributes.get("axis")
    found: int | None = None if known is None else attribute(node, "axis", known.default)
    return found


def _before(marks: Marks, axis: int) -> int:
    """How many axes of channels are before an axis."""
    return sum(not mark for mark in marks[:axis])


def _without_tokens(builder: Builder, value: ir.Value | None, marks: Marks) -> ir.Value | None:
    """An operand that is the same for all tokens, so that it broadcasts against packed ones."""
    dims = () if value is None else dims_of(builder, value)
    last = max(axis for axis, mark in enumerate(marks) if mark)
    if value is None or len(dims) < len(marks) - last:
        return value
    return builder.reshape(value, others(marks, (1,) * (len(marks) - len(dims)) + tuple(dims)))


Rule = Callable[[ir.Node, int, Tokens], "Mapping[int, Along] | str"]
"""Given a node and the rank of its first input, the axes of the inputs that may consist of tokens; or why none may."""


def _but(rank: int, axes: Collection[int] = ()) -> Along:
    """All axes but some, each as it is."""
    left = {axis % rank for axis in axes} if rank else ()
    return tuple(None if axis in left else axis for axis in range(rank))


def _elementwise(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along]:
    return dict.fromkeys(range(len(node.inputs)), _but(tokens.facts.rank(node.outputs[0]) or 0))


def _along_one(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    """All axes but the one that is split, joined or summed over."""
    axis: int | None = softmax_axis(node, tokens.facts, tokens.opset) if "Softmax" in node.op_type else attribute(node, "axis", 0)
    if axis is None:
        return "sums over several axes"
    return dict.fromkeys(range(len(node.inputs) if node.op_type == "Concat" else 1), _but(rank, [axis]))


def _slice(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    bounds = slice_bounds(node, rank, tokens.facts)
    if bounds is None or not all(isinstance(end, int) for bound in bounds.values() for end in bound):
        return "takes a part that is not known"
    return {0: _but(rank, bounds)}


def _gather(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    """Channels, or rows of a table, chosen by an index."""
    index = given(node, 1)
    width = None if index is None else tokens.facts.rank(index)
    if width is None:
        return "chooses by an index of unknown shape"
    axis: int = attribute(node, "axis", 0) % rank
    return {0: (*range(axis), None, *range(axis + width, rank + width - 1)), 1: tuple(range(axis, axis + width))}


def _product(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    """Channels times a matrix, and something added."""
    second = given(node, 1)
    if second is None or tokens.facts.rank(second) != 2:
        return "is no product of channels with a matrix"
    if any(attribute(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return "transposes tokens"
    return {0: _but(rank, [-1]), 2: _but(rank)}


def _rows(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along]:
    """Rows of the last axis, or sums of two of them, which the fourth output is then."""
    return dict.fromkeys((0,) if node.op_type == "MatMulNBits" else (0, 1), _but(rank, [-1]))


def _normalised(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along]:
    """Axes from one on, times a weight and plus a shift."""
    return {0: _but(rank, range(attribute(node, "axis", -1) % rank, rank)), 1: _but(rank), 2: _but(rank)}


def _reduced(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    """Axes that stay with length 1 or go."""
    axes = axes_of(node, 1, rank, tokens.facts)
    if not axes:
        return "reduces axes that are not known"
    if attribute(node, "keepdims", 1):
        return {0: _but(rank, axes)}
    return {0: tuple(None if axis in axes else axis - sum(gone < axis for gone in axes) for axis in range(rank))}


def _rotated(node: ir.Node, rank: int, tokens: Tokens) -> Mapping[int, Along] | str:
    """Rows (b, s, n·h) or (b, n, s, h), each by the row of its position in tables; without positions, by its place."""
    places = given(node, 1)
    if places is None or tokens.facts.rank(places) != 2:
        return "counts positions"
    return {0: _but(rank, [-1]), 1: (0, rank - 2)}


def _rules(domain: str, names: str, rule: Rule) -> dict[tuple[str, str], Rule]:
    return {(domain, name): rule for name in names.split()}


_ELEMENTWISE = """
    Abs Add And Cast Ceil Celu Clip Cos Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish
    IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid
    Sign Sin Softplus Softsign Sqrt Sub Sum Swish Tanh ThresholdedRelu Where Xor
"""
RULES: dict[tuple[str, str], Rule] = {
    **_rules("", _ELEMENTWISE, _elementwise),
    **_rules(CONTRIB, "BiasGelu FastGelu Gelu QuickGelu", _elementwise),
    **_rules("", "Gemm MatMul", _product),
    **_rules(CONTRIB, "FusedMatMul", _product),
    **_rules("", "LayerNormalization RMSNormalization SimplifiedLayerNormalization", _normalised),
    **_rules(CONTRIB, "MatMulNBits SkipLayerNormalization SkipSimplifiedLayerNormalization", _rows),
    **_rules("", "Concat LogSoftmax Softmax Split", _along_one),
    **_rules("", " ".join(REDUCTIONS), _reduced),
    **_rules(CONTRIB, "RotaryEmbedding", _rotated),
    ("", "Gather"): _gather,
    ("", "Slice"): _slice,
}
"""By domain and name; an operator without a rule, but for views, is taken to mix positions."""
_LOOKS_UP = frozenset(["Gather", "RotaryEmbedding"])
"""Operators of which the second input is the place of a row."""


def read_step(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens, *, looks_up: bool = False) -> Step | Reason:
    """The step of a node that computes every token by itself, or the reason why it may not.

    Args:
        node: The node.
        value: A value of the node, its output or an input.
        marks: The marks of that value.
        tokens: The sizes of the batch.
        looks_up: Whether tokens may also be numbers of rows of tables.
    """
    read = _read(node, value, marks, tokens)
    if not isinstance(read, str):
        read = _checked(node, *read, tokens)
    if not isinstance(read, str) and value in read.free():
        read = "has tokens as something that is the same for all"
    if not isinstance(read, str) and not looks_up and 1 in read.marks and node.op_type in _LOOKS_UP:
        read = "chooses by an index that is not constant"
    return Reason("not-position-wise", f"{node.op_type} {read}", node.name) if isinstance(read, str) else read


def _read(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> tuple[Mapping[int, Marks], Marks] | str:
    """The marks of inputs and outputs by those of one value, or why there are none."""
    rule, first = RULES.get(read_as(node)), given(node, 0)
    is_view = read_as(node)[0] == "" and node.op_type in REARRANGES
    if not (rule or is_view) or has_unknown_attribute(node) or any(True for _ in subgraphs(node)):
        return "is not known to work token by token"
    if rule is None:
        other = through(node, value, marks, tokens)
        if other is None:
            return "mixes tokens with channels"
        return ({0: other}, marks) if value in node.outputs else ({0: marks}, other)
    rank, width = None if first is None else tokens.facts.rank(first), tokens.facts.rank(node.outputs[0])
    if rank is None or width is None:
        return "has inputs or outputs of unknown shape"
    along = rule(node, rank, tokens)
    if isinstance(along, str):
        return along
    if value in node.outputs:
        after = marks
    else:
        after = next((_beyond(axes, marks, width) for at, axes in along.items() if given(node, at) is value), None)
    if after is None or len(after) != width:
        return "does not keep positions apart"
    return {at: tuple("" if axis is None else after[axis] for axis in axes) for at, axes in along.items()}, after


def _checked(node: ir.Node, before: Mapping[int, Marks], after: Marks, tokens: Tokens) -> Step | str:
    """The step of a node, or why inputs and outputs are not what their marks say."""
    found, beside = dict[int, Marks](), list[int]()
    for place, marks in before.items():
        if (item := given(node, place)) is None:
            continue
        if not tokens.fits(item, marks):
            return f"combines tokens with '{item.name}', which has another shape"
        if any(mark and dim != 1 for mark, dim in zip(reversed(marks), reversed(tokens.facts.dims(item) or ()), strict=False)):
            found[place] = marks
        else:
            beside.append(place)
    is_used = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    count = len(node.outputs) if is_used or node.op_type == "Split" else 1
    if not found or not all(map(_is_whole, (after, *found.values()))):
        return "does not keep positions apart"
    if not all(tokens.is_full(output, after) for output in node.outputs[:count]):
        return "has outputs of another shape"
    return Step(node, found, (after,) * count, beside)


def _is_whole(marks: Marks) -> bool:
    return sorted("".join(marks)) == ["b", "s"]


def _beyond(along: Along, marks: Marks, rank: int) -> Marks | None:
    """The marks of the outputs, by those of an input; None if positions do not go along."""
    after = [""] * rank
    for axis, mark in zip(reversed((*[None] * len(marks), *along)), reversed(marks), strict=False):
        if mark and axis is None:
            return None
        if mark and axis is not None:
            after[axis] = mark
    return tuple(after)
