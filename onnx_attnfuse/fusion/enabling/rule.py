"""Rules of enabling transformations: a look at one node, the nodes that take its place, and helpers for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, attributes, both_ways, constant_tensor, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib
from onnx_attnfuse.graph.rules.reading import Part, read_part
from onnx_attnfuse.graph.uses import is_read_once, only_reader, producer_of, reads_input
from onnx_attnfuse.kernels.execution_provider import Paying
from onnx_attnfuse.kernels.operators import group_query_attention


@dataclasses.dataclass(frozen=True)
class EnablingChange:
    """New values in the place of old ones, and the operands of both."""

    results: tuple[tuple[ir.Value, ir.Value], ...]
    """Old and new."""
    frontier: tuple[ir.Value, ...]
    assumes: tuple[AssumptionName, ...] = ()
    """Assumptions that the change rests on."""

    def described(self, does: str) -> str:
        """The effect of a change, with its assumptions."""
        return f"{does}; assumes {', '.join(self.assumes)}" if self.assumes else does


@dataclasses.dataclass(frozen=True)
class EnablingRule:
    """One rewrite."""

    does: str
    """The effect of the rule, for the report, after a number."""
    ops: frozenset[tuple[str, str]]
    """The nodes that it starts from, by domain and operator."""
    change: Callable[[ir.Node, Builder], EnablingChange | None]
    """Builds the replacement of a node's result, beside it; None where there is nothing to do."""
    pays: Paying | None
    """The name by which records of execution providers say that it pays there; None: it is for what reads the graph, on each."""
    since: tuple[int, int] = (0, 0)
    """The version of ONNX Runtime from which on its operators exist."""
    with_cache: bool = True
    """Whether it pays where an attention has a cache too, so that a run may see one position."""


def enabling(
    does: str, ops: str, pays: Paying | None, *, since: tuple[int, int] = (0, 0), with_cache: bool = True
) -> Callable[[Callable[[ir.Node, Builder], EnablingChange | None]], EnablingRule]:
    """Makes a rule of its change; arguments are its fields, `ops` apart by blanks, those of com.microsoft with their domain."""
    starts = frozenset((domain, op) for domain, _, op in (name.rpartition(".") for name in ops.split()))
    return lambda change: EnablingRule(does, starts, change, pays, since, with_cache)


def only_use(value: ir.Value, op: str) -> ir.Node | None:
    """The one node that looks at a value, if it is an `op` of the standard."""
    user = only_reader(value)
    return user if is_standard(user, op) else None


def own_bias(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The operands of an Add as `added_bias` has them, for one reader alone."""
    return added_bias(value, facts) if is_read_once(value) else None


def added_bias(value: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The two operands of an Add whose second is a constant along the last axis."""
    dims = facts.dims(value)
    for one, other in both_ways(value.producer(), "Add") if dims else ():
        is_along = dims is not None and facts.dims(one) == dims and facts.dims(other) == dims[-1:]
        if is_along and constant_tensor(other) is not None and facts.dtype(other) == facts.dtype(value):
            return one, other
    return None


@dataclasses.dataclass(frozen=True)
class Moved:
    """Rows that were moved, their channels staying as they are."""

    source: ir.Value
    steps: tuple[ir.Node, ...]
    """The nodes that move them, the last first."""

    def again(self, value: ir.Value, builder: Builder) -> ir.Value:
        """Another value moved likewise."""
        own = dims_of(builder, value)
        for node in reversed(self.steps):
            dims = dims_of(builder, node.outputs[0])
            shape = [*dims[:-1], own[-1]]
            if node.op_type == "Reshape":
                value = builder.reshape(value, shape)
            else:
                kept, inputs = attributes(node), [value, *node.inputs[1:]]
                value = builder.node(node.op_type, inputs, kept, domain=node.domain, dims=shape, hint=node.name)
        return value

    def others(self) -> list[ir.Value | None]:
        """The values that say where they go."""
        return [value for node in self.steps if node.op_type != "Reshape" for value in node.inputs[1:]]


def moved_by(node: ir.Node | None, facts: Facts) -> ir.Value | None:
    """The value whose rows a Reshape, Gather or RestorePadding moves, its channels staying as they are; else None."""
    source = None if node is None or not node.inputs else node.inputs[0]
    if node is None or source is None:
        return None
    if is_standard(node, "Reshape"):
        source = _reshaped(source)
    before, after = facts.dims(source), facts.dims(node.outputs[0])
    if not before or not after or before[-1] != after[-1] or not isinstance(after[-1], int) or len(before) not in {2, 3}:
        return None
    is_gathered = is_standard(node, "Gather") and attribute(node, "axis", 0) == 0 and len(before) == 2
    return source if is_gathered or is_standard(node, "Reshape") or is_contrib(node, "RestorePadding") else None


def _reshaped(value: ir.Value) -> ir.Value:
    """The value before Reshapes that nothing else reads."""
    node = value.producer()
    while is_standard(node, "Reshape") and node.inputs[0] is not None and is_read_once(value):
        value = node.inputs[0]
        node = value.producer()
    return value


def moved_rows(value: ir.Value, facts: Facts) -> Moved:
    """The source of a value's rows and the nodes that moved them, where nothing else reads any of these."""
    steps: list[ir.Node] = []
    while is_read_once(value):
        node = value.producer()
        source = moved_by(node, facts)
        if node is None or source is None:
            break
        steps.append(node)
        value = source
    return Moved(value, tuple(steps))


def halves(left: ir.Value, right: ir.Value, facts: Facts, *, step: int = 1) -> ir.Value | None:
    """The value of which two others are the first and second half of the last axis, or by a step of 2 its channels in turn."""
    one, other = (read_part(value, facts) for value in (left, right))
    dims = None if one is None else facts.dims(one.whole)
    if one is None or other is None or one.whole is not other.whole or not dims or facts.dims(left) != facts.dims(right):
        return None
    last, middle = len(dims) - 1, (dims[-1], 1) if step > 1 else (other.start, other.start)
    wanted = Part(one.whole, last, 0, middle[0], step), Part(one.whole, last, middle[1], dims[-1], step)
    return one.whole if (one, other) == wanted else None


def lengths_follow_from_shapes(node: ir.Node) -> bool:
    """Whether a GroupQueryAttention has lengths that shapes and constants make, so that any inputs verify it."""
    lengths = [group_query_attention.INFO.first(node, role) for role in ("last", "total")]
    return not any(value is None or reads_input(value) for value in lengths)


def same_node(
    node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], builder: Builder
) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """The operator with other inputs and attributes: its results that are used, old and new."""
    made = builder.node(node.op_type, inputs, attributes, domain=node.domain, hint=node.name, outputs=len(node.outputs))
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for old, new in zip(node.outputs, producer_of(made).outputs, strict=True):
        builder.facts.copy(old, new)
        new.type, new.shape = old.type, old.shape
        pairs += [(old, new)] if old.uses() or old.is_graph_output() else []
    return tuple(pairs)
