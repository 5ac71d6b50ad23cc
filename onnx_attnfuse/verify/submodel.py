"""A subgraph as a model of its own, a key that equal subgraphs share, and subgraphs with shorter axes.

ONNX Runtime's CPU has no kernels for bfloat16, and float16 is rounded at every node. So a submodel can also
be made `widened`: inputs, constants and cast targets of both types become float32.

A piece whose lengths are fixed and too large to be run becomes one of the same structure with a shorter axis (`smaller`). A
length in the shapes of inputs is replaced everywhere by a small one: in these shapes, in multiples of it, in integer
constants, in attributes, and constant tables are cut. The smaller piece is a graph of its own with facts of its own. Where its
numbers do not fit together any more the original does not run, and nothing is said to be equal.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.graph import dtypes, sizes
from onnx_attnfuse.graph.assumptions import Assumed
from onnx_attnfuse.graph.constants import constant_tensor, read_tensor, subgraphs
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import reached
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.inputs import Array, Slot
from onnx_attnfuse.verify.runtime import PieceSession, Reference, load
from onnx_attnfuse.verify.subgraph import Input, Subgraph, is_addend, is_score

_IR_VERSION = 10
_TYPE_ATTRIBUTES = frozenset(["to", "dtype", "softmax_precision", "stash_type"])
"""Attributes that name an element type."""
_IN_FULL = 1 << 12
"""Bytes of a constant that go into a key as they are; of larger ones a digest does."""

Functions = Mapping[ir.OperatorIdentifier, ir.Function]
_FEW = 24
"""The length of the longest axis after shortening, the next one to a third more, and so on, so that no two become
equal; above the largest number of the piece that an axis reaches."""
_LONG = 256
"""The least length that is shortened; heads, channels of a head and groups have fewer."""
_LISTED = 64
"""Integer constants of at most this many elements are shapes and bounds, in which the length is looked for."""


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
        attributes = [self._attribute(attribute) for attribute in node.attributes.values()]
        copy = _copied(node, attributes, _unique(node.name, self._node_names) if node.name else None, self._values)
        for value, output in zip(node.outputs, copy.outputs, strict=True):
            output.name = self._name(value) if value.name else ""
        return copy

    def _attribute(self, attribute: ir.Attr) -> ir.Attr:
        if attribute.type == ir.AttributeType.GRAPH:
            if self._widened:
                raise Refused("control-flow", "there is control flow in it, in a type of 16 bits")
            return ir.AttrGraph(attribute.name, self._nested(attribute.as_graph()))
        if not self._widened:
            return attribute
        return widened_attribute(attribute, lambda tensor: ir.tensor(self._array(tensor)))

    def _nested(self, graph: ir.Graph) -> ir.Graph:
        """A copy of the body of a loop, which reads values of the piece."""
        copy = graph.clone(allow_outer_scope_values=True)
        for node in copy.all_nodes():
            for place, value in enumerate(node.inputs):
                if value in self._values:
                    node.replace_input_with(place, self._values[value])
        for place, value in enumerate(copy.outputs):
            copy.outputs[place] = self._values.get(value, value)
        return copy


def _copied(node: ir.Node, attributes: Sequence[ir.Attr], name: str | None, values: dict[ir.Value, ir.Value]) -> ir.Node:
    """A copy of a node that reads copies of values; its outputs are added to these, without names."""
    inputs = [None if value is None else values[value] for value in node.inputs]
    copy = ir.Node(
        node.domain, node.op_type, inputs, attributes, overload=node.overload, num_outputs=len(node.outputs), name=name
    )
    values.update(zip(node.outputs, copy.outputs, strict=True))
    return copy


@dataclasses.dataclass
class Runnable:
    """A submodel that is loaded when it is first run."""

    model: Submodel
    start: Callable[[onnx.ModelProto], PieceSession | Reference] = load

    @functools.cached_property
    def session(self) -> PieceSession | Reference:
        """The session; a piece that is not taken raises RuntimeRefusal here."""
        return self.start(self.model.proto)

    def run(self, inputs: Mapping[str, Array], *, apart: bool) -> list[Array]:
        """The results; in another process if `apart`.

        Raises:
            RuntimeRefusal: It is not taken, or ended with an error.
            ProcessDied: It was run apart and ended its process.
        """
        self.session.apart = apart
        return self.session.run(self.model.results, {slot.name: inputs[slot.name] for slot in self.model.slots})


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

    def called(nodes: Iterable[ir.Node]) -> Iterator[ir.Function]:
        return (functions[name] for node in nodes if (name := node.op_identifier()) in functions)

    return list(reached(called(nodes), lambda function: called(function.all_nodes())))


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
        if attribute.type == ir.AttributeType.GRAPH:
            return attribute.name, attribute.as_graph()  # a body is like no other
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


def smaller(subgraph: Subgraph, assumed: Assumed) -> Iterator[tuple[int, Subgraph, Facts]]:
    """For each long axis, longest first, its length and the piece with this and the longer ones shortened.

    Then the same for each side of a square of cells that are a long axis, alone; tables and channels stay.
    """
    lengths = {dim for item in subgraph.inputs for dim in item.dims if isinstance(dim, int)}
    axes = sorted((dim for dim in lengths if dim >= _LONG), reverse=True)
    sides = [dim for dim in map(math.isqrt, axes) if dim * dim in axes and dim in lengths]
    if any(list(subgraphs(node)) for node in subgraph.nodes):
        return
    bounds, whole = _numbers(subgraph), subgraph
    for place, length in [*enumerate(axes, 3), *((1, side) for side in sides)]:
        few = place * _FEW // 3 + max((number for number in bounds if number < length), default=0)
        if few < length:
            is_side = length < _LONG
            subgraph, facts = _Shortened(length, few, is_side=is_side).of(whole if is_side else subgraph, assumed)
            yield length, subgraph, facts


def _numbers(subgraph: Subgraph) -> set[int]:
    """The single whole numbers of a piece, as windows and offsets are: an axis that ends before one shows nothing of it."""
    tensors = (constant_tensor(value) for value in subgraph.constants)
    arrays = (read_tensor(tensor) for tensor in tensors if tensor is not None and tensor.size == 1)
    found = [float(array.item()) for array in arrays if array is not None and array.dtype.kind in "iuf"]
    attributes = (item for node in subgraph.nodes for item in node.attributes.values())
    found += [item.as_int() for item in attributes if item.type == ir.AttributeType.INT]
    return {int(number) for number in found if math.isfinite(number) and number > 1}


class _Shortened:
    """One length of a piece replaced, with its multiples, or with its square."""

    def __init__(self, length: int, few: int, *, is_side: bool) -> None:
        self._length, self._few, self._is_side = length, few, is_side
        self._values: dict[ir.Value, ir.Value] = {}

    def of(self, subgraph: Subgraph, assumed: Assumed) -> tuple[Subgraph, Facts]:
        inputs = [
            dataclasses.replace(item, value=self._value(item.value), dims=tuple(map(self._dim, item.dims)))
            for item in subgraph.inputs
        ]
        constants = [self._value(value) for value in subgraph.constants]
        nodes = [self._node(node) for node in subgraph.nodes]
        results = tuple(self._values[value] for value in subgraph.results)
        fed = [item.value for item in inputs if item.value.const_value is None]
        known = [(item.dims, item.dtype) for item in inputs if item.value.const_value is None]
        held = [item.value for item in inputs if item.value.const_value is not None]
        graph = ir.Graph(fed, list(dict.fromkeys(results)), nodes=nodes, initializers=[*held, *constants], name="smaller")
        return Subgraph(tuple(nodes), tuple(inputs), tuple(constants), results), Facts(graph, known, assumed)

    def _dim(self, dim: Dim) -> Dim:
        if self._is_side:
            return self._int(dim) if isinstance(dim, int) else dim
        each = sizes.exact_quotient(dim, self._length)
        return dim if each is None or dim == 0 else each * self._few

    def _int(self, number: int) -> int:
        if self._is_side:
            return {self._length: self._few, self._length**2: self._few**2}.get(number, number)
        return number if number % self._length else number // self._length * self._few

    def _value(self, value: ir.Value) -> ir.Value:
        tensor = constant_tensor(value)
        copy = ir.Value(name=value.name, type=value.type)
        if tensor is not None:
            copy.const_value = self._tensor(tensor)
            copy.shape, copy.type = ir.Shape(copy.const_value.shape.numpy()), ir.TensorType(tensor.dtype)
        self._values[value] = copy
        return copy

    def _tensor(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        dims = tensor.shape.numpy()
        listed = tensor.size <= _LISTED and len(dims) < 2 and tensor.dtype in {ir.DataType.INT64, ir.DataType.INT32}
        cut = tuple(slice(dim if self._is_side else self._int(dim)) for dim in dims)
        array = read_tensor(tensor) if listed or any(part.stop != dim for part, dim in zip(cut, dims, strict=True)) else None
        if array is None:
            return tensor
        array = array[cut]
        if listed:
            array = np.vectorize(self._int, otypes=[array.dtype])(array) if array.size else array
        return ir.tensor(np.ascontiguousarray(array).reshape(array.shape), dtype=tensor.dtype, name=tensor.name)

    def _node(self, node: ir.Node) -> ir.Node:
        copy = _copied(node, [self._attribute(item) for item in node.attributes.values()], node.name, self._values)
        for value, output in zip(node.outputs, copy.outputs, strict=True):
            output.name, output.type = value.name, value.type
        return copy

    def _attribute(self, attribute: ir.Attr) -> ir.Attr:
        if attribute.type == ir.AttributeType.INTS:
            return ir.AttrInt64s(attribute.name, [self._int(number) for number in attribute.as_ints()])
        if attribute.type == ir.AttributeType.TENSOR:
            return ir.AttrTensor(attribute.name, self._tensor(attribute.as_tensor()))
        return attribute
