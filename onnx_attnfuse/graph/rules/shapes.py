"""Shapes of operators that keep their elements or work on each alone, and of those whose result has a shape of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, constant_tensor, given, subgraphs
from onnx_attnfuse.graph.facts_view import Dims, Known, broadcast
from onnx_attnfuse.graph.ops import COMPARES, REDUCTIONS
from onnx_attnfuse.graph.rules.reading import (
    ShapeRule,
    axes_of,
    fresh_dims,
    input_content,
    input_dims,
    int_list,
    requested_dims,
    rules,
)
from onnx_attnfuse.graph.sizes import Dim, Size


def _constant(node: ir.Node, _facts: Known) -> Sequence[Dims | None]:
    tensor = constant_tensor(node.outputs[0])
    return [None if tensor is None else tuple(tensor.shape.numpy())]


def _transpose(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    perm: list[int] | None = attribute(node, "perm")
    if dims is None:
        return [None if perm is None else fresh_dims(node.outputs[0], len(perm), facts)]
    return [tuple(dims[axis] for axis in perm) if perm is not None else dims[::-1]]


def _reshape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims, wanted = input_dims(node, 0, facts), input_content(node, 1, facts)
    output = node.outputs[0]
    if not isinstance(wanted, tuple):
        return [requested_dims(node, 1, facts)]
    result: list[Dim | None] = []
    for axis, item in enumerate(wanted):
        if item == 0 and not attribute(node, "allowzero", 0):
            result.append(dims[axis] if dims is not None and axis < len(dims) else None)
        else:
            result.append(item if isinstance(item, (int, Size)) and item != -1 else None)
    unknown = [axis for axis, dim in enumerate(result) if dim is None]
    if len(unknown) == 1 and dims is not None:
        rest = sizes.product(dim for dim in result if dim is not None)
        result[unknown[0]] = sizes.exact_quotient(sizes.product(dims), rest)
    if not unknown and dims is not None:
        result = [_number(axis, result, dims, facts) for axis in range(len(result))]
    lengths = tuple(facts.fresh(output, axis) if dim is None else dim for axis, dim in enumerate(result))
    if dims is not None and len(dims) == len(wanted) == 2 and unknown == [1] and result[0] is not None:
        facts.fit(dims[0], result[0])
    if dims is not None and len(unknown) <= 1:
        facts.meet(sizes.product(dims), sizes.product(lengths))
    return [lengths]


def _number(axis: int, wanted: Sequence[Dim | None], dims: Dims, facts: Known) -> Dim | None:
    """A length that is asked for, as the number that it has to be where all other lengths leave only that."""
    asked, others = wanted[axis], sizes.product(dim for place, dim in enumerate(wanted) if place != axis and dim is not None)
    quotient = sizes.exact_quotient(sizes.product(dims), others)
    if asked is None or quotient is None:
        return asked
    is_number, is_enforced = isinstance(quotient, int), isinstance(others, int) or facts.assumed.nonempty_axes
    if is_enforced and is_number:
        facts.enforce(asked, quotient)
    elif is_enforced:
        facts.fit(asked, quotient)
    return quotient if is_number else asked


def _flatten(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [fresh_dims(node.outputs[0], 2, facts)]
    axis: int = attribute(node, "axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return [(sizes.product(dims[:axis]), sizes.product(dims[axis:]))]


def _unsqueeze(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    raw = int_list(node, 1, "axes", facts)
    if dims is None or raw is None:
        return [None]
    axes = axes_of(node, 1, len(dims) + len(raw), facts) or []
    rest = iter(dims)
    return [tuple(1 if axis in axes else next(rest) for axis in range(len(dims) + len(axes)))]


def _squeeze(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    if len(node.inputs) < 2 and "axes" not in node.attributes:
        if all(isinstance(dim, int) for dim in dims) or len(dims) == 1:
            return [tuple(dim for dim in dims if dim != 1) if len(dims) > 1 else ()]
        return [None]
    axes = axes_of(node, 1, len(dims), facts)
    return [None if axes is None else tuple(dim for axis, dim in enumerate(dims) if axis not in axes)]


def _expand(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if isinstance(input_content(node, 1, facts), tuple):
        return [broadcast([dims, requested_dims(node, 1, facts)], facts)]
    target = given(node, 1)
    length = facts.dims(target)
    if not length or not isinstance(length[0], int):
        return [None]
    return [fresh_dims(node.outputs[0], max(length[0], len(dims or ())), facts)]


def _tile(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    repeats = int_list(node, 1, "repeats", facts)
    if dims is None:
        return [None]
    if repeats is None or len(repeats) != len(dims):
        return [fresh_dims(node.outputs[0], len(dims), facts)]
    return [tuple(dim * repeat for dim, repeat in zip(dims, repeats, strict=True))]


VIEWS: dict[str, ShapeRule] = {
    "Expand": _expand,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Constant": _constant,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


def _shape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [(facts.fresh(node.outputs[0], 0),)]
    return [(len(dims[slice(attribute(node, "start", 0), attribute(node, "end"))]),)]


def _if(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Shapes of an If: of the branch that sizes choose, else the lengths that both agree on. Branches are read first."""
    chosen = input_content(node, 0, facts)
    branches = list(subgraphs(node))
    if isinstance(chosen, bool):
        branches = [node.attributes["then_branch" if chosen else "else_branch"].as_graph()]
    return [
        _agreed(output, [facts.dims(branch.outputs[index]) for branch in branches], facts)
        for index, output in enumerate(node.outputs)
    ]


