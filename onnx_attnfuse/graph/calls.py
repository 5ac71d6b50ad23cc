"""Shapes and types of the results of calls of model-local functions, as exporters often note none.

calls = Calls(model.functions, assumed)
calls.results(node, facts)  # [((batch, seq, 768), FLOAT)]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim

if TYPE_CHECKING:
    from onnx_attnfuse.graph.assumptions import Assumed
    from onnx_attnfuse.graph.facts import Facts
    from onnx_attnfuse.graph.facts_view import Dims

    Known = tuple[Dims | None, ir.DataType | None]
    _Returned = tuple[tuple[Dim | None, ...] | None, ir.DataType | None]


_DEEPEST = 32
"""Calls inside of calls that are read; deeper ones are unknown."""


class Calls:
    """The results of a model's functions; each is read once for all calls with equal shapes and types."""

    def __init__(self, functions: Mapping[ir.OperatorIdentifier, ir.Function], assumed: Assumed) -> None:
        """Reads nothing yet.

        Args:
            functions: The functions of the model.
            assumed: Assumptions about the model.
        """
        self._functions, self._assumed = functions, assumed
        self._known: dict[object, list[_Returned]] = {}
        self._depth = 0

    def results(self, node: ir.Node, facts: Facts) -> list[Known]:
        """Shape and type of each output of a node, by the function that it calls; nothing where it calls none."""
        function = self._functions.get(node.op_identifier())
        if function is None or self._depth > _DEEPEST:
            return []
        own: dict[Dim, Dim] = {}
        given: list[Known] = []
        for value, argument in zip(function.inputs, node.inputs, strict=False):
            dims = facts.dims(argument)
            renamed = None if dims is None else tuple(_own(value, axis, dim, own) for axis, dim in enumerate(dims))
            given.append((renamed, facts.dtype(argument)))
        key = (node.op_identifier(), tuple(given))
        if key not in self._known:
            self._known[key] = []  # the results of a function that calls itself, until they are read
            self._depth += 1
            self._known[key] = list(self._read(function, given, {str(name) for name in own.values()}))
            self._depth -= 1
        callers = {str(name): dim for dim, name in own.items()}
        found: list[Known] = []
        for value, (dims, dtype) in zip(node.outputs, self._known[key], strict=False):
            found.append((None if dims is None else _callers(dims, callers, value, facts), dtype))
        return found

    def _read(self, function: ir.Function, given: list[Known], names: set[str]) -> Iterator[_Returned]:
        """The outputs of a function; a length is None where it rests on more than the lengths of the inputs."""
        from onnx_attnfuse.graph.facts import Facts

        facts = Facts(function.graph, given, self._assumed, self)
        for value in function.outputs:
            dims = facts.dims(value)
            known = None if dims is None else tuple(dim if _follows(dim, facts, names) else None for dim in dims)
            yield known, facts.dtype(value)


def _own(value: ir.Value, axis: int, dim: Dim, own: dict[Dim, Dim]) -> Dim:
    """A length inside of the function: numbers as they are, others as symbols of its own, which no name of the caller's is."""
    return dim if isinstance(dim, int) else own.setdefault(dim, sizes.symbol(f"{value.name}.{axis}"))


def _callers(dims: tuple[Dim | None, ...], names: dict[str, Dim], value: ir.Value, facts: Facts) -> Dims:
    """The lengths of an output in the caller's own."""
    return tuple(facts.fresh(value, axis) if dim is None else sizes.substituted(dim, names) for axis, dim in enumerate(dims))


def _follows(dim: Dim, facts: Facts, names: set[str]) -> bool:
    """Whether a length is made of those of the inputs, by no assumption, and none that it met can be the longer one."""
    known = sizes.symbols(dim)
    assumed = any(any(facts.assumed_equal(name)) for name in known)
    return known <= names and not assumed and not facts.is_spread(dim)
