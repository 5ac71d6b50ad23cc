"""Kernels of an execution provider by operator, versions and element types: a table that is read from a file.

    table = read_table("cuda_kernels.txt")
    table.refusal("", "NonZero", 13, [(0, ir.DataType.FLOAT)], [])     # why there is no such kernel; None: there is one

A line of the file is an operator's domain and name, the versions of it that the kernel is for, the type parameters of its inputs
and outputs, and the element types that each parameter may be: `ai.onnx Add 14+ T,T>T T=float|float16`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.ops import STANDARD

Typed: TypeAlias = tuple[int, ir.DataType]
"""The place of an input or output, and its element type."""


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """One kernel: the versions of its operator that it is for, and the types that it takes and gives."""

    first: int
    last: int | None
    """None: up to the next version of the operator."""
    inputs: tuple[str, ...]
    """Type parameters by place; the last one applies to all that follow."""
    outputs: tuple[str, ...]
    types: Mapping[str, frozenset[str]]
    """Names of element types by parameter; one that is not there has a fixed type."""

    def is_for(self, version: int) -> bool:
        """Whether the kernel is for an operator that was last changed in `version` of its domain."""
        return version == self.first or (self.last is not None and self.first <= version <= self.last)

    def foreign(self, inputs: Iterable[Typed], outputs: Iterable[Typed]) -> ir.DataType | None:
        """The first element type that the kernel does not take or give."""
        for parameters, typed in ((self.inputs, inputs), (self.outputs, outputs)):
            for place, dtype in typed:
                allowed = self.types.get(parameters[min(place, len(parameters) - 1)]) if parameters else None
                if allowed is not None and dtype.name.lower() not in allowed:
                    return dtype
        return None


@dataclasses.dataclass(frozen=True)
class KernelTable:
    """All kernels of an execution provider."""

    known_from: str
    """Where the table is from, and of which version of ONNX Runtime."""
    kernels: Mapping[tuple[str, str], Sequence[KernelRow]]
    """By domain, empty for the standard's, and operator."""

    def refusal(self, domain: str, op: str, version: int, inputs: Sequence[Typed], outputs: Sequence[Typed]) -> str | None:
        """Why no kernel runs a node, in words; None if one does.

        Args:
            domain: The operator's domain, empty for the standard's.
            op: The operator's name.
            version: The version of the domain in which the operator was last changed.
            inputs: The types of inputs that are known.
            outputs: The types of outputs that are known.
        """
        found = self.kernels.get((domain, op))
        if found is None:
            return f"{op} has no kernel there"
        fitting = [kernel for kernel in found if kernel.is_for(version)]
        if not fitting:
            return f"{op} of version {version} has no kernel there"
        foreign = [kernel.foreign(inputs, outputs) for kernel in fitting]
        first = next(iter(foreign))
        return None if first is None or None in foreign else f"{op} has no kernel for {type_name(first)} there"


@functools.cache
def read_table(name: str) -> KernelTable:
    """Reads the table that lies in a file of this name beside this module; its first line says where it is from."""
    head, *lines = importlib.resources.files("onnx_attnfuse.kernels").joinpath(name).read_text(encoding="utf-8").splitlines()
    kernels: dict[tuple[str, str], list[KernelRow]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            domain, op, versions, sides, *types = line.split(" ")
            kernels.setdefault(("" if domain in STANDARD else domain, op), []).append(_kernel(versions, sides, types))
    return KernelTable(head.lstrip("# "), kernels)


def _kernel(versions: str, sides: str, types: Sequence[str]) -> KernelRow:
    first, _, last = versions.rstrip("+").partition("-")
    inputs, outputs = (tuple(filter(None, side.split(","))) for side in sides.split(">"))
    allowed = dict(item.split("=") for item in types)
    return KernelRow(
        int(first),
        int(last) if last else None,
        inputs,
        outputs,
        {name: frozenset(all_.split("|")) for name, all_ in allowed.items()},
    )
