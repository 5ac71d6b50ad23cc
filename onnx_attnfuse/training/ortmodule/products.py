"""Gradient graphs: operators that exports do not have, the axes of products once those of one operand are known, and views.

A gradient graph takes the operands of the attention again, some of them transposed once more. Two values are the same tensor if
both are views of one; how a view lies follows from the factors of the value's axes.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue, downward, upward
from onnx_attnfuse.attention.match.contractions import Contraction
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.dtypes import FLOATS
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.uses import origin

TRAINING = CONTRIB
"""The domain of ONNX Runtime's operators for training."""
ATEN = "org.pytorch.aten"
"""The domain of the operator that calls PyTorch."""
_MAX_VIEW_CHAIN = 24


def reads_gradient(node: ir.Node) -> bool:
    """Whether the node differentiates a softmax: from the gradient of its result and the result itself."""
    return node.domain == TRAINING and node.op_type in {"SoftmaxGrad", "SoftmaxGrad_13"}


def drops(node: ir.Node) -> bool:
    """Whether the node sets elements to 0 at random and can say which."""
    known = is_standard(node, "Dropout") or (node.domain == TRAINING and node.op_type == "BitmaskDropout")
    return known and len(node.inputs) > 2 and node.inputs[2] is not None


def finds_repeated_axes(node: ir.Node) -> bool:
    """Whether the node tells, of two shapes that broadcast, the axes along which each of them is repeated."""
    return node.domain == TRAINING and node.op_type == "BroadcastGradientArgs"


@dataclasses.dataclass(frozen=True)
class Labelled:
    """The factors of the labels of a product."""

    contraction: Contraction
    known: dict[str, Axis]

    @property
    def result(self) -> IndexedValue:
        """The result of the product."""
        labels = self.contraction.out
        return IndexedValue(self.contraction.node.outputs[0], tuple(self.known[label] for label in labels))

    @property
    def summed(self) -> frozenset[Factor]:
        """The factors that the product sums over."""
        return frozenset(leaf for label in self.contraction.summed for leaf in leaves(self.known[label]))


def labelled(contraction: Contraction, given: dict[int, Axes], out: Axes | None, rest: Axis, facts: Facts) -> Labelled | None:
    """The factors of every label, or None if the arguments contradict each other.

    Args:
        contraction: The product.
        given: The axes of its operands, by number, as far as they are known.
        out: The axes of its result, if they are known.
        rest: The factors of an unknown label; there may be one.
        facts: Shapes.
    """
    known: dict[str, Axis] = {}
    pairs = [(contraction.labels[index], axes) for index, axes in given.items()]
    pairs += [] if out is None else [(contraction.out, out)]
    for labels, axes in pairs:
        if len(labels) != len(axes):
            return None
        for label, axis in zip(labels, axes, strict=True):
            before, now = known.get(label), leaves(axis)
            if before and now and leaves(before) != now:
                return None
            known[label] = now or before or ()
    unknown = ({*contraction.labels[0], *contraction.labels[1]}) - known.keys()
    if len(unknown) > 1:
        return None
    known |= dict.fromkeys(unknown, leaves(rest))
    return Labelled(contraction, known) if _fits(contraction, known, facts) else None


def _fits(contraction: Contraction, known: dict[str, Axis], facts: Facts) -> bool:
    """Whether the operands are as long as the axes they run over."""
    for operand, labels in zip(contraction.operands, contraction.labels, strict=True):
        dims = facts.dims(operand)
        if dims is None or len(dims) != len(labels):
            return False
        for label, dim in zip(labels, dims, strict=True):
            size = length(known[label])
            if isinstance(dim, int) and isinstance(size, int) and dim not in {1, size}:
                return False
    return True


def operand_of(found: Labelled, index: int, facts: Facts) -> IndexedValue:
    """An operand of a labelled product; an axis of length 1 has no factors."""
    value = found.contraction.operands[index]
    dims = facts.dims(value) or ()
    axes = tuple(() if dim == 1 else found.known[label] for dim, label in zip(dims, found.contraction.labels[index], strict=True))
    return IndexedValue(value, axes)


def over(indexed: IndexedValue, facts: Facts) -> IndexedValue | None:
    """The value that `indexed` is a view of, or was before it was converted to another float type; None if it is neither."""
    source = origin(indexed.value, "Cast")
    if source is not None and facts.dtype(source) in FLOATS:
        return IndexedValue(source, indexed.axes)
    return upward(indexed, facts)


def under(node: ir.Node, axes: Axes, facts: Facts) -> IndexedValue | None:
    """The output of a view, or of a conversion between float types, of an input that lies as `axes`; None of other nodes."""
    if is_standard(node, "Cast") and facts.dtype(node.outputs[0]) in FLOATS:
        return IndexedValue(node.outputs[0], axes)
    return downward(node, axes, facts)


class Views:
    """The views of one value."""

    def __init__(self, indexed: IndexedValue, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[ir.Value, Axes | None] = {}
        above: IndexedValue | None = indexed
        while above is not None and len(self._known) < _MAX_VIEW_CHAIN:
            self._known[above.value] = above.axes
            above = over(above, facts)

    def axes_of(self, value: ir.Value | None, depth: int = 0) -> Axes | None:
        """How `value` lies, or None if it is no view of that value."""
        if value is None or depth > _MAX_VIEW_CHAIN:
            return None
        if value not in self._known:
            self._known[value] = self._below(value, depth)
        return self._known[value]

    def _below(self, value: ir.Value, depth: int) -> Axes | None:
        node = value.producer()
        inner = None if node is None or not node.inputs else self.axes_of(node.inputs[0], depth + 1)
        if node is None or inner is None:
            return None
        found = under(node, inner, self._facts)
        return None if found is None or found.value is not value else found.axes
