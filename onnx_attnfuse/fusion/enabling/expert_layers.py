"""Layers of experts as exporters write them: the matrices of its experts are gathered for each token.

    tokens, one for each of their experts ── W1 [+ b1] ── g · sigmoid(alpha · g) · (l + beta) ── W2 [+ b2]

W1 and W2 are (experts, out, in) or transposed. The result of W1 is all of g and then all of l, or both in turn, and may be held
below a limit, l above its negative too.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import halves
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, both_ways, constant_tensor, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32, narrows
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.language.expression import Tensor, sigmoid
from onnx_attnfuse.language.matcher.formula import Formula

_CUBE = 3
"""The axes of matrices (experts, out, in)."""
_VIEWS = "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A constant with a matrix for each expert, and its bias.

    Attributes:
        value: (experts, out, in), or (experts, in, out) if `turned`.
        sizes: The numbers of experts, of channels that come out, and of those that go in.
        turned: Whether it is transposed.
        bias: (experts, out), or None.
    """

    value: ir.Value
    sizes: tuple[int, int, int]
    turned: bool
    bias: ir.Value | None = None

    @staticmethod
    def of(value: ir.Value, *, turned: bool) -> Matrices | None:
        """The matrices that a value is; None if it is not constant, or has other axes."""
        tensor = constant_tensor(value)
        if tensor is None or len(tensor.shape) != _CUBE:
            return None
        experts, *rest = tensor.shape.numpy()
        out, back = reversed(rest) if turned else rest
        return Matrices(value, (experts, out, back), turned)

    def oriented(self, builder: Builder) -> ir.Value:
        """A constant (experts, out, in)."""
        if not self.turned:
            return self.value
        turned = builder.node("Transpose", [self.value], {"perm": [0, 2, 1]})
        builder.rearranged.append(turned)
        return turned


