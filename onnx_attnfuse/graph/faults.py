"""Faults for which runtimes refuse a model, or run another operator: names, numbers and types that schemas ask for.

A model may come with some of them: a runtime may have operators that no schema here has. So a result is held against its source,
`noted` when the model is read, and `check_faults` finds additional faults. A fault is known by its kind and its operator, not by
its node, whose name and place may change.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import InternalError, ModelError
from onnx_attnfuse.graph.constants import all_parts
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.ops import CONTRIB, STANDARD, plain_domain
from onnx_attnfuse.graph.schemas import VARIADIC, table
from onnx_attnfuse.graph.tensors import all_graphs, bodies

_NOTED = "onnx_attnfuse.faults"


@dataclasses.dataclass(frozen=True)
class _Noted:
    """Faults and functions of a model when it was read."""

    faults: frozenset[tuple[str, ...]] = frozenset()
    functions: frozenset[tuple[str, str]] = frozenset()
    """Domain and name of its functions."""


@dataclasses.dataclass(frozen=True)
class _Signature:
    """The numbers of inputs and outputs that an operator takes."""

    needed: tuple[int, ...]
    """The places of inputs that may not be left out."""
    inputs: tuple[int, int]
    """The least and the most."""
    outputs: tuple[int, int]


def note(model: ir.Model) -> None:
    """Notes, in place, the faults that a model comes with."""
    functions = frozenset(key[:2] for key in model.functions)
    model.meta[_NOTED] = _Noted(frozenset(key for key, _ in _faults(model, functions)), functions)


def note_types(model: ir.Model, graph: Iterable[ir.Node], dtype_of: Callable[[ir.Value], ir.DataType | None]) -> None:
    """Notes, in place, operands of different types that a graph comes with and does not declare."""
    noted = cast("_Noted", model.meta.get(_NOTED) or _Noted())
    found = {_type_fault(node) for node, _ in mixed_types_in(graph, dtype_of)}
    if not found <= noted.faults:
        model.meta[_NOTED] = dataclasses.replace(noted, faults=noted.faults | found)


def _type_fault(node: ir.Node) -> tuple[str, ...]:
    return "types", node.domain, node.op_type


def check_faults(model: ir.Model) -> None:
    """Check that a model has no fault that it did not have when it was read.

    Raises:
        InternalError: It has one; the message says where.
    """
    noted = cast("_Noted", model.meta.get(_NOTED) or _Noted())
    for key, text in _faults(model, noted.functions):
        if key not in noted.faults:
            raise InternalError(f"the result: {text}")


def _faults(model: ir.Model, functions: frozenset[tuple[str, str]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The faults of a model, each with its key; `functions` are those that were there before."""
    for value in model.graph.outputs:
        if value.type is None:
            yield ("no type", value.name or ""), f"the graph output {value.name!r} has no type"
    for part in bodies(model):
        opsets = {plain_domain(domain): version for domain, version in (part.opset_imports or model.opset_imports).items()}
        sound = set[object]()
        for graph in all_parts(part):
            for value in graph.initializers.values():
                yield from _initializer_faults(value)
            for node, kinds in mixed_types_in(graph, lambda value: value.dtype):
                yield _type_fault(node), f"{_label(node)} takes operands of one type, and has {kinds}"
            for node in graph:
                form = node.domain, node.op_type, node.overload, len(node.inputs), len(node.outputs)
                has_holes = None in node.inputs
                if has_holes or form not in sound:
                    found = list(_node_faults(node, model, opsets, functions))
                    yield from found
                    sound |= set() if found or has_holes else {form}


def _initializer_faults(value: ir.Value) -> Iterator[tuple[tuple[str, ...], str]]:
    tensor = value.const_value
    if tensor is None:
        yield ("no data", value.name or ""), f"the initializer {value.name!r} has no data"
    elif tensor.dtype == ir.DataType.UNDEFINED:
        yield ("no type", value.name or ""), f"the initializer {value.name!r} has no element type"
    elif value.dtype not in {None, tensor.dtype}:
        yield ("type", value.name or ""), f"the initializer {value.name!r} of type {tensor.dtype} is declared {value.dtype}"


