"""Whole models in float32 in the place of half types, so that small differences show, and on a CPU that lacks the kernels."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Container, Generator
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph import external
from onnx_attnfuse.graph.constants import subgraphs
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.tensors import Computed, all_graphs, bodies
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.submodel import widened_attribute

_LARGE = 1 << 28
"""Bytes of weights above which a model is run in fewer loops."""


def is_half(model: ir.Model, types: Container[ir.DataType | None] = HALVES) -> bool:
    """Whether something of a model is computed in a half type, or in one of some of these."""
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    return any(value.dtype in types for value in values)


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all weights."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def is_large(model: ir.Model) -> bool:
    """Whether a model has so many weights that it is run in fewer loops."""
    return weight_bytes(model) > _LARGE


def widened(model: ir.Model) -> ir.Model:
    """A copy of the model that computes in float32 instead of a half type; weights are widened when they are read."""
    copy = model.clone()
    graphs = list(bodies(copy))
    for graph in graphs:
        graphs += [inner for node in graph for inner in subgraphs(node)]
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in HALVES:
                value.const_value = _widened_when_read(value.const_value)
        for value in (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)):
            if value.dtype in HALVES:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                node.attributes[name] = widened_attribute(attribute, _wide)
    return copy


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widened_when_read(tensor: ir.TensorProtocol) -> Computed:
    shape = ir.Shape(tensor.shape.numpy())
    return Computed(lambda: tensor.numpy().astype(np.float32), (tensor,), ir.DataType.FLOAT, shape, tensor.name or "")


Widen: TypeAlias = "Callable[[ir.Model], ir.Model]"
"""Gives a model that computes in float32; raises RuntimeRefusal where there is no room for its weights."""
_LEAST_BYTES = 1024
"""Smaller weights stay inside, where shapes are inferred from them."""


def wide(model: ir.Model) -> ir.Model:
    """The model, or a copy in float32 where it computes in a half type, its weights widened whenever they are asked for."""
    return widened(model) if is_half(model) else model


@contextlib.contextmanager
def widening() -> Generator[Widen]:
    """A context in which models are widened to float32; files that it writes are deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        yield _Files(pathlib.Path(folder)).wide


class _Files:
    """Weights that were widened, by the tensors that they are of."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._count = folder, 0
        self._written = dict[int, tuple[ir.TensorProtocol, ir.ExternalTensor]]()
        """By the identity of a tensor, which is kept so that no other gets it."""

    def wide(self, model: ir.Model) -> ir.Model:
        """The model in float32, large ones with their weights in files of the folder.

        Raises:
            RuntimeRefusal: The disk has no room for them.
        """
        copy = wide(model)
        if copy is model or not is_large(model):
            return copy
        pairs = [
            (value, old)
            for before, after in zip(all_graphs(model), all_graphs(copy), strict=True)
            for name, value in after.initializers.items()
            if (old := before.initializers[name].const_value) is not None
            and value.const_value is not None
            and (old.dtype != value.const_value.dtype or isinstance(old, ir.ExternalTensor))
        ]
        self._write([(value, old) for value, old in pairs if old.nbytes >= _LEAST_BYTES])
        for value, old in pairs:
            found = self._written.get(id(old))
            value.const_value = ir.tensor(_tensor(value).numpy(), name=value.name) if found is None else found[1]
        return copy

    def _write(self, pairs: list[tuple[ir.Value, ir.TensorProtocol]]) -> None:
        """Writes data that no file has yet to another file."""
        missing = {id(old): (old, _tensor(value)) for value, old in pairs if id(old) not in self._written}
        if not missing:
            return
        self._count += 1
        path = self._folder / f"weights.{self._count}.data"
        tensors = [tensor for _, tensor in missing.values()]
        try:
            external.check_room(path, external.DataFiles((), {}), sum(tensor.nbytes for tensor in tensors))
            written = ir.external_data.convert_tensors_to_external(tensors, path.parent, path.name)
        except (OptionError, OSError) as error:
            raise RuntimeRefusal(f"its weights cannot be widened to files: {error}") from error
        for (old, _), tensor in zip(missing.values(), written, strict=True):
            self._written[id(old)] = old, tensor


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


_SINCE = 11
"""The opset from which on there are sequences."""


def has_float16(model: ir.Model) -> bool:
    """Whether something of a model is computed in float16."""
    return ir.DataType.FLOAT16 in _types(model).values()


def rounded(model: ir.Model) -> ir.Model:
    """A copy of the model that rounds each inner result of float16, and in branches what may be one.

    Before opset 11 there are no sequences, and the model itself comes back.
    """
    if model.opset_imports.get("", 0) < _SINCE:
        return model
    types, copy = _types(model), model.clone()
    graphs = [copy.graph]
    for graph in graphs:
        nodes = list(graph)
        wanted = {ir.DataType.FLOAT16} if graph is copy.graph else {ir.DataType.FLOAT16, None}
        graphs += [inner for node in nodes for inner in subgraphs(node)]
        halves = [
            (node, value)
            for node in nodes
            for value in node.outputs
            if types.get(value.name or "", value.dtype) in wanted and value.uses()
        ]
        if halves:
            zero = ir.node("Constant", [], {"value": ir.tensor(np.asarray(0), name="zero")})
            zero.outputs[0].name = f"{graph.name}/zero of rounding"
            graph.insert_before(nodes[0], zero)
            for node, value in halves:
                _round(graph, node, value, zero.outputs[0])
    return copy


def _types(model: ir.Model) -> dict[str, ir.DataType | None]:
    """The element types of the results of the main graph's nodes, by name."""
    facts = Facts(model.graph)
    return {value.name or "": facts.dtype(value) for node in model.graph for value in node.outputs}


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value, zero: ir.Value) -> None:
    """Puts a value through a sequence of one."""
    users = list(value.uses())
    held = ir.node("SequenceConstruct", [value])
    taken = ir.node("SequenceAt", [held.outputs[0], zero])
    held.outputs[0].name, taken.outputs[0].name = f"{value.name}/held", f"{value.name}/rounded"
    graph.insert_after(node, [held, taken])
    for user, place in users:
        user.replace_input_with(place, taken.outputs[0])
