"""Calls of PyTorch operators as data, and as nodes of a gradient graph.

ONNX Runtime's ATen operator takes every argument of the schema in its order, keyword arguments too; what is no tensor is a scalar
in CPU memory, and nothing stands for None and for tensors that are not defined.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.training.operators import ATEN

Argument: TypeAlias = "ir.Value | float | int | bool | tuple[bool, ...] | None"


@dataclasses.dataclass(frozen=True)
class Result:
    """One result of a call."""

    name: str
    dtype: ir.DataType
    dims: tuple[Dim, ...] | None = None
    on_cpu: bool = False
    """A tensor in CPU memory whatever the device is, such as the state of a random generator."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call."""

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    """In the order of the schema, with their names there."""
    results: tuple[Result, ...]
    on_cpu: frozenset[str] = frozenset()
    """Tensor arguments in CPU memory."""


def emit_call(builder: Builder, call: Call, hint: str) -> dict[str, ir.Value]:
    """Adds the node; its results by name.

    All have a name in the graph, also those that nobody wants: without one ONNX Runtime accepts undefined tensors only.
    """
    inputs = [_input(builder, argument) for _, argument in call.arguments]
    attributes: dict[str, object] = {"operator": call.operator}
    on_cpu = [index for index, (name, _) in enumerate(call.arguments) if name in call.on_cpu]
    given_on_cpu = [index for index, result in enumerate(call.results) if result.on_cpu]
    attributes |= {"cpu_input_args": on_cpu} if on_cpu else {}
    attributes |= {"cpu_output_args": given_on_cpu} if given_on_cpu else {}
    first = builder.node("ATen", inputs, attributes, domain=ATEN, hint=hint, outputs=len(call.results))
    node = first.producer()
    assert node is not None
    found: dict[str, ir.Value] = {}
    for output, result in zip(node.outputs, call.results, strict=True):
        output.dtype = result.dtype
        builder.facts.record(output, result.dims, result.dtype)
        if result.dims is not None:
            output.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in result.dims])
        found[result.name] = output
    return found


def _input(builder: Builder, argument: Argument) -> ir.Value | None:
    if argument is None or isinstance(argument, ir.Value):
        return argument
    if isinstance(argument, (bool, tuple)):
        return builder.constant(np.asarray(argument, np.bool_))
    if isinstance(argument, int):
        return builder.constant(np.asarray(argument, np.int64))
    return builder.scalar(argument, ir.DataType.FLOAT)
