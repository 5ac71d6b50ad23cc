"""A subgraph as a model of its own, and a key that equal subgraphs share.

ONNX Runtime's CPU has no kernels for bfloat16, and float16 is rounded at every node. So a submodel can also
be made `widened`: inputs, constants and cast targets of both types become float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.graph import dtypes
from onnx_attnfuse.graph.constants import constant_tensor, read_tensor
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.inputs import Array, Slot
from onnx_attnfuse.verify.subgraph import Input, Subgraph, is_addend, is_score

_IR_VERSION = 10
_TYPE_ATTRIBUTES = frozenset(["to", "dtype", "softmax_precision", "stash_type"])
"""Attributes that name an element type."""
_IN_FULL = 1 << 12
"""Bytes of a constant that go into a key as they are; of larger ones a digest does."""

Functions = Mapping[ir.OperatorIdentifier, ir.Function]


class Submodel:
    """A model made of a piece, with names of its own for inputs and outputs."""

    def __init__(
        self, subgraph: Subgraph, opsets: Mapping[str, int], functions: Functions, *, widened: bool, shapes: bool = False
    ) -> None:
        """Makes the model.

        Args:
            subgraph: The subgraph to compute.
            opsets: Opset imports of the graph it is cut from.
            functions: The model's own functions.
            widened: Compute in float32 values in float16 or bfloat16.
            shapes: Give the shapes of the results in place of the results.
        """
        self._widened = widened
        self._names: set[str] = set()
        self._node_names: set[str] = set()
        self._values: dict[ir.Value, ir.Value] = {}
        inputs = [self._input(item) for item in subgraph.inputs]
        constants = [self._constant(value) for value in subgraph.constants]
        nodes = [self._node(node) for node in subgraph.nodes]
        results = [self._values[value] for value in subgraph.results]
        if shapes:
            asked = [ir.node("Shape", [value]) for value in results]
            nodes, results = [*nodes, *asked], [node.outputs[0] for node in asked]
            for count, value in enumerate(results):
                value.name = f"shape of {count}"
        outputs = list(dict.fromkeys(results))
        used = _used_functions(subgraph.nodes, functions)
        domains = {node.domain for node in subgraph.nodes} - {function.domain for function in used}
        imports = {domain: opsets.get(domain, 1) for domain in sorted(domains | {""})} | {function.domain: 1 for function in used}
        graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=constants, opset_imports=imports, name="piece")
        self.proto: onnx.ModelProto = ir.to_proto(ir.Model(graph, ir_version=_IR_VERSION, functions=used))
        read = subgraph.read()
        self.slots: list[Slot] = [
            Slot(
                name=value.name or "",
                role=item.role,
                dtype=dtypes.widened(item.dtype) if widened else item.dtype,
                rank=len(item.dims),
                summed=item.summed,
                blank=item.value not in read,
                addend=is_addend(item.value),
                score=is_score(item.value),
                array=self._fed(item),
            )
            for item, value in zip(subgraph.inputs, inputs, strict=True)
        ]
        self.results: list[str] = [value.name or "" for value in results]

    def _name(self, value: ir.Value) -> str:
        return _unique(value.name or "value", self._names)

    def _input(self, item: Input) -> ir.Value:
        dtype = dtypes.widened(item.dtype) if self._widened else item.dtype
        shape = ir.Shape([dim if isinstance(dim, int) else None for dim in item.dims])
        copy = ir.Value(name=self._name(item.value), shape=shape, type=ir.TensorType(dtype))
        self._values[item.value] = copy
        return copy

    def _fed(self, item: Input) -> Array | None:
        tensor = constant_tensor(item.value) if item.role == "constant" else None
        return None if tensor is None else self._array(tensor)

    def _array(self, tensor: ir.TensorProtocol) -> Array:
        array = _read(tensor)
        return array.astype(np.float32) if self._widened and tensor.dtype in HALVES else array

    def _constant(self, value: ir.Value) -> ir.Value:
        tensor = constant_tensor(value)
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor) or (self._widened and tensor.dtype in HALVES):
            tensor = ir.tensor(self._array(tensor))
        copy = ir.Value(
            name=self._name(value), shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self._values[value] = copy
        return copy

    def _node(self, node: ir.Node) -> ir.Node:
        inputs = [None if value is None else self._values[value] for value in node.inputs]
        attributes = [self._attribute(attribute) if self._widened else attribute for attribute in node.attributes.values()]
        name = _unique(node.name, self._node_names) if node.name else None
        copy = ir.Node(
            node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(node.outputs), name=name
        )
        for value, output in zip(node.outputs, copy.outputs, strict=True):
            output.name = self._name(value) if value.name else ""
            self._values[value] = output
        return copy

    def _attribute(self, attribute: ir.Attr) -> ir.Attr:
        return widened_attribute(attribute, lambda tensor: ir.tensor(self._array(tensor)))


def _unique(name: str, taken: set[str]) -> str:
    """A name that is not taken yet, and is from now on. Nodes of several graphs may share a name, those of one may not."""
    found, count = name, 0
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found


def widened_attribute(attribute: ir.Attr, wide: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> ir.Attr:
    """An attribute with float32 in the place of a half type: the type that it names, or the tensor, made so by `wide`."""
    if attribute.name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT:
        return ir.AttrInt64(attribute.name, dtypes.widened(ir.DataType(attribute.as_int())).value)
    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALVES:
        return ir.AttrTensor(attribute.name, wide(attribute.as_tensor()))
    return attribute


def _used_functions(nodes: Iterable[ir.Node], functions: Functions) -> list[ir.Function]:
    """The model's own functions that `nodes` call, and those that these call."""
    found: dict[ir.OperatorIdentifier, ir.Function] = {}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        function = functions.get(node.op_identifier())
        if function is not None and node.op_identifier() not in found:
            found[node.op_identifier()] = function
            pending.extend(function.all_nodes())
    return list(found.values())


