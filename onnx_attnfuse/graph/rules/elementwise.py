"""Shapes of operators that work element by element, or along one axis without changing it, or reduce axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, given
from onnx_attnfuse.graph.facts_view import Dims, Known, broadcast
from onnx_attnfuse.graph.rules.reading import ShapeRule, axes_of, input_dims, rules


def _same(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [input_dims(node, 0, facts)]


def _half(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Half of the last axis."""
    dims = input_dims(node, 0, facts)
    half = None if not dims else sizes.exact_quotient(dims[-1], 2)
    return [None if dims is None or half is None else (*dims[:-1], half)]


def _same_and_sum(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The result, two statistics, and the sum that was normalized."""
    dims = input_dims(node, 0, facts)
    return [dims, None, None, dims]


def _same_and_numbers(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The result, its scale and its zero point."""
    return [input_dims(node, 0, facts), (), ()]


def _broadcast(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [broadcast([input_dims(node, index, facts) for index in range(len(node.inputs))], facts)]


def _chosen(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """The shape of the alternatives, rather than that of the condition, which may be repeated along it."""
    return [broadcast([input_dims(node, index, facts) for index in (1, 2, 0)], facts)]


def _broadcast_quantised(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Two tensors of quantised numbers, each with its scale and zero point after it."""
    return [broadcast([input_dims(node, index, facts) for index in (0, 3)], facts)]


def _chosen_quantised(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [broadcast([input_dims(node, index, facts) for index in (1, 4, 0)], facts)]


def _reduce(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    axes: list[int] | None
    if "axes" in node.attributes or given(node, 1) is not None:
        axes = axes_of(node, 1, len(dims), facts)
    else:
        axes = [] if attribute(node, "noop_with_empty_axes", 0) else [*range(len(dims))]
    return [None if axes is None else _reduced(dims, axes, attribute(node, "keepdims", 1))]


def _arg_reduce(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    return [_reduced(dims, [attribute(node, "axis", 0) % len(dims)], attribute(node, "keepdims", 1))]


def _reduced(dims: Dims, axes: Collection[int], keep: int) -> Dims:
    return tuple(1 if axis in axes else dim for axis, dim in enumerate(dims) if keep or axis not in axes)


ELEMENTWISE: dict[str, ShapeRule] = {
    **rules("Identity Cast CastLike Dropout Trilu CumSum Clip Softmax LogSoftmax", _same),
    **rules("Relu Gelu FastGelu QuickGelu BiasGelu LeakyRelu Elu Celu Selu Swish Mish Softplus HardSigmoid HardSwish", _same),
    **rules("BiasSplitGelu", _half),
    **rules("Erf Tanh Sigmoid Exp Log Sqrt Reciprocal Neg Abs Sign Floor Ceil Round Sin Cos", _same),
    **rules("Not IsNaN IsInf BitwiseNot Bernoulli RandomUniformLike RandomNormalLike EyeLike", _same),
    **rules("Acos Asin Atan Tan Sinh Cosh", _same),
    **rules("SoftmaxGrad SoftmaxGrad_13 DropoutGrad BitmaskDropout BitmaskDropoutGrad", _same),
    **rules("LayerNormalization SimplifiedLayerNormalization", _same),
    **rules("SkipLayerNormalization SkipSimplifiedLayerNormalization", _same_and_sum),
    **rules("BatchNormalization InstanceNormalization GroupNormalization RMSNormalization LpNormalization", _same),
    **rules("BranchwiseRMSNorm", _same),
    **rules("DynamicQuantizeLinear", _same_and_numbers),
    **rules("BiasSoftmax QuantizeLinear DequantizeLinear RotaryEmbedding", _same),
    **rules("ScatterND ScatterElements Scatter TensorScatter ReverseSequence", _same),
    **rules("Add Sub Mul Div Pow Mod Min Max Sum Mean PRelu", _broadcast),
    **rules("Where", _chosen),
    **rules("QLinearAdd QLinearMul", _broadcast_quantised),
    **rules("QLinearWhere", _chosen_quantised),
    **rules("QLinearLeakyRelu QLinearSigmoid QLinearSoftmax", _same),
    **rules("And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual", _broadcast),
    **rules("BitwiseAnd BitwiseOr BitwiseXor BitShift", _broadcast),
    **rules(
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp",
        _reduce,
    ),
    **rules("ArgMax ArgMin", _arg_reduce),
}