def _agreed(output: ir.Value, shapes: Sequence[Dims | None], facts: Known) -> Dims | None:
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes) or len({len(shape) for shape in known}) > 1:
        return None
    columns = enumerate(zip(*known, strict=True))
    return tuple(column[0] if len(set(column)) == 1 else facts.fresh(output, axis) for axis, column in columns)


def _scan(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    """Of a Scan only that its sequences are of one length."""
    count: int = attribute(node, "num_scan_inputs")
    sequences = range(len(node.inputs) - count, len(node.inputs))
    axes: Sequence[int] = attribute(node, "scan_input_axes", [0] * count)
    shapes = [input_dims(node, place, facts) for place in sequences]
    lengths = [dims[axis] for dims, axis in zip(shapes, axes, strict=True) if dims is not None]
    for length in lengths[1:]:
        facts.enforce(lengths[0], length)
    return []


def _one_hot(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    dims = input_dims(node, 0, facts)
    if dims is None:
        return [None]
    axis: int = attribute(node, "axis", -1) % (len(dims) + 1)
    depth = input_content(node, 1, facts)
    return [(*dims[:axis], depth if isinstance(depth, (int, Size)) else facts.fresh(node.outputs[0], axis), *dims[axis:])]


def _range(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    start, limit, delta = (input_content(node, index, facts) for index in range(3))
    if isinstance(start, (int, Size)) and isinstance(limit, (int, Size)) and delta == 1:
        return [(limit - start,)]
    return [(facts.fresh(node.outputs[0], 0),)]


def _constant_of_shape(node: ir.Node, facts: Known) -> Sequence[Dims | None]:
    return [requested_dims(node, 0, facts)]


MAKERS: dict[str, ShapeRule] = {
    "ConstantOfShape": _constant_of_shape,
    "If": _if,
    "OneHot": _one_hot,
    "Range": _range,
    "Scan": _scan,
    "Shape": _shape,
}


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


def _broadcast(*places: int) -> ShapeRule:
    """The shape that inputs at some places broadcast to, all where none is named."""
    return lambda node, facts: [broadcast([input_dims(node, at, facts) for at in places or range(len(node.inputs))], facts)]


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
    **rules("Add Sub Mul Div Pow Mod Min Max Sum Mean PRelu", _broadcast()),
    **rules("Where", _broadcast(1, 2, 0)),  # the alternatives' own, which a condition may be repeated along
    **rules("QLinearAdd QLinearMul", _broadcast(0, 3)),
    **rules("QLinearWhere", _broadcast(1, 4, 0)),
    **rules("QLinearLeakyRelu QLinearSigmoid QLinearSoftmax", _same),
    **dict.fromkeys(COMPARES | {"And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"}, _broadcast()),
    **dict.fromkeys(REDUCTIONS, _reduce),
}