class Keys:
    """Keys that structurally equal pieces share; remembers digests of large constants."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[ir.TensorProtocol, bytes]] = {}

    def key(self, subgraph: Subgraph, shapes: Sequence[Sequence[Sequence[int]]], opsets: Mapping[str, int]) -> tuple[object, ...]:
        """A key that is equal for pieces that behave alike: operators, attributes, constants, types and sizes, no names."""
        numbers: dict[ir.Value | None, int] = {None: -1}
        inputs: list[object] = []
        for item in subgraph.inputs:
            numbers[item.value] = len(numbers)
            tensor = constant_tensor(item.value) if item.role == "constant" else None
            inputs.append((item.role, item.dtype, None if tensor is None else self._content(tensor)))
        constants: list[object] = []
        for value in subgraph.constants:
            numbers[value] = len(numbers)
            tensor = constant_tensor(value)
            constants.append(None if tensor is None else self._content(tensor))
        nodes: list[object] = []
        for node in subgraph.nodes:
            attributes = tuple(self._attribute(attribute) for attribute in node.attributes.values())
            nodes.append((node.domain, node.op_type, node.overload, attributes, tuple(numbers[value] for value in node.inputs)))
            for output in node.outputs:
                numbers[output] = len(numbers)
        results = tuple(numbers[value] for value in subgraph.results)
        sizes = tuple(tuple(map(tuple, choice)) for choice in shapes)
        return (tuple(inputs), tuple(constants), tuple(nodes), results, sizes, tuple(sorted(opsets.items())))

    def _attribute(self, attribute: ir.Attr) -> object:
        if attribute.type == ir.AttributeType.TENSOR:
            return attribute.name, self._content(attribute.as_tensor())
        return attribute.name, str(attribute.type), str(attribute.value)

    def _content(self, tensor: ir.TensorProtocol) -> object:
        dims = tuple(tensor.shape.numpy())
        if tensor.nbytes <= _IN_FULL:
            return tensor.dtype, dims, _bytes(tensor)
        known = self._digests.get(id(tensor))
        if known is None:
            known = tensor, hashlib.blake2b(_bytes(tensor), digest_size=16).digest()
            self._digests[id(tensor)] = known
        return tensor.dtype, dims, known[1]


def _read(tensor: ir.TensorProtocol) -> Array:
    array = read_tensor(tensor)
    if array is None:
        raise Refused("unreadable-constant", f"the data of '{tensor.name}' cannot be read")
    return array


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    return _read(tensor).tobytes() if isinstance(tensor, ir.ExternalTensor) else tensor.tobytes()
