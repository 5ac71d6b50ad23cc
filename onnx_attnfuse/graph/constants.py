"""Constants and attributes, whichever of ONNX's ways they are written in."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.graph.ops import is_standard

Array: TypeAlias = npt.NDArray[Any]

MAX_READ_ELEMENTS = 1 << 16
"""Constants of more elements are weights, which are not read while a model is understood."""

_NESTED = frozenset([ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS])


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer (one that is no graph input) or of a Constant node, else None."""
    if value is None:
        return None
    if value.const_value is not None:
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if not is_standard(node, "Constant"):
        return None
    for name, attribute in node.attributes.items():
        content = attribute.value
        if name == "value":
            tensor = content
        elif name in {"value_int", "value_ints"}:
            tensor = ir.tensor(np.asarray(content, np.int64))
        elif name in {"value_float", "value_floats"}:
            tensor = ir.tensor(np.asarray(content, np.float32))
        else:
            return None
        value.const_value = tensor
        return tensor
    return None


def is_constant(value: ir.Value | None) -> bool:
    """Whether the value is the same in every run."""
    return constant_tensor(value) is not None


def constant_array(value: ir.Value | None, limit: int = MAX_READ_ELEMENTS) -> Array | None:
    """The constant as an array, if it has at most `limit` elements; larger ones (weights) are not read from disk."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > limit:
        return None
    return read_tensor(tensor)


def read_tensor(tensor: ir.TensorProtocol) -> Array | None:
    """The tensor's content; None if its data file cannot be read.

    A tensor in a data file is read by itself: onnx-ir maps the whole file for each, and refuses linked files, which is how
    model caches keep them.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor.numpy()
    try:
        with pathlib.Path(tensor.path).open("rb") as file:
            file.seek(tensor.offset or 0)
            data = file.read(tensor.nbytes)
    except OSError:
        return None
    if len(data) != tensor.nbytes:
        return None
    flat: Array = np.frombuffer(data, tensor.dtype.numpy())
    return flat.reshape(tuple(tensor.shape.numpy()))


def is_readable(tensor: ir.TensorProtocol) -> bool:
    """Whether the content is there; it is not read."""
    return not isinstance(tensor, ir.ExternalTensor) or pathlib.Path(tensor.path).is_file()


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The attribute's value, or `default`; a reference to a function's parameter counts as absent."""
    found = node.attributes.get(name)
    if found is None or found.is_ref():
        return default
    content: Any = found.value
    return list(cast("tuple[Any, ...]", content)) if isinstance(content, tuple) else content


def given(node: ir.Node, index: int) -> ir.Value | None:
    """An input of a node, or None if it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def needed(node: ir.Node, index: int) -> ir.Value:
    """An input of a node that cannot be left out."""
    value = node.inputs[index]
    assert value is not None
    return value


def both_ways(node: ir.Node | None, op: str) -> list[tuple[ir.Value, ir.Value]]:
    """The operands of a node of two, in both orders; none if it is another one."""
    if not is_standard(node, op):
        return []
    left, right = node.inputs
    return [] if left is None or right is None else [(left, right), (right, left)]


def attributes(node: ir.Node) -> dict[str, Any]:
    """All attributes of a node by name, to build one like it."""
    return {name: item.value for name, item in node.attributes.items()}


def has_unknown_attribute(node: ir.Node) -> bool:
    """Whether an attribute's value is a function's parameter, so that the node cannot be read here."""
    return any(found.is_ref() for found in node.attributes.data.values())


def subgraphs(node: ir.Node) -> Sequence[ir.Graph]:
    """The graphs nested in a node: branches and bodies."""
    found = node.attributes.data
    for item in found.values():
        if item.type in _NESTED:
            break
    else:
        return ()
    held = [item for item in found.values() if item.type in _NESTED and not item.is_ref()]
    return [graph for item in held for graph in ((item.as_graph(),) if item.type is ir.AttributeType.GRAPH else item.as_graphs())]


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """The values that a node reads, those that its nested graphs read and give included."""
    yield from (value for value in node.inputs if value is not None)
    for nested in subgraphs(node):
        yield from (value for inner in nested.all_nodes() for value in inner.inputs if value is not None)
        yield from nested.outputs


def all_parts(graph: ir.Graph) -> Iterator[ir.Graph]:
    """A graph, followed by the graphs nested in it."""
    yield graph
    for node in graph:
        for nested in subgraphs(node):
            yield from all_parts(nested)


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph, each followed by those of the graphs nested in it."""
    for node in graph:
        yield node
        for nested in subgraphs(node):
            yield from all_nodes(nested)
