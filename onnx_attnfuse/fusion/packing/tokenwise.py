"""Token-wise operators, which compute every token by itself, and how each runs on packed tokens.

A rule is one function that gives a `Step` for a node or says why not; `read_step` asks the rule of an operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.softmax import softmax_axis
from onnx_attnfuse.fusion.packing.tokens import Marks, Tokens, count_of, others, through
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, constant_array, given, has_unknown_attribute, is_standard, subgraphs
from onnx_attnfuse.graph.ops import CONTRIB, read_as
from onnx_attnfuse.graph.rules.reading import axes_of, slice_bounds
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Reason

Build = Callable[[Builder, Mapping[int, ir.Value]], Sequence[ir.Value]]
"""Given the replacement of each input that consists of tokens, the node's outputs for these."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A node that computes every token by itself."""

    node: ir.Node
    marks: Mapping[int, Marks]
    """The inputs of the node that consist of tokens, by place, and their marks."""
    outputs: tuple[Marks, ...]
    """The marks of its outputs."""
    changed: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """The attributes that count axes, and so differ on packed tokens; None for one that is left out."""
    build: Build | None = None
    """Builds the outputs where that is no copy of the node."""

    def inputs(self) -> list[tuple[ir.Value, Marks]]:
        """The inputs that consist of tokens."""
        found = [(self.node.inputs[place], marks) for place, marks in self.marks.items()]
        return [(value, marks) for value, marks in found if value is not None]

    def free(self) -> list[ir.Value]:
        """The inputs that are the same for all tokens."""
        return [value for place, value in enumerate(self.node.inputs) if value is not None and place not in self.marks]

    def on_packed(self, builder: Builder, operands: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """The outputs for packed tokens, which take the place of `inputs`."""
        packed = dict(zip(self.marks, operands, strict=True))
        if self.build is not None:
            return self.build(builder, packed)
        return self.copied(builder, [packed.get(place, value) for place, value in enumerate(self.node.inputs)])

    def copied(self, builder: Builder, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        """The outputs of the operator on other inputs."""
        node, facts = self.node, builder.facts
        count = count_of(next(value for place, value in enumerate(inputs) if value is not None and place in self.marks), facts)
        attributes = {name: item.value for name, item in node.attributes.items()} | dict(self.changed)
        attributes = {name: item for name, item in attributes.items() if item is not None}
        hint = f"{node.name or node.op_type}/packed"
        first = builder.node(node.op_type, inputs, attributes, domain=node.domain, hint=hint, outputs=len(self.outputs))
        made = producer_of(first)
        made.metadata_props.update(node.metadata_props)
        for old, new, marks in zip(node.outputs, made.outputs, self.outputs, strict=False):
            dtype = facts.dtype(old)
            facts.record(new, (count, *others(marks, facts.dims(old) or ())), dtype)
            if dtype is not None:
                new.dtype = dtype
        return made.outputs


Rule = Callable[[ir.Node, ir.Value, Marks, Tokens], "Step | Reason"]


def refusal(node: ir.Node, why: str) -> Reason:
    """Why a node stays as it is."""
    return Reason("not-position-wise", f"{node.op_type} {why}", node.name)


def packed_axis(marks: Marks, axis: int) -> int | None:
    """Where an axis of channels lies in packed form; None for one of tokens."""
    axis %= len(marks)
    return None if marks[axis] else 1 + sum(not mark for mark in marks[:axis])


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An attribute that is a number."""
    found: int = attribute(node, name, default)
    return found


def _view(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """The step of an operator that regroups or permutes axes, those of tokens staying together."""
    first, output = node.inputs[0], node.outputs[0]
    other = through(node, value, marks, tokens)
    dims = tokens.facts.dims(output)
    if first is None or other is None or dims is None:
        return refusal(node, "mixes tokens with channels")
    before, after = (marks, other) if value is first else (other, marks)
    if not tokens.is_full(first, before) or not tokens.is_full(output, after):
        return refusal(node, "mixes tokens with channels")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        if node.op_type == "Transpose":
            perm: list[int] = attribute(node, "perm") or [*range(len(before))][::-1]
            places = [packed_axis(before, axis) for axis in perm]
            return [builder.transpose(packed[0], [0, *(place for place in places if place is not None)])]
        return [builder.reshape(packed[0], (count_of(packed[0], builder.facts), *others(after, dims)))]

    return Step(node, {0: before}, (after,), build=build)


def _split(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    axis = packed_axis(marks, int_attribute(node, "axis", 0))
    first = node.inputs[0]
    if axis is None or first is None or not tokens.is_full(first, marks):
        return refusal(node, "splits positions")
    return Step(node, {0: marks}, (marks,) * len(node.outputs), {"axis": axis})


def _concat(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    axis = packed_axis(marks, int_attribute(node, "axis", 0))
    if axis is None or not all(item is not None and tokens.is_full(item, marks) for item in node.inputs):
        return refusal(node, "joins positions, or tokens with something else")
    return Step(node, dict.fromkeys(range(len(node.inputs)), marks), (marks,), {"axis": axis})


def _slice(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    first = node.inputs[0]
    bounds = slice_bounds(node, len(marks), tokens.facts)
    if bounds is None or first is None or not tokens.is_full(first, marks):
        return refusal(node, "takes a part that is not known")
    taken = [(packed_axis(marks, axis), *bound) for axis, bound in bounds.items()]
    parts = [
        [axis, start, end, step]
        for axis, start, end, step in taken
        if axis is not None and isinstance(start, int) and isinstance(end, int)
    ]
    if len(parts) < len(taken):
        return refusal(node, "takes some of the positions")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        axes, starts, ends, steps = (builder.constant([int(item) for item in column]) for column in zip(*parts, strict=True))
        return step.copied(builder, [packed[0], starts, ends, axes, steps])

    step = Step(node, {0: marks}, (marks,), dict.fromkeys(("axes", "starts", "ends")), build)
    return step


def _gather(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Channels chosen by constants."""
    first, index = node.inputs[0], constant_array(node.inputs[1])
    rank = None if first is None else tokens.facts.rank(first)
    if first is None or rank is None or index is None:
        return refusal(node, "chooses by an index that is not constant")
    axis = int_attribute(node, "axis", 0) % rank
    own = marks if value is first else (*marks[:axis], "", *marks[axis + index.ndim :])
    place = packed_axis(own, axis)
    if len(own) != rank or place is None or not tokens.is_full(first, own):
        return refusal(node, "chooses positions")
    after = (*own[:axis], *("",) * index.ndim, *own[axis + 1 :])
    return Step(node, {0: own}, (after,), {"axis": place})


def read_embedding(node: ir.Node, marks: Marks, tokens: Tokens) -> Step | None:
    """The step of a Gather of rows from a table that is the same for all tokens; None of any other node."""
    table, index = given(node, 0), given(node, 1)
    if table is None or index is None or not is_standard(node, "Gather") or attribute(node, "axis", 0) != 0:
        return None
    rank, width = tokens.facts.rank(index), tokens.facts.rank(table)
    if rank is None or width is None or any(marks[rank:]) or width + rank - 1 != len(marks):
        return None
    return Step(node, {1: marks[:rank]}, (marks,)) if tokens.is_full(index, marks[:rank]) else None


def _elementwise(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Operands that are the same for all tokens, or that consist of tokens in the same layout."""
    found: dict[int, Marks] = {}
    for place, item in enumerate(node.inputs):
        if item is None:
            continue
        if not tokens.fits(item, marks):
            return refusal(node, f"combines tokens with '{item.name}', which has another shape")
        dims = tokens.facts.dims(item) or ()
        if any(mark and dim != 1 for mark, dim in zip(marks[len(marks) - len(dims) :], dims, strict=True)):
            found[place] = marks
    if not found:
        return refusal(node, "has no operand that consists of tokens")

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        inputs = [
            packed[place] if place in packed else None if item is None else _without_tokens(builder, item, marks)
            for place, item in enumerate(node.inputs)
        ]
        return step.copied(builder, inputs)

    step = Step(node, found, (marks,), build=build)
    return step


def _without_tokens(builder: Builder, value: ir.Value, marks: Marks) -> ir.Value:
    """An operand that is the same for all tokens, so that it broadcasts against packed ones."""
    dims = dims_of(builder, value)
    last = max(axis for axis, mark in enumerate(marks) if mark)
    if len(dims) < len(marks) - last:
        return value
    return builder.reshape(value, others(marks, (1,) * (len(marks) - len(dims)) + tuple(dims)))


def _product(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Channels times a matrix."""
    dims = [None if item is None else tokens.facts.dims(item) for item in node.inputs[:2]]
    if marks[-1] or dims[0] is None or dims[1] is None or len(dims[0]) != len(marks) or len(dims[1]) != 2:
        return refusal(node, "is no product of channels with a matrix")
    if attribute(node, "transA", 0) or attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        return refusal(node, "transposes tokens")
    return _first_only(node, value, marks, tokens)


def _gemm(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    added = node.inputs[2] if len(node.inputs) > 2 else None
    dims = () if added is None else tokens.facts.dims(added)
    if dims is None or (len(dims) == 2 and dims[0] != 1):
        return refusal(node, "adds something else to every token")
    return _product(node, value, marks, tokens)


def _first_only(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """The first input consists of tokens, the others are the same for all; the last axis is the only one that counts."""
    first = node.inputs[0]
    if marks[-1] or first is None or not tokens.is_full(first, marks):
        return refusal(node, "does not have tokens first and channels last")
    return Step(node, {0: marks}, (marks,))


def _normalised(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Axes from one on are normalised, which must all be channels."""
    axis = int_attribute(node, "axis", -1) % len(marks)
    if any(marks[axis:]):
        return refusal(node, "normalises over positions")
    step = _first_only(node, value, marks, tokens)
    return step if isinstance(step, Reason) else dataclasses.replace(step, changed={"axis": axis - len(marks)})


def _skip_normalised(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """The sum of two inputs normalised; the fourth output is the sum."""
    full = all(item is not None and tokens.is_full(item, marks) for item in node.inputs[:2])
    if marks[-1] or not full:
        return refusal(node, "adds something else to every token")
    return Step(node, {0: marks, 1: marks}, (marks,) * len(node.outputs))


def _softmax(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    own, first = softmax_axis(node, tokens.facts, tokens.opset), node.inputs[0]
    axis = None if own is None else packed_axis(marks, own)
    if axis is None or first is None or not tokens.is_full(first, marks):
        return refusal(node, "sums over positions")
    return Step(node, {0: marks}, (marks,), {"axis": axis})


def _reduced(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """Channels reduced, of which the axes stay with length 1 or go."""
    first = node.inputs[0]
    rank = None if first is None else tokens.facts.rank(first)
    axes = None if rank is None else axes_of(node, 1, rank, tokens.facts)
    if first is None or rank is None or not axes:
        return refusal(node, "reduces axes that are not known")
    keep = bool(int_attribute(node, "keepdims", 1))
    own = marks if value is first or keep else _inserted(marks, axes)
    if len(own) != rank or any(own[axis] for axis in axes) or not tokens.is_full(first, own):
        return refusal(node, "reduces over positions")
    after = own if keep else tuple(mark for axis, mark in enumerate(own) if axis not in axes)

    def build(builder: Builder, packed: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        places = [place for axis in axes if (place := packed_axis(own, axis)) is not None]
        return [builder.reduce(node.op_type, packed[0], places, keep=keep)]

    return Step(node, {0: own}, (after,), build=build)


def _inserted(marks: Marks, axes: Sequence[int]) -> Marks:
    kept = iter(marks)
    return tuple("" if axis in axes else next(kept) for axis in range(len(marks) + len(axes)))


def _rules(domain: str, names: str, rule: Rule) -> dict[tuple[str, str], Rule]:
    return {(domain, name): rule for name in names.split()}


_ELEMENTWISE = """
    Abs Add And Cast Ceil Celu Clip Cos Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish
    IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Sigmoid
    Sign Sin Softplus Softsign Sqrt Sub Sum Swish Tanh ThresholdedRelu Where Xor
"""
_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
RULES: dict[tuple[str, str], Rule] = {
    **_rules("", _ELEMENTWISE, _elementwise),
    **_rules(CONTRIB, "BiasGelu FastGelu Gelu QuickGelu", _elementwise),
    **_rules("", "MatMul", _product),
    **_rules(CONTRIB, "FusedMatMul", _product),
    **_rules(CONTRIB, "MatMulNBits", _first_only),
    **_rules("", "Gemm", _gemm),
    **_rules("", "LayerNormalization RMSNormalization SimplifiedLayerNormalization", _normalised),
    **_rules(CONTRIB, "SkipLayerNormalization SkipSimplifiedLayerNormalization", _skip_normalised),
    **_rules("", "LogSoftmax Softmax", _softmax),
    **_rules("", _REDUCTIONS, _reduced),
    **_rules("", "Flatten Identity Reshape Squeeze Transpose Unsqueeze", _view),
    **{("", name): rule for name, rule in (("Concat", _concat), ("Gather", _gather), ("Slice", _slice), ("Split", _split))},
}
"""By domain and name; every rule is asked with one value of the node and its marks."""


def read_step(node: ir.Node, value: ir.Value, marks: Marks, tokens: Tokens) -> Step | Reason:
    """How a node runs on packed tokens, or the reason why it cannot be computed token by token.

    It is asked with a value of the node, its output or an input, whose marks are known. An operator without a rule is taken to
    mix positions.
    """
    rule = RULES.get(read_as(node))
    if rule is None or has_unknown_attribute(node) or any(True for _ in subgraphs(node)):
        return refusal(node, "is not known to work token by token")
    step = rule(node, value, marks, tokens)
    if isinstance(step, Reason):
        return step
    dims = [tokens.facts.dims(item) for item in node.outputs[: len(step.outputs)]]
    if any(found is None or len(found) != len(own) for found, own in zip(dims, step.outputs, strict=True)):
        return refusal(node, "has outputs of unknown shape")
    if any(output.uses() or output.is_graph_output() for output in node.outputs[len(step.outputs) :]):
        return refusal(node, "has further outputs that are used")
    return step
