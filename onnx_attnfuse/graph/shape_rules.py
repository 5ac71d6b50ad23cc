"""Output shapes, one rule per kind of operator.

A rule gets the node and the facts of its inputs and returns a shape per output, None for a shape it cannot tell. Axis lengths that
it does not know are fresh symbols, so that at least the rank is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.sizes import Dim, Size

if TYPE_CHECKING:
    from onnx_attnfuse.graph.facts import Dims, Facts

Rule = Callable[[ir.Node, "Facts"], "Sequence[Dims | None]"]

_LAST = 1 << 40
"""A Slice end at least this large means the end of the axis."""


def _input(node: ir.Node, index: int, facts: Facts) -> Dims | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None else facts.dims(value)


def int_list(node: ir.Node, index: int, name: str, facts: Facts) -> tuple[Dim, ...] | None:
    """A list of integers that newer opsets take as an input and older ones as an attribute; None if absent or unknown."""
    if index < len(node.inputs) and node.inputs[index] is not None:
        content = facts.content(node.inputs[index])  # pyright: ignore[reportArgumentType]
        items = content if isinstance(content, tuple) else (content,)
        return tuple(items) if all(isinstance(item, (int, Size)) for item in items) else None  # pyright: ignore[reportReturnType]
    found = attribute(node, name)
    return None if found is None else tuple(found) if isinstance(found, list) else (found,)


def axes_of(node: ir.Node, index: int, rank: int, facts: Facts) -> list[int] | None:
    """The `axes` input or attribute, made non-negative."""
    found = int_list(node, index, "axes", facts)
    if found is None or not all(isinstance(axis, int) for axis in found):
        return None
    return sorted(axis % rank for axis in found if isinstance(axis, int)) if rank else []


def _same(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    return [_input(node, 0, facts)]


def _broadcast(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    from onnx_attnfuse.graph.facts import broadcast

    return [broadcast([_input(node, index, facts) for index in range(len(node.inputs))], facts)]


def _matmul(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    from onnx_attnfuse.graph.facts import broadcast

    left, right = _input(node, 0, facts), _input(node, 1, facts)
    if left is None or right is None or not left or not right:
        return [None]
    if attribute(node, "transA"):
        left = (*left[:-2], left[-1], left[-2])
    if attribute(node, "transB"):
        right = (*right[:-2], right[-1], right[-2])
    if len(left) == 1 or len(right) == 1:
        return [(*left[:-1], *right[:-2], *(right[-1:] if len(right) > 1 else ()))]
    facts.meet(left[-1], right[-2])
    leading = broadcast([left[:-2], right[:-2]], facts)
    return [None if leading is None else (*leading, left[-2], right[-1])]


def _transpose(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    perm = attribute(node, "perm")
    if dims is None:
        return [None if perm is None else tuple(facts.fresh(node.outputs[0], axis) for axis in range(len(perm)))]
    return [tuple(dims[axis] for axis in perm) if perm is not None else tuple(reversed(dims))]


def _reshape(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims, shape = _input(node, 0, facts), node.inputs[1]
    output = node.outputs[0]
    if shape is None:
        return [None]
    content = facts.content(shape)
    if not isinstance(content, tuple):
        length = facts.dims(shape)
        if length is None or not length or not isinstance(length[0], int):
            return [None]
        return [tuple(facts.fresh(output, axis) for axis in range(length[0]))]
    result: list[Dim | None] = []
    for axis, item in enumerate(content):
        if item == 0 and not attribute(node, "allowzero", 0):
            result.append(dims[axis] if dims is not None and axis < len(dims) else None)
        else:
            result.append(item if isinstance(item, (int, Size)) and item != -1 else None)
    unknown = [axis for axis, dim in enumerate(result) if dim is None]
    if len(unknown) == 1 and dims is not None:
        rest = sizes.product(dim for dim in result if dim is not None)
        result[unknown[0]] = sizes.exact_quotient(sizes.product(dims), rest)
    settled = tuple(facts.fresh(output, axis) if dim is None else dim for axis, dim in enumerate(result))
    if dims is not None and len(unknown) <= 1:
        facts.meet(sizes.product(dims), sizes.product(settled))
    return [settled]


def _flatten(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [tuple(facts.fresh(node.outputs[0], axis) for axis in range(2))]
    axis = attribute(node, "axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return [(sizes.product(dims[:axis]), sizes.product(dims[axis:]))]


def _unsqueeze(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    raw = int_list(node, 1, "axes", facts)
    if dims is None or raw is None:
        return [None]
    axes = axes_of(node, 1, len(dims) + len(raw), facts) or []
    rest = iter(dims)
    return [tuple(1 if axis in axes else next(rest) for axis in range(len(dims) + len(axes)))]


def _squeeze(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [None]
    if len(node.inputs) < 2 and "axes" not in node.attributes:
        if all(isinstance(dim, int) for dim in dims) or len(dims) == 1:
            return [tuple(dim for dim in dims if dim != 1) if len(dims) > 1 else ()]
        return [None]
    axes = axes_of(node, 1, len(dims), facts)
    return [None if axes is None else tuple(dim for axis, dim in enumerate(dims) if axis not in axes)]


def _concat(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    parts = [_input(node, index, facts) for index in range(len(node.inputs))]
    known = next((part for part in parts if part is not None), None)
    if known is None or not known:
        return [None]
    axis = attribute(node, "axis", 0) % len(known)
    for part in parts:
        for i, (one, other) in enumerate(zip(known, part or (), strict=False)):
            if i != axis:
                facts.meet(one, other)
    lengths = [part[axis] if part is not None and len(part) == len(known) else None for part in parts]
    total = None if None in lengths else _sum(length for length in lengths if length is not None)
    return [tuple((facts.fresh(node.outputs[0], i) if total is None else total) if i == axis else d for i, d in enumerate(known))]


def _sum(dims: Sequence[Dim] | object) -> Dim:
    total: Dim = 0
    for dim in dims:  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        total = total + dim  # pyright: ignore[reportUnknownVariableType]
    return total


def split_lengths(node: ir.Node, facts: Facts) -> list[Dim] | None:
    """The lengths of a Split's parts along its axis."""
    dims = _input(node, 0, facts)
    given = int_list(node, 1, "split", facts)
    if given is not None:
        return list(given)
    if dims is None or (len(node.inputs) > 1 and node.inputs[1] is not None):
        return None
    count = len(node.outputs)
    length = dims[attribute(node, "axis", 0) % len(dims)]
    each = sizes.exact_quotient(length, count)
    if each is not None:
        return [each] * count
    if not isinstance(length, int):
        return None
    chunk = -(-length // count)
    return [*[chunk] * (count - 1), length - chunk * (count - 1)]


def _split(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return []
    axis = attribute(node, "axis", 0) % len(dims)
    lengths = split_lengths(node, facts)
    return [
        tuple((facts.fresh(output, i) if lengths is None else lengths[index]) if i == axis else dim for i, dim in enumerate(dims))
        for index, output in enumerate(node.outputs)
    ]


def slice_bounds(node: ir.Node, rank: int, facts: Facts) -> dict[int, tuple[Dim, Dim, int]] | None:
    """`{axis: (start, end, step)}` of a Slice as written, or None if any part is unknown."""
    starts, ends = int_list(node, 1, "starts", facts), int_list(node, 2, "ends", facts)
    axes = int_list(node, 3, "axes", facts)
    steps = int_list(node, 4, "steps", facts)
    if starts is None or ends is None or (axes is None and len(node.inputs) > 3 and node.inputs[3] is not None):
        return None
    if steps is None and len(node.inputs) > 4 and node.inputs[4] is not None:
        return None
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    bounds: dict[int, tuple[Dim, Dim, int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(axis, int) or not isinstance(step, int):
            return None
        bounds[axis % rank] = (start, end, step)
    return bounds


def slice_length(dim: Dim, start: Dim, end: Dim, step: int) -> Dim | None:
    """The length of `[start:end:step]` of an axis of length `dim`, or None if the symbols do not settle it."""
    if step != 1:
        if not isinstance(dim, int) or not isinstance(start, int) or not isinstance(end, int):
            return None
        return len(range(dim)[slice(start, None if abs(end) >= _LAST else end, step)])
    if isinstance(dim, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(dim)[start:end])
    low = start + dim if isinstance(start, int) and start < 0 else start
    if isinstance(end, int) and end >= _LAST:
        return dim - low if low != 0 else dim
    high = end + dim if isinstance(end, int) and end < 0 else end
    if high == dim or low == 0:
        return high - low if high == dim else sizes.minimum(high, dim) if isinstance(high, int) or isinstance(dim, Size) else high
    return None


def _slice(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [None]
    bounds = slice_bounds(node, len(dims), facts)
    output = node.outputs[0]
    if bounds is None:
        axes = int_list(node, 3, "axes", facts)
        touched = {axis % len(dims) for axis in axes if isinstance(axis, int)} if axes is not None else set(range(len(dims)))
        return [tuple(facts.fresh(output, axis) if axis in touched else dim for axis, dim in enumerate(dims))]
    result: list[Dim] = []
    for axis, dim in enumerate(dims):
        length = slice_length(dim, *bounds[axis]) if axis in bounds else dim
        result.append(facts.fresh(output, axis) if length is None else length)
    return [tuple(result)]


def _gather(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data, indices = _input(node, 0, facts), _input(node, 1, facts)
    if data is None or indices is None:
        return [None]
    axis = attribute(node, "axis", 0) % len(data)
    return [(*data[:axis], *indices, *data[axis + 1 :])]


def _gather_nd(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data, indices = _input(node, 0, facts), _input(node, 1, facts)
    if data is None or indices is None or not isinstance(indices[-1], int):
        return [None]
    return [(*indices[:-1], *data[indices[-1] + attribute(node, "batch_dims", 0) :])]


def _second(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    return [_input(node, 1, facts)]


def _expand(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    from onnx_attnfuse.graph.facts import broadcast

    dims, target = _input(node, 0, facts), node.inputs[1]
    if target is None:
        return [None]
    content = facts.content(target)
    output = node.outputs[0]
    if isinstance(content, tuple):
        wanted = tuple(item if isinstance(item, (int, Size)) else facts.fresh(output, axis) for axis, item in enumerate(content))
        return [broadcast([dims, wanted], facts)]
    length = facts.dims(target)
    if length is None or not length or not isinstance(length[0], int):
        return [None]
    return [tuple(facts.fresh(output, axis) for axis in range(max(length[0], len(dims or ()))))]


def _tile(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    repeats = int_list(node, 1, "repeats", facts)
    if dims is None:
        return [None]
    if repeats is None or len(repeats) != len(dims):
        return [tuple(facts.fresh(node.outputs[0], axis) for axis in range(len(dims)))]
    return [tuple(dim * repeat for dim, repeat in zip(dims, repeats, strict=True))]


def _shape(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [(facts.fresh(node.outputs[0], 0),)]
    return [(len(dims[slice(attribute(node, "start", 0), attribute(node, "end"))]),)]


def _range(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    start, limit, delta = (facts.content(value) if value is not None else None for value in node.inputs)
    if isinstance(start, (int, Size)) and isinstance(limit, (int, Size)) and delta == 1:
        return [(limit - start,)]
    return [(facts.fresh(node.outputs[0], 0),)]


def _constant_of_shape(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    shape = node.inputs[0]
    if shape is None:
        return [None]
    content = facts.content(shape)
    output = node.outputs[0]
    if isinstance(content, tuple):
        return [tuple(item if isinstance(item, (int, Size)) else facts.fresh(output, axis) for axis, item in enumerate(content))]
    length = facts.dims(shape)
    if length and isinstance(length[0], int):
        return [tuple(facts.fresh(output, axis) for axis in range(length[0]))]
    return [None]


def _reduce(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [None]
    given = "axes" in node.attributes or (len(node.inputs) > 1 and node.inputs[1] is not None)
    axes = axes_of(node, 1, len(dims), facts) if given else ([] if attribute(node, "noop_with_empty_axes", 0) else [*range(len(dims))])
    if axes is None:
        return [None]
    keep = attribute(node, "keepdims", 1)
    return [tuple(1 if axis in axes else dim for axis, dim in enumerate(dims) if keep or axis not in axes)]


def _arg_reduce(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return [None]
    taken = attribute(node, "axis", 0) % len(dims)
    keep = attribute(node, "keepdims", 1)
    return [tuple(1 if axis == taken else dim for axis, dim in enumerate(dims) if keep or axis != taken)]


def _gemm(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    left, right = _input(node, 0, facts), _input(node, 1, facts)
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return [None]
    return [(left[1 if attribute(node, "transA", 0) else 0], right[0 if attribute(node, "transB", 0) else 1])]


def _conv(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data, weight = _input(node, 0, facts), _input(node, 1, facts)
    if data is None:
        return [None]
    channels = weight[0] if weight is not None else facts.fresh(node.outputs[0], 1)
    spatial = [facts.fresh(node.outputs[0], axis) for axis in range(2, len(data))]
    if weight is not None and attribute(node, "auto_pad", "NOTSET") == "NOTSET" and node.op_type == "Conv":
        count = len(spatial)
        strides, dilations = attribute(node, "strides", [1] * count), attribute(node, "dilations", [1] * count)
        pads = attribute(node, "pads", [0] * 2 * count)
        return [
            (data[0], channels)
            + tuple(
                sizes.floor_quotient(
                    data[i + 2] + (pads[i] + pads[i + count] - 1) + (weight[i + 2] - 1) * (-dilations[i]), strides[i]
                )
                + 1
                for i in range(count)
            )
        ]
    return [(data[0], channels, *spatial)]


def _spatial(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data = _input(node, 0, facts)
    if data is None:
        return [None]
    return [tuple(facts.fresh(node.outputs[0], axis) if axis > 1 else dim for axis, dim in enumerate(data))]


def _same_rank(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data = _input(node, 0, facts)
    return [None if data is None else tuple(facts.fresh(output, axis) for axis in range(len(data))) for output in node.outputs]


def _pad(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    data = _input(node, 0, facts)
    pads = int_list(node, 1, "pads", facts)
    if data is None or pads is None or len(pads) != 2 * len(data) or (len(node.inputs) > 3 and node.inputs[3] is not None):
        return _same_rank(node, facts)
    return [tuple(dim + pads[axis] + pads[axis + len(data)] for axis, dim in enumerate(data))]


def einsum_terms(node: ir.Node) -> tuple[list[str], str] | None:
    """An Einsum's operand and result subscripts, or None if it has an ellipsis or no explicit result."""
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    left, right = equation.split("->")
    return left.split(","), right


def _einsum(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    terms = einsum_terms(node)
    if terms is None:
        return [None]
    lengths: dict[str, Dim] = {}
    for index, term in enumerate(terms[0]):
        dims = _input(node, index, facts)
        for letter, dim in zip(term, dims or (), strict=False):
            facts.meet(lengths.get(letter, dim), dim)
            if letter not in lengths or lengths[letter] == 1:
                lengths[letter] = dim
    return [tuple(lengths.get(letter, facts.fresh(node.outputs[0], axis)) for axis, letter in enumerate(terms[1]))]


def _first_with_fresh_rest(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    first = _input(node, 0, facts)
    return [first, *[None] * (len(node.outputs) - 1)]


def _top_k(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    if dims is None:
        return []
    taken = attribute(node, "axis", -1) % len(dims)
    return [tuple(facts.fresh(output, axis) if axis == taken else dim for axis, dim in enumerate(dims)) for output in node.outputs]


def _non_zero(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    dims = _input(node, 0, facts)
    return [(len(dims) if dims is not None else facts.fresh(node.outputs[0], 0), facts.fresh(node.outputs[0], 1))]


def _attention(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    query, key, value = (_input(node, index, facts) for index in range(3))
    if query is None or key is None or value is None:
        return []
    if len(query) == 4:
        return [(*query[:3], value[-1])]
    heads, kv_heads = attribute(node, "q_num_heads", 1), attribute(node, "kv_num_heads", 1)
    each = sizes.exact_quotient(value[-1], kv_heads)
    return [(*query[:2], facts.fresh(node.outputs[0], 2) if each is None else each * heads)]


def _contrib_attention(node: ir.Node, facts: Facts) -> Sequence[Dims | None]:
    query, value = _input(node, 0, facts), _input(node, 2, facts)
    if query is None or value is None or len(query) != 3:
        return []
    return [(*query[:2], value[-1] if len(value) == 3 and node.op_type == "MultiHeadAttention" else query[-1])]


def _rules(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


SHAPE_RULES: dict[str, Rule] = {
    **_rules("Identity Cast CastLike Relu Gelu FastGelu QuickGelu BiasGelu Erf Tanh Sigmoid Exp Log Sqrt Reciprocal Neg Abs Not", _same),
    **_rules("IsNaN IsInf Softmax LogSoftmax CumSum Trilu Clip Floor Ceil Round Sign Sin Cos HardSigmoid HardSwish Elu", _same),
    **_rules("LeakyRelu Softplus Mish InstanceNormalization GroupNormalization BitwiseNot RMSNormalization", _same),
    **_rules("SimplifiedLayerNormalization RotaryEmbedding ScatterND ScatterElements Scatter LpNormalization Celu Selu Swish", _same),
    **_rules("BiasSoftmax QuantizeLinear DequantizeLinear ReverseSequence TensorScatter Bernoulli RandomUniformLike", _same),
    **_rules("LayerNormalization BatchNormalization Dropout SkipLayerNormalization", _first_with_fresh_rest),
    **_rules("SkipSimplifiedLayerNormalization", _first_with_fresh_rest),
    **_rules("Add Sub Mul Div Pow Mod Min Max Sum Mean And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Where PRelu", _broadcast),
    **_rules("BitwiseAnd BitwiseOr BitwiseXor BitShift", _broadcast),
    **_rules("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp", _reduce),
    **_rules("ArgMax ArgMin", _arg_reduce),
    **_rules("MatMul FusedMatMul", _matmul),
    **_rules("Conv ConvTranspose", _conv),
    **_rules("MaxPool AveragePool GlobalAveragePool GlobalMaxPool DepthToSpace SpaceToDepth LpPool", _spatial),
    **_rules("Resize Upsample Compress", _same_rank),
    **_rules("MultiHeadAttention GroupQueryAttention", _contrib_attention),
    "Attention": _attention,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _second,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "NonZero": _non_zero,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda node, facts: [()],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
