"""One node with its inputs as arrays: the argument of an operator's meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.arrays import Array, Unsupported
from onnx_attnfuse.certify.terms import Term, add, number
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.schemas import is_default, schema_of


@dataclasses.dataclass(frozen=True)
class Call:
    """A node and its inputs."""

    node: ir.Node
    inputs: Sequence[Array | None]
    opset: int
    asked: set[str | int] = dataclasses.field(default_factory=set[str | int])
    """Attributes and places of inputs that the meaning has asked for."""
    place: Callable[[Term, Term], Term] | None = None
    """Makes an index that may count from the end of an axis one that counts from its start; without it both are distinct."""

    def attribute(self, name: str, default: Any = None) -> Any:
        """The attribute's value, or `default`."""
        self.asked.add(name)
        return attribute(self.node, name, default)

    def optional(self, place: int) -> Array | None:
        """The input at a place, None if it is not there."""
        self.asked.add(place)
        return self.inputs[place] if place < len(self.inputs) else None

    def array(self, place: int) -> Array:
        """The input at a place.

        Raises:
            Unsupported: It is not there.
        """
        found = self.optional(place)
        if found is None:
            raise Unsupported(f"{self.node.op_type} without input {place}")
        return found

    def finish(self) -> None:
        """Ends where an input is given, or an attribute is not at its default, that the meaning has not asked for.

        Raises:
            Unsupported: One is.
        """
        for place, given in enumerate(self.inputs):
            if given is not None and place not in self.asked:
                raise Unsupported(f"input {place} of {self.node.op_type}")
        schema = schema_of(self.node)
        for name, given in self.node.attributes.items():
            if name not in self.asked and (schema is None or not is_default(schema.attributes[name], given)):
                raise Unsupported(f"{name} of {self.node.op_type}")

    def wrapped(self, place: Term, length: Term) -> Term:
        """An index that may count from the end, as one from the start."""
        return wrapped(place, length) if self.place is None else self.place(place, length)

    def axes(self, place: int, name: str = "axes") -> list[int] | None:
        """Axes by an attribute or an input; None if neither is there."""
        found = self.attribute(name)
        if found is not None:
            return list(found)
        given = self.optional(place)
        return None if given is None else given.numbers()


Meaning = Callable[[Call], "Sequence[Array | None]"]
"""The outputs of a node; None for one of which only the shape is known."""


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def wrapped(place: Term, length: Term) -> Term:
    """An index that may count from the end."""
    negative = arithmetic.below(place, number(0))
    if negative.op == "const":
        return add(place, length) if negative.data else place
    from onnx_attnfuse.certify.terms import ite

    return ite(negative, add(place, length), place)
