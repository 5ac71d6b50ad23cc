"""One operator to decompose, the facts about its inputs, and the nodes built in its place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.schemas import Attribute, is_default, schema_of
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Refused


@dataclasses.dataclass(frozen=True)
class FusedNode:
    """A node and a builder of nodes before it."""

    node: ir.Node
    build: Builder
    inputs: tuple[ir.Value | None, ...]
    """Inputs to compute from: the node's own, or in a rehearsal others in the place of some."""
    quantises: bool = False
    """Whether the body is run by a reference, which can quantise a cache."""
    asked: set[str] = dataclasses.field(default_factory=set[str])
    """Names of inputs and attributes that were asked for."""
    equal: list[tuple[Dim, Dim]] = dataclasses.field(default_factory=list[tuple[Dim, Dim]])
    """Pairs of lengths that the body takes to be equal."""

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the operator's inputs."""
        schema = schema_of(self.node)
        assert schema is not None
        return list(schema.inputs)

    def given(self, name: str) -> ir.Value | None:
        """An input, or None if it is left out."""
        self.asked.add(name)
        place = self.names.index(name)
        return self.inputs[place] if place < len(self.inputs) else None

    def all_given(self, *names: str) -> list[ir.Value]:
        """The values of all named inputs that are not left out."""
        return [value for value in map(self.given, names) if value is not None]

    def operand(self, name: str) -> ir.Value:
        """An input that has to be there.

        Raises:
            Refused: It is not.
        """
        value = self.given(name)
        if value is None:
            raise Refused("malformed", f"input {self.names.index(name)} is missing", self.node.name)
        return value

    def replacing(self, **given: ir.Value) -> FusedNode:
        """The operator on other inputs in the place of some that are given."""
        inputs = list(self.inputs)
        for name, value in given.items():
            inputs[self.names.index(name)] = value
        return dataclasses.replace(self, inputs=tuple(inputs))

    def dims(self, value: ir.Value) -> Dims:
        """The shape of a value.

        Raises:
            Refused: Not even the number of its axes is known.
        """
        found = self.build.facts.dims(value)
        if found is None:
            raise Refused("unknown-rank", f"the rank of '{value.name}' is unknown", self.node.name)
        return found

    def dtype(self) -> ir.DataType:
        """The element type of the first input.

        Raises:
            Refused: It is unknown.
        """
        value = self.operand(self.names[0])
        found = self.build.facts.dtype(value)
        if found is None:
            raise Refused("unknown-type", f"the element type of '{value.name}' is unknown", self.node.name)
        return found

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or `default`."""
        self.asked.add(name)
        return attribute(self.node, name, default)

    def count(self, name: str) -> int:
        """A number of heads.

        Raises:
            Refused: It is not given.
        """
        found = self.attribute(name)
        if not found:
            raise Refused("malformed", f"{name} is missing", self.node.name)
        return int(found)

    def number(self, dim: Dim, what: str) -> int:
        """A length that has to be known.

        Raises:
            Refused: It is not.
        """
        if not isinstance(dim, int):
            raise Refused("unknown-size", f"{what} is unknown", self.node.name)
        return dim

    def share(self, dim: Dim, count: int, what: str) -> int:
        """The size of each of `count` equal parts of an axis.

        Raises:
            Refused: It is unknown, or the axis has no such parts.
        """
        found = sizes.exact_quotient(dim, count)
        if found is None:
            raise Refused("unknown-size", f"{what} is unknown: {count} heads in {dim} channels", self.node.name)
        return self.number(found, what)

    def take_equal(self, given: Dims, wanted: Dims, what: str) -> None:
        """Takes lengths to be equal that a valid model makes equal.

        Raises:
            Refused: They are not.
        """
        pairs = list(zip(given, wanted, strict=True))
        if any(one != other for one, other in pairs if isinstance(one, int) and isinstance(other, int)):
            raise Refused("mask-form", f"{what} has the shape {list(given)} in place of {list(wanted)}", self.node.name)
        self.equal.extend(pairs)

    def finish(self) -> None:
        """Refuses an input that is given, or an attribute that is not at its default, if nobody has asked for it.

        Raises:
            Refused: One is there.
        """
        schema = schema_of(self.node)
        given = {name for name, value in zip(self.names, self.inputs, strict=False) if value is not None}
        known = dict[str, Attribute]() if schema is None else schema.attributes
        said = {name for name, item in self.node.attributes.items() if name not in known or not is_default(known[name], item)}
        unread = sorted((given | said) - self.asked)
        if unread:
            raise Refused("not-decomposed", f"{self.node.op_type} with {unread[0]} cannot be decomposed", self.node.name)


@dataclasses.dataclass(frozen=True)
class Body:
    """The values that replace an operator's outputs."""

    values: tuple[ir.Value | None, ...]
    """A value for each of its outputs, None for one that cannot be decomposed."""
    frontier: tuple[ir.Value, ...]
    """The operands, from which both sides are judged."""
    defined: tuple[ir.Value | None, ...] = ()
    """Truth values that broadcast to an output: where the operator says what it is; None: everywhere."""
    masks: tuple[ir.Value, ...] = ()
    """Masks that may leave a row without a key, which the body gives 0 for, as for one that is NaN."""


def alone(
    op: tuple[str, str], dtypes: Sequence[ir.DataType | None], attributes: Mapping[str, Any], outputs: int, opset: int
) -> FusedNode:
    """An operator alone in a graph whose inputs have these types, None for one that is left out; the caller records shapes."""
    types = [None if dtype is None else ir.TensorType(dtype) for dtype in dtypes]
    inputs = [None if item is None else ir.Value(name=f"input {place}", type=item) for place, item in enumerate(types)]
    node = ir.node(op[1], inputs, attributes, domain=op[0], num_outputs=outputs)
    given = [value for value in inputs if value is not None]
    graph = ir.Graph(given, node.outputs, nodes=[node], opset_imports={"": opset, CONTRIB: 1}, name="body")
    build = Builder(graph, Facts(graph), opset, {str(value.name) for value in given})
    build.at(node)
    return FusedNode(node, build, tuple(inputs))
