"""Gradient graphs: operators that exports do not have, and the axes of products, once those of one operand are known."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.paths import Contraction
from onnx_attnfuse.graph.constants import is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB

TRAINING = CONTRIB
"""The domain of ONNX Runtime's operators for training."""
ATEN = "org.pytorch.aten"
"""The domain of the operator that calls PyTorch."""


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