def _node_faults(
    node: ir.Node, model: ir.Model, opsets: dict[str, int], functions: frozenset[tuple[str, str]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    domain, op = plain_domain(node.domain), node.op_type
    if domain not in opsets:
        yield ("no import", domain), f"{_label(node)} is of the domain {domain!r}, of which no opset is imported"
    function = model.functions.get((node.domain, op, node.overload))
    if function is not None:
        signature = _Signature((), (0, len(function.inputs)), (0, len(function.outputs)))
    elif (signature := _signature(domain, op, opsets.get(domain, 1))) is None:
        if domain in {"", CONTRIB} or (node.domain, op) in functions:
            yield ("undefined", domain, op), f"{_label(node)} is of no operator and no function of the model"
        return
    given, results = len(node.inputs), len(node.outputs)
    for count, (least, most), what in ((given, signature.inputs, "inputs"), (results, signature.outputs, "outputs")):
        if not least <= count <= most:
            yield (what, domain, op), f"{_label(node)} has {count} {what}, and takes {_range(least, most)}"
    if any(place >= given or node.inputs[place] is None for place in signature.needed):
        yield ("needed", domain, op), f"{_label(node)} lacks an input that {op} may not be without"


@functools.cache
def _signature(domain: str, op: str, version: int) -> _Signature | None:
    if onnx.defs.has(op, version, domain):
        schema = onnx.defs.get_schema(op, version, domain)
        if schema.deprecated:
            return None
        single = onnx.defs.OpSchema.FormalParameterOption.Single
        needed = tuple(place for place, item in enumerate(schema.inputs) if item.option == single)
        return _Signature(needed, (schema.min_input, schema.max_input), (schema.min_output, schema.max_output))
    known = table().get((domain, op))
    if known is None:
        return None
    return _Signature(known.needed, (0, _most(list(known.inputs))), (1, _most(known.outputs)))


def _most(names: list[str] | tuple[str, ...]) -> int:
    return sys.maxsize if names and names[-1].endswith(VARIADIC) else len(names)


def _range(least: int, most: int) -> str:
    if most > 1 << 20:
        return f"at least {least}"
    return str(least) if least == most else f"{least} to {most}"


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else f"the {node.op_type} of {node.outputs[0].name!r}"


def check_types(model: ir.Model, where: str) -> None:
    """Check every standard operator's operands in a model whose faults are noted; types that it does not declare are not guessed.

    Raises:
        ModelError: Operands that must share a type do not.
    """
    noted = cast("_Noted", model.meta[_NOTED])
    for graph in all_graphs(model) if any(kind == "types" for kind, *_ in noted.faults) else ():
        for node, kinds in mixed_types_in(graph, lambda value: value.dtype):
            name = f"{node.op_type} '{node.name}'" if node.name else f"the {node.op_type} of '{node.outputs[0].name}'"
            raise ModelError(f"{where}: {name} takes operands of one type, and has {kinds}; export the model again")


def mixed_types_in(graph: Iterable[ir.Node], dtype_of: Callable[[ir.Value], ir.DataType | None]) -> Iterator[tuple[ir.Node, str]]:
    """The nodes of one graph whose operands must share a type and do not, by any account of the types of its values."""
    for node in graph:
        if node.domain not in STANDARD or len(node.inputs) < 2:
            continue
        for places in _alike(node.op_type):
            operands = [node.inputs[place] for place in places if place < len(node.inputs)]
            known = {dtype: value for value in operands if value is not None and (dtype := dtype_of(value)) is not None}
            if len(known) > 1:
                yield node, " and ".join(f"{type_name(dtype)} '{value.name}'" for dtype, value in known.items())


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
