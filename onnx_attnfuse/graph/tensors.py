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
    for attribute in node.attributes.data.values():
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
        if type(tensor) is ir.ExternalTensor:
            beside.append(tensor)
        problem = _payload_problem(tensor)
        if problem:
            raise ModelError(
                f"{where}: tensor {tensor.name!r} {problem}; export the model again or report it to the tool that wrote it"
            )
    return beside


def _payload_problem(tensor: ir.TensorProtocol) -> str | None:
    dtype, dims = tensor.dtype, tensor.shape.numpy()
    if dtype == ir.DataType.UNDEFINED:
        return "has no element type"
    if dims and min(dims) < 0:
        return f"has a negative dimension in its shape {list(dims)}"
    size = math.prod(dims)
    wanted, unit = (size, "strings") if dtype == ir.DataType.STRING else (math.ceil(size * dtype.bitwidth / 8), "bytes")
    if isinstance(tensor, ir.serde.TensorProtoTensor):
        proto = tensor.raw
        if proto.HasField("raw_data"):
            given = len(proto.raw_data)
        else:
            given, unit = len(getattr(proto, onnx.helper.tensor_dtype_to_field(proto.data_type))), "numbers"
            wanted = 2 * size if dtype in _COMPLEX else wanted if dtype.bitwidth in _PACKED_BITS else size
    elif isinstance(tensor, ir.ExternalTensor):
        given = tensor.length
    elif isinstance(tensor, ir.StringTensor):
        given = len(tensor.string_data())
    else:
        return None
    if given is None or given == wanted:
        return None
    return f"has {given} {unit} of data where {dtype} {list(dims)} takes {wanted}"
