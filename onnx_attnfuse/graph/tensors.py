"""Every tensor a model holds, and whether each holds what its type and shape promise. No payload is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.constants import Array, all_parts

_COMPLEX = (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)
_PACKED_BITS = (2, 4)


def bodies(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, and the graph of each function."""
    yield model.graph
    yield from (function.graph for function in model.functions.values())


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, the bodies of functions, and all their subgraphs."""
    for graph in bodies(model):
        yield from all_parts(graph)


def all_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Initializers and tensor attributes of all graphs."""
    for graph in all_graphs(model):
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)
        for node in graph:
            yield from _attribute_tensors(node)


def _attribute_tensors(node: ir.Node) -> Iterator[ir.TensorProtocol]:
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
            yield attribute.value
        elif attribute.type is ir.AttributeType.TENSORS and not attribute.is_ref():
            yield from attribute.value


class Computed(ir.LazyTensor):
    """A constant that is computed from others whenever it is asked for, and not kept."""

    def __init__(
        self, read: Callable[[], Array], sources: tuple[ir.TensorProtocol, ...], dtype: ir.DataType, shape: ir.Shape, name: str
    ) -> None:
        super().__init__(lambda: ir.tensor(np.ascontiguousarray(read()), dtype=dtype, name=name), dtype, shape, name=name)
        self.sources = sources
        """The constants that the content is computed from."""

    @property
    def lies_beside(self) -> bool:
        """Whether the tensor is computed from weights in files beside the model, and so belongs there too."""
        return any(isinstance(source, ir.ExternalTensor) for source in self.sources)


def data_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The tensors in files that the model refers to, and those that constants are computed from."""
    for tensor in all_tensors(model):
        found = tensor.sources if isinstance(tensor, Computed) else (tensor,)
        yield from (item for item in found if isinstance(item, ir.ExternalTensor))


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The tensors whose data lies in files beside the model."""
    return (tensor for tensor in all_tensors(model) if isinstance(tensor, ir.ExternalTensor))


def check_payloads(model: ir.Model, where: str) -> list[ir.ExternalTensor]:
    """Check that each tensor has as much data as its type and shape ask for, as far as the model file tells.

    Returns:
        The tensors whose data lies in files beside the model.

    Raises:
        ModelError: One has not.
    """
    beside: list[ir.ExternalTensor] = []
    for tensor in all_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            beside.append(tensor)
        problem = _payload_problem(tensor)
        if problem:
            raise ModelError(
                f"{where}: tensor {tensor.name!r} {problem}; export the model again or report it to the tool that wrote it"
            )
    return beside


def _payload_problem(tensor: ir.TensorProtocol) -> str | None:
    if tensor.dtype == ir.DataType.UNDEFINED:
        return "has no element type"
    dims = tensor.shape.numpy()
    if dims and min(dims) < 0:
        return f"has a negative dimension in its shape {list(dims)}"
    if isinstance(tensor, ir.ExternalTensor):
        given, wanted, unit = tensor.length, tensor.nbytes, "bytes"
    elif isinstance(tensor, ir.StringTensor):
        given, wanted, unit = len(tensor.string_data()), tensor.size, "strings"
    elif isinstance(tensor, ir.serde.TensorProtoTensor):
        given, wanted, unit = _inline_payload(tensor)
    else:
        return None
    if given is None or given == wanted:
        return None
    return f"has {given} {unit} of data where {tensor.dtype} {list(dims)} takes {wanted}"


def _inline_payload(tensor: ir.serde.TensorProtoTensor) -> tuple[int, int, str]:
    proto = tensor.raw
    if proto.HasField("raw_data"):
        return len(proto.raw_data), tensor.nbytes, "bytes"
    given = len(getattr(proto, onnx.helper.tensor_dtype_to_field(proto.data_type)))
    if tensor.dtype in _COMPLEX:
        return given, 2 * tensor.size, "numbers"
    if tensor.dtype.bitwidth in _PACKED_BITS:
        return given, math.ceil(tensor.size * tensor.dtype.bitwidth / 8), "numbers"
    return given, tensor.size, "numbers"