@dataclasses.dataclass(frozen=True)
class Gate:
    """`g · sigmoid(alpha · g) · (l + beta)` of a value with both, held below a limit if there is one.

    Attributes:
        value: The value that g and l are parts of.
        in_turn: Whether its channels are those of g and l in turn; else all of g come first.
        alpha: The factor within the sigmoid.
        beta: The summand of l.
        limit: The largest g, and the largest l on both sides of 0; None: there is none.
    """

    value: ir.Value
    in_turn: bool
    alpha: float
    beta: float
    limit: float | None


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """Both products of a layer.

    Attributes:
        operand: The input, a column or a row for each token and each of its experts.
        chosen: Which experts these are.
        first: The matrices W1.
        second: The matrices W2.
        gate: The activation between both products.
    """

    operand: ir.Value
    chosen: ir.Value
    first: Matrices
    second: Matrices
    gate: Gate

    def fits(self, dtype: ir.DataType | None, facts: Facts) -> bool:
        """Whether element types and sizes are those that MoE takes, which wants a token."""
        experts, doubled, channels = self.first.sizes
        if dtype not in FLOATS_TO_32 or not facts.assumed.nonempty_axes:
            return False
        values = [self.operand, self.first.value, self.second.value, self.first.bias, self.second.bias]
        if any(value is not None and facts.dtype(value) != dtype for value in values):
            return False
        return self.second.sizes == (experts, channels, doubled // 2)

    def interleaved(self, builder: Builder) -> tuple[ir.Value, ir.Value | None]:
        """W1 (experts, out, in) and its bias, with the channels of g and l in turn."""
        weight, bias = self.first.oriented(builder), self.first.bias
        if self.gate.in_turn:
            return weight, bias
        return _in_turn(weight, builder), None if bias is None else _in_turn(bias, builder)


def read_layer(value: ir.Value, facts: Facts) -> ExpertLayer | None:
    """The layer that gives a value, which is not weighed yet; None if none does."""
    second = _product(value, facts)
    gate = None if second is None else _gate(second.operand, facts)
    first = None if gate is None else _product(gate.value, facts)
    if first is None or second is None or gate is None or first.chosen is not second.chosen:
        return None
    return ExpertLayer(first.operand, first.chosen, first.matrices, second.matrices, gate)


def plain(value: ir.Value, facts: Facts, least: ir.DataType | None = None) -> ir.Value:
    """A value before its elements are given other axes, in their order, or another float type that holds those of `least`."""
    while True:
        node = value.producer()
        before = None if node is None or not node.inputs else node.inputs[0]
        if node is None or before is None or not _is_view(node, before, facts, least):
            return value
        value = before


def _in_turn(value: ir.Value, builder: Builder) -> ir.Value:
    """A constant (experts, out, ...) whose channels, all of g and then all of l, are those of g and l in turn."""
    dims = dims_of(builder, value)
    experts, out, *rest = dims
    assert isinstance(out, int)
    apart = builder.reshape(value, [experts, 2, out // 2, *rest])
    perm = [0, 2, 1, *range(3, 3 + len(rest))]
    turned = builder.node("Transpose", [apart], {"perm": perm})
    rows = builder.reshape(turned, [experts, out, *rest])
    builder.rearranged.append(rows)
    return rows


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product of each token with the matrix of its expert."""

    operand: ir.Value
    matrices: Matrices
    chosen: ir.Value
    """Which expert that is, (tokens, k)."""


def _product(value: ir.Value, facts: Facts) -> _Product | None:
    """The product that gives a value, of columns with matrices in front or of rows with matrices after them, and its bias."""
    value = plain(value, facts)
    for one, other in both_ways(value.producer(), "Add"):
        found, bias = _product(one, facts), _gathered(other, facts)
        if found is None or bias is None or found.matrices.bias is not None or bias[1] is not found.chosen:
            continue
        tensor = constant_tensor(bias[0])
        if tensor is not None and tuple(tensor.shape.numpy()) == found.matrices.sizes[:2]:
            return dataclasses.replace(found, matrices=dataclasses.replace(found.matrices, bias=bias[0]))
    node = value.producer()
    if not is_standard(node, "MatMul"):
        return None
    left, right = node.inputs
    if left is None or right is None:
        return None
    for matrices, operand, axis, in_rows in ((left, right, -1, False), (right, left, -2, True)):
        dims, others = facts.dims(operand), facts.dims(matrices)
        if dims is None or others is None or len(dims) != _CUBE or dims[axis] != 1 or others[:-2] != dims[:1]:
            continue
        source, turned = _turned_from(matrices)
        gathered = _gathered(source, facts)
        if gathered is None:
            continue
        source, stored_turned = _turned_from(gathered[0])
        found = Matrices.of(source, turned=(in_rows + turned + stored_turned) % 2 == 1)
        if found is not None:
            return _Product(operand, found, gathered[1])
    return None


def _gathered(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The table that a value is gathered from, along its first axis, and the indices."""
    node = value.producer()
    if is_standard(node, "Gather") and attribute(node, "axis", 0) == 0:
        source, indices = node.inputs
    elif is_standard(node, "GatherND") and attribute(node, "batch_dims", 0) == 0:
        source, indices = node.inputs
        if indices is None or (facts.dims(indices) or ())[-1:] != (1,):
            return None
    else:
        return None
    return None if source is None or indices is None else (source, plain(indices, facts))


def _turned_from(value: ir.Value) -> tuple[ir.Value, bool]:
    """A value before its matrices are transposed, and whether they are."""
    node, turned = value.producer(), False
    while is_standard(node, "Transpose") and node.inputs[0] is not None:
        perm = attribute(node, "perm", [])
        if perm not in ([0, 1, 2], [0, 2, 1]):
            break
        value, turned = node.inputs[0], turned != (perm == [0, 2, 1])
        node = value.producer()
    return value, turned


@Formula
def _gated(gate: Tensor, line: Tensor, alpha: Tensor | None = None) -> Tensor:
    return gate * sigmoid(gate if alpha is None else gate * alpha) * line


def _gate(value: ir.Value, facts: Facts) -> Gate | None:
    """How a value is gated."""
    found = _gated.at(plain(value, facts), facts)
    if found is None or "gate" not in found.values or "line" not in found.values:
        return None
    left, lowest, limit = _clipped(found.values["gate"], facts)
    inner, beta = _less(found.values["line"], facts)
    right, least, most = _clipped(inner, facts)
    if lowest is not None or most != limit or least != (None if limit is None else -limit):
        return None
    halved, alpha = halves(left, right, facts), 1.0 if "alpha" not in found.values else found.numbers.get("alpha")
    whole = halved or halves(left, right, facts, step=2)
    return None if whole is None or alpha is None else Gate(whole, halved is None, alpha, beta, limit)


def _less(value: ir.Value, facts: Facts) -> tuple[ir.Value, float]:
    """A value before a number is added, and that number."""
    for one, other in both_ways(value.producer(), "Add"):
        number = facts.number(other)
        if number is not None and facts.dims(one) == facts.dims(value):
            return one, number
    return value, 0.0


def _clipped(value: ir.Value, facts: Facts) -> tuple[ir.Value, float | None, float | None]:
    """A value before it is held between two numbers, and these; None for one that is not given."""
    node = value.producer()
    if not is_standard(node, "Clip") or node.inputs[0] is None or {"min", "max"} & set(node.attributes):
        return value, None, None
    bounds = [*node.inputs[1:], None, None][:2]
    numbers = [facts.number(bound) for bound in bounds]
    if any(bound is not None and number is None for bound, number in zip(bounds, numbers, strict=True)):
        return value, None, None
    return node.inputs[0], numbers[0], numbers[1]


def _is_view(node: ir.Node, before: ir.Value, facts: Facts, least: ir.DataType | None) -> bool:
    if is_standard(node, "Expand"):
        return facts.dims(before) is not None and facts.dims(before) == facts.dims(node.outputs[0])
    if is_standard(node, "Cast"):
        given, dtype = facts.dtype(before), facts.dtype(node.outputs[0])
        return given in FLOATS_TO_32 and dtype in FLOATS_TO_32 and not narrows(least or given, dtype)
    return is_standard(node, *_VIEWS) or (is_standard(node, "Concat") and len(node.inputs) == 1)
