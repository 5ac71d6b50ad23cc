"""Constants that are computed from others: nodes on weights alone become one constant, and nothing is read for it.

    values = [merged]                    # the output of a Concat of rearranged weights
    fold(values, builder)                # now an initializer; the nodes and the weights that nothing else needs are gone

The content is computed when it is asked for, as when the model is written, and not kept: so no more than one such constant is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.build import Builder, new_weight
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, constant_tensor, read_tensor
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.tensors import Computed
from onnx_attnfuse.graph.uses import producer_of

_Read = Callable[[dict[ir.Value, Array]], Array]
"""The content of a value; contents read on the way are kept in the dictionary, for constants that are read more than once."""


def fold(values: Iterable[ir.Value], builder: Builder, hint: str) -> int:
    """Puts an initializer in the place of each value that is still there and whose shape is known.

    In functions, which have no initializers, they stay as they are.

    Args:
        values: Outputs of nodes on constants alone.
        builder: The builder of their graph.
        hint: Name of the initializers, made unique.

    Returns:
        How many there are.
    """
    graph, count = builder.graph, 0
    for value in dict.fromkeys(values):
        node = value.producer()
        if node is None or node.graph is not graph or builder.is_function:
            continue
        dtype, dims = builder.facts.dtype(value), builder.facts.dims(value)
        assert dtype is not None
        lengths = [dim for dim in dims or () if isinstance(dim, int)]
        if dims is None or len(lengths) < len(dims):
            continue  # a constant has a shape, and this one's is computed at run time
        sources: dict[int, ir.TensorProtocol] = {}
        read = _reading(value, sources)
        name = builder.name(hint)
        tensor = Computed(lambda read=read: read({}), tuple(sources.values()), dtype, ir.Shape(lengths), name)
        folded = new_weight(graph, name, tensor)
        builder.facts.copy(value, folded)
        value.replace_all_uses_with(folded)
        sweep([value])
        count += 1
    return count


def content(value: ir.Value) -> Array:
    """The content of a value that is rearranged from constants, read at once; for small values.

    Raises:
        ModelError: The data of a constant is gone.
    """
    return _reading(value, {})({})


def _reading(value: ir.Value, sources: dict[int, ir.TensorProtocol]) -> _Read:
    """How to compute a value, in terms that outlive its nodes; the constants that it takes go into `sources`."""
    tensor = constant_tensor(value)
    if tensor is not None:
        sources[id(tensor)] = tensor
        return lambda known: _kept(value, tensor, known)
    node = producer_of(value)
    inputs = [_reading(item, sources) for item in _data(node)]
    if node.op_type == "Split":
        return _split(node, inputs, node.outputs.index(value))
    return _OPERATORS[node.op_type](node, inputs)


def _kept(value: ir.Value, tensor: ir.TensorProtocol, known: dict[ir.Value, Array]) -> Array:
    if value not in known:
        array = read_tensor(tensor)
        if array is None:
            raise ModelError(f"the data of the weight {tensor.name!r} is gone; put the file back and try again")
        known[value] = array
    return known[value]


def _data(node: ir.Node) -> list[ir.Value]:
    """The inputs whose elements come out again, or are computed with."""
    return [value for value in (node.inputs if node.op_type in _OF_ALL else node.inputs[:1]) if value is not None]


def _numbers(node: ir.Node, index: int) -> list[int]:
    array = constant_array(node.inputs[index])
    assert array is not None
    return [int(number) for number in array]


def _concat(node: ir.Node, inputs: list[_Read]) -> _Read:
    axis: int = attribute(node, "axis")
    return lambda known: np.concatenate([read(known) for read in inputs], axis)


def _expand(node: ir.Node, inputs: list[_Read]) -> _Read:
    shape = tuple(_numbers(node, 1))

    def read(known: dict[ir.Value, Array]) -> Array:
        array = inputs[0](known)
        return np.broadcast_to(array, np.broadcast_shapes(array.shape, shape))

    return read


def _reshape(node: ir.Node, inputs: list[_Read]) -> _Read:
    shape = _numbers(node, 1)
    return lambda known: inputs[0](known).reshape(shape)


def _transpose(node: ir.Node, inputs: list[_Read]) -> _Read:
    perm: list[int] = attribute(node, "perm")
    return lambda known: np.transpose(inputs[0](known), perm)


def _slice(node: ir.Node, inputs: list[_Read]) -> _Read:
    (start,), (end,), (axis,) = (_numbers(node, index) for index in (1, 2, 3))
    place = (*[slice(None)] * axis, slice(start, end))

    def read(known: dict[ir.Value, Array]) -> Array:
        return inputs[0](known)[place]

    return read


def _split(node: ir.Node, inputs: list[_Read], place: int) -> _Read:
    """One part of a Split, by lengths or into equal ones."""
    axis: int = attribute(node, "axis", 0)
    lengths = _numbers(node, 1) if len(node.inputs) > 1 else None
    count = len(node.outputs)

    def read(known: dict[ir.Value, Array]) -> Array:
        array = inputs[0](known)
        each = -(-array.shape[axis] // count)
        ends = [each * part for part in range(1, count)] if lengths is None else np.cumsum(lengths)[:-1]
        return np.split(array, ends, axis)[place]

    return read


def _add(node: ir.Node, inputs: list[_Read]) -> _Read:
    return lambda known: inputs[0](known) + inputs[1](known)


def _matmul(node: ir.Node, inputs: list[_Read]) -> _Read:
    """A product, summed in float64 and rounded once."""

    def read(known: dict[ir.Value, Array]) -> Array:
        left, right = (item(known) for item in inputs)
        return (left.astype(np.float64) @ right.astype(np.float64)).astype(right.dtype)

    return read


_OF_ALL = frozenset(["Add", "Concat", "MatMul"])
"""Operators on several tensors; of others the first input alone is one, and the others say how to change it."""
_OPERATORS: dict[str, Callable[[ir.Node, list[_Read]], _Read]] = {
    "Add": _add,
    "Concat": _concat,
    "Expand": _expand,
    "MatMul": _matmul,
    "Reshape": _reshape,
    "Slice": _slice,
    "Transpose": _transpose,
}
"""Operators that rearrange and sum constants."""
