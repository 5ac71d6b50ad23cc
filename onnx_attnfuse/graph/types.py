"""Whether operands that must be of one type are, as far as the model itself declares their types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.ops import STANDARD
from onnx_attnfuse.graph.tensors import all_graphs


def check_types(model: ir.Model, where: str) -> None:
    """Check every standard operator's operands; types that the model does not declare are not guessed.

    Raises:
        ModelError: Operands that must share a type do not.
    """
    for node, kinds in mixed_types(model):
        name = f"{node.op_type} '{node.name}'" if node.name else f"the {node.op_type} of '{node.outputs[0].name}'"
        raise ModelError(f"{where}: {name} takes operands of one type, and has {kinds}; export the model again")


def mixed_types(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    """The nodes of standard operators whose operands must share a type and do not, each with their types and names."""
    for graph in all_graphs(model):
        yield from mixed_types_in(graph, lambda value: value.dtype)


def mixed_types_in(graph: Iterable[ir.Node], dtype_of: Callable[[ir.Value], ir.DataType | None]) -> Iterator[tuple[ir.Node, str]]:
    """Those nodes of one graph, by any account of the types of its values."""
    for node in graph:
        if node.domain not in STANDARD or len(node.inputs) < 2:
            continue
        for places in _alike(node.op_type):
            operands = [node.inputs[place] for place in places if place < len(node.inputs)]
            known = {dtype: value for value in operands if value is not None and (dtype := dtype_of(value)) is not None}
            if len(known) > 1:
                yield node, " and ".join(f"{dtype.name.lower()} '{value.name}'" for dtype, value in known.items())


@functools.cache
def _alike(op: str) -> tuple[tuple[int, ...], ...]:
    """Groups of inputs that must have the same type."""
    if not onnx.defs.has(op):
        return ()
    groups: dict[str, list[int]] = {}
    for place, item in enumerate(onnx.defs.get_schema(op).inputs):
        if item.is_homogeneous and "(" not in item.type_str:
            groups.setdefault(item.type_str, []).append(place)
    return tuple(tuple(places) for places in groups.values() if len(places) > 1)
