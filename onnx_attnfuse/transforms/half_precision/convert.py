"""A model to a half type: functions opened, islands found, everything else narrowed, the result compared with the model.

Constants are rounded, types restated, and a Cast is put wherever float32 and the half type meet.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common

from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError, VerificationError
from onnx_attnfuse.graph.build import new_weight
from onnx_attnfuse.graph.constants import Array, attribute, constant_tensor, is_standard, subgraphs
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, is_attention
from onnx_attnfuse.graph.scopes import all_names
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.transforms.half_precision.keep_float32 import IslandFinder, Islands, is_fixed, ordered, rounded
from onnx_attnfuse.transforms.half_precision.options import Conversion
from onnx_attnfuse.verify.compare_models import verify_models
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.runtime import INSTALL, available
from onnx_attnfuse.verify.verdict import Verification

_DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_SINCE = {"float16": 11, "bfloat16": 13}
"""The opset from which on the operators written here take a type."""
_MAX_COMPARED_WEIGHT_BYTES = 1 << 30
"""Bytes of weights of a model that is still compared in memory."""
_FLOAT = ir.DataType.FLOAT


@dataclasses.dataclass(frozen=True)
class ConversionReport(JsonReport):
    """Report of a conversion: counts of operators, casts and weights, and how far the result is from the original."""

    dtype: str
    nodes: int
    """Operators that compute in the half type."""
    islands: Mapping[str, int]
    """Operators that stay float32, by operator."""
    casts: int
    """Casts that were added."""
    bytes_before: int
    """Size of all weights."""
    bytes_after: int
    seconds: float
    verification: Verification | None = None
    """The result against the model; None if they were not compared."""
    notes: tuple[str, ...] = ()


def verified(before: str | ir.Model, model: ir.Model, conversion: Conversion) -> ConversionReport:
    """Converts in place, and compares the result with the model as it was.

    Args:
        before: The model as it was, or its file.
        model: The model to convert.
        conversion: Choices.

    Raises:
        MissingDependencyError: It is to be compared, and onnxruntime is absent.
        ModelError: It cannot be converted.
        OptionError: A choice cannot be had.
        VerificationError: The result differs.
    """
    if conversion.verify not in {None, "none", "model"}:
        raise OptionError(f"verify is {conversion.verify!r}; choose none or model")
    if conversion.verify == "model" and not available():
        raise MissingDependencyError(f"verification needs onnxruntime; {INSTALL}, or pass --verify none")
    report = convert(model, conversion)
    if conversion.verify == "none" or not available():
        return report
    if report.bytes_before > _MAX_COMPARED_WEIGHT_BYTES:
        note = f"not compared: weights of {report.bytes_before >> 20} MB are too many to be held twice; compare the files"
        return dataclasses.replace(report, notes=(note,))
    try:
        found = verify_models(before, model)
    except ModelError as error:
        return dataclasses.replace(report, notes=(f"not compared: {error}",))
    if not found.equal:
        raise VerificationError(f"the converted model differs: {found.detail}; {_remedy(model)}")
    return dataclasses.replace(report, verification=found)


def _remedy(model: ir.Model) -> str:
    """Advice about a difference: fused attention adds masks in the half type, which shows in fully masked rows."""
    if any(is_attention(node) for node in model.graph.all_nodes()):
        return "unfuse its attention with attnfuse unfuse, convert the result and fuse it again"
    return "pass --verify none to have it all the same"


def convert(model: ir.Model, conversion: Conversion) -> ConversionReport:
    """Converts in place.

    Raises:
        ModelError: Nothing in the model is float32, or a type in it is unknown.
        OptionError: The type is not one of those offered, or the model's opset lacks it.
    """
    start, before = time.perf_counter(), _weight_bytes(model)
    dtype = _DTYPES.get(conversion.dtype)
    if dtype is None:
        raise OptionError(f"dtype is {conversion.dtype!r}; choose float16 or bfloat16")
    opset = model.opset_imports.get("", 0)
    if opset < _SINCE[conversion.dtype]:
        least = _SINCE[conversion.dtype]
        raise OptionError(f"{conversion.dtype} needs opset {least}, and the model has {opset}; export it with {least} or later")
    if model.functions:
        onnx_ir.passes.common.InlinePass()(model)
    facts = Facts(model.graph)
    _check(model.graph, facts)
    input_kinds = kinds(model.graph, facts)
    masks = frozenset(
        value for value in model.graph.inputs if value.name in input_kinds and input_kinds[value.name].name == "bias"
    )
    islands = IslandFinder(facts, opset, dtype, masks).go(model.graph)
    nodes = [node for node in ordered(model.graph) if _is_float(node, facts)]
    narrowing = Narrowing(model.graph, facts, opset, dtype, islands, all_names(model), conversion.keep_io_types)
    narrowing.go()
    wide = [node.op_type for node in nodes if node in islands.nodes]
    return ConversionReport(
        conversion.dtype,
        len(nodes) - len(wide),
        Counter(wide),
        narrowing.casts,
        before,
        _weight_bytes(model),
        time.perf_counter() - start,
    )


def _is_float(node: ir.Node, facts: Facts) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return node.op_type != "Constant" and any(facts.dtype(value) == ir.DataType.FLOAT for value in values)


def _check(graph: ir.Graph, facts: Facts) -> None:
    """Refuses models without float32, and those with a value of unknown type."""
    used = [value for node in ordered(graph) for value in node.outputs if value.uses() or value.is_graph_output()]
    for value in used:
        if facts.dtype(value) is None and not isinstance(value.type, (ir.SequenceType, ir.OptionalType)):
            raise ModelError(f"the element type of {value.name!r} is unknown; run onnx.shape_inference on the model first")
    values = (*graph.inputs, *used, *graph.initializers.values())
    if not any(facts.dtype(value) == ir.DataType.FLOAT for value in values):
        raise ModelError("nothing in the model is float32; there is nothing to convert")


def _weight_bytes(model: ir.Model) -> int:
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    values += [value for node in model.graph.all_nodes() if node.op_type == "Constant" for value in node.outputs]
    tensors = (constant_tensor(value) or value.const_value for value in values)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclasses.dataclass
class Narrowing:
    """One model on its way to a half type."""

    graph: ir.Graph
    facts: Facts
    opset: int
    dtype: ir.DataType
    islands: Islands
    names: set[str]
    keeps_io: bool
    floats: set[ir.Value] = dataclasses.field(default_factory=set[ir.Value])
    """Values that were float32 in the source."""
    casts: int = 0
    """How many Casts were added."""
    _cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = dataclasses.field(
        default_factory=dict[tuple[ir.Value, ir.DataType], ir.Value]
    )
    _types: dict[ir.Value, ir.DataType] = dataclasses.field(default_factory=dict[ir.Value, ir.DataType])
    _constants: dict[ir.Value, ir.Value] = dataclasses.field(default_factory=dict[ir.Value, ir.Value])

    def go(self) -> None:
        """Converts in place."""
        nodes = list(ordered(self.graph))
        values = [*self.graph.inputs, *(value for node in nodes for value in (*node.inputs, *node.outputs))]
        values += [value for node in nodes for inner in subgraphs(node) for value in (*inner.inputs, *inner.outputs)]
        self.floats = {value for value in values if value is not None and self.facts.dtype(value) == _FLOAT}
        self._restate(nodes)
        for node in nodes:
            self._cast_inputs(node)
        for node in nodes:
            for inner in subgraphs(node):
                self._cast_outputs(inner, self.dtype)
        self._cast_outputs(self.graph, _FLOAT if self.keeps_io else self.dtype)
        for old, new in self._constants.items():
            self._replaced(old, new)

    def _restate(self, nodes: list[ir.Node]) -> None:
        """Notes and writes down what type every value has from now on."""
        for value in self.graph.inputs:
            self._become(value, _FLOAT if self.keeps_io else self.dtype)
        for node in nodes:
            for inner in subgraphs(node):
                for value in inner.inputs:
                    self._become(value, self.dtype)
            for value in node.outputs:
                self._become(value, _FLOAT if value in self.islands.values else self.dtype)

    def _become(self, value: ir.Value, dtype: ir.DataType) -> None:
        if value not in self.floats or constant_tensor(value) is not None:
            return
        self._types[value] = dtype
        if dtype != _FLOAT:
            value.type = ir.TensorType(dtype)
            if value.const_value is not None:
                value.const_value = rounded(value.const_value, dtype, value.name or "")

    def _cast_inputs(self, node: ir.Node) -> None:
        """Gives a node inputs of its type."""
        if node.op_type in ASKS_SHAPE:
            return
        wide = node in self.islands.nodes
        if is_standard(node, "Cast"):
            if attribute(node, "to") == _FLOAT.value and not wide:
                node.attributes["to"] = ir.AttrInt64("to", self.dtype.value)
            return
        if is_standard(node, "ConstantOfShape") and not wide:
            self._fill(node)
        for place, value in enumerate(node.inputs):
            if value is None or value not in self.floats:
                continue
            wanted = _FLOAT if wide or is_fixed(node, place, self.opset) else self.dtype
            if (node, place) in self.islands.biases:
                value = self._as(value, self.dtype)  # noqa: PLW2901
            node.replace_input_with(place, self._as(value, wanted))

    def _fill(self, node: ir.Node) -> None:
        given = node.attributes.get("value")
        tensor = ir.tensor(np.zeros(1, np.float32)) if given is None else given.as_tensor()
        if tensor.dtype == _FLOAT:
            node.attributes["value"] = ir.AttrTensor("value", rounded(tensor, self.dtype, ""))

    def _as(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        """A value in a type."""
        if constant_tensor(value) is not None and value.dtype == _FLOAT:
            return value if wanted == _FLOAT else self._constant(value)
        if self._types.get(value, _FLOAT) == wanted:
            return value
        if (value, wanted) not in self._cast:
            self._cast[value, wanted] = self._added(value, wanted)
        return self._cast[value, wanted]

    def _added(self, value: ir.Value, wanted: ir.DataType) -> ir.Value:
        """A Cast after the node that computes a value, and after the nodes that keep finite numbers finite."""
        self.casts += 1
        place = _Place(value, self.names)
        if wanted != _FLOAT and value in self.islands.beyond:
            most = largest(self.dtype)
            bounds = [place.constant(np.asarray(number, np.float32)) for number in (-most, most)]
            within = place.node("Clip", [value, *bounds], _FLOAT)
            lost = place.node("IsInf", [value], ir.DataType.BOOL)
            value = place.node("Where", [lost, value, within], _FLOAT)
        result = place.node("Cast", [value], wanted, {"to": wanted.value})
        self._types[result] = wanted
        return result

    def _constant(self, value: ir.Value) -> ir.Value:
        """A constant in the half type, beside the one in float32."""
        if value not in self._constants:
            tensor = constant_tensor(value)
            assert tensor is not None
            new = _Place(value, self.names).constant(rounded(tensor, self.dtype, value.name or ""), value)
            self._constants[value], self._types[new] = new, self.dtype
        return self._constants[value]

    def _cast_outputs(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        """Gives the outputs of a graph their type, by the names they have."""
        for place, value in enumerate(graph.outputs):
            if value not in self.floats:
                continue
            new = self._as(value, dtype)
            if new is not value:
                if graph is self.graph:
                    value.name, new.name = f"{new.name}_of", value.name
                    new.shape = value.shape
                graph.outputs[place] = new

    def _replaced(self, old: ir.Value, new: ir.Value) -> None:
        """Gives a constant the name of the one that it leaves without a use."""
        if old.uses() or old.is_graph_output() or old.is_graph_input():
            return
        name, graph, node = old.name, old.graph, old.producer()
        assert isinstance(graph, ir.Graph)
        if node is not None:
            graph.remove(node, safe=True)
            return
        graph.initializers.pop(name or "")
        new.name = name


class _Place:
    """Where nodes go that read a value: right after the node that computes it, in sequence."""

    def __init__(self, value: ir.Value, names: set[str]) -> None:
        self._value = value
        self._after = value.producer()
        self._names = names
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        self._graph = graph

    def node(self, op: str, inputs: list[ir.Value], dtype: ir.DataType, attributes: dict[str, int] | None = None) -> ir.Value:
        """The output of a new node, of the shape of the value."""
        name = self._named(f"{self._value.name}/{op}")
        node = ir.node(op, inputs, attributes or {}, name=name)
        output = node.outputs[0]
        output.name, output.type, output.shape = self._named(f"{name}_output"), ir.TensorType(dtype), self._value.shape
        if self._after is not None:
            self._graph.insert_after(self._after, node)
        elif len(self._graph):
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.append(node)
        self._after = node
        return output

    def constant(self, content: ir.TensorProtocol | Array, like: ir.Value | None = None) -> ir.Value:
        """An initializer."""
        tensor = content if isinstance(content, ir.TensorProtocol) else ir.tensor(content)
        return new_weight(self._graph, self._named(f"{(like or self._value).name}_{tensor.dtype.name.lower()}"), tensor)

    def _named(self, hint: str) -> str:
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._names.add(name)
        return name
