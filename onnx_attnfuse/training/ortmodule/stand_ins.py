"""Stand-ins: standard operators that are read instead of those that only training graphs have.

    Dropout(P, ratio, True)      Identity(P), while the weights are read; the dropout is put back into the site
    BiasSoftmax(S, bias)         Softmax(S + bias)
    ConcatTraining(a, b, ...)    Concat(a, b, ...)
    Where(sees, P, 0)            Identity(P), where rows without a key are set to 0

The stand-ins are taken out again where nothing was fused, so that unfused nodes stay as they were.

ONNX Runtime takes two lengths that meet in a broadcast for one, and writes that down: a mask of shape (b, 1, 1, t) is annotated
as (b, 4, s, s). So the lengths of inputs are unknown here, and everything else follows from the operators; only
where those are not ONNX's own an annotation is all there is. Annotations come back when the graph has been read.

A triangle in a buffer is read as causal only if its content is known. So it is known while a graph is read, and the part that a
fused attention relies on is reported, so that a step with other content is no step of that graph (`graphs`).

Attention gives zeros for rows without a key since PyTorch 2.5. `symbolics` exports it so that its gradients are zeros there too,
and not NaN:

    sees     any(m), or any(M != -inf) of a mask of numbers
    bias     where(m or not sees, 0, -inf), or where(sees, M, 0)
    weights  where(sees, softmax(scores + bias), 0)

It is read as the mask itself, m or M, added to the scores, and as the plain softmax; the zeros of rows are recorded beside that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, given, is_standard
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.training.ortmodule.products import TRAINING, drops


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A node of a training graph, and the standard nodes that are read in its place."""

    node: ir.Node
    readable: tuple[ir.Node, ...]

    @property
    def result(self) -> ir.Value:
        """The value that is read in the place of the node's first output."""
        return self.readable[-1].outputs[0]


class StandIns:
    """The stand-ins of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        """Puts the stand-ins into the graph."""
        self._graph = graph
        self._all: list[StandIn] = []
        self._guards = {guard.node: guard for node in graph if (guard := find_guard(node)) is not None}
        self._plain = PlainMasks(graph, list(self._guards.values()))
        for node in list(graph):
            if drops(node) or node in self._guards:
                self._replace(node, [ir.node("Identity", [node.inputs[1 if node in self._guards else 0]])])
            elif node.domain == TRAINING and node.op_type == "BiasSoftmax" and _is_last(node):
                added = ir.node("Add", node.inputs[:2])
                self._replace(node, [added, ir.node("Softmax", added.outputs, {"axis": -1})])
            elif node.domain == TRAINING and node.op_type == "ConcatTraining":
                self._replace(node, [ir.node("Concat", node.inputs, {"axis": attribute(node, "axis", 0)})])

    def _replace(self, node: ir.Node, readable: list[ir.Node]) -> None:
        result = node.outputs[0]
        for index, new in enumerate(readable):
            new.name = f"{node.name}/{index}"
            new.outputs[0].name = f"{result.name}/{index}"
            new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
        self._graph.insert_after(node, readable)
        result.replace_all_uses_with(readable[-1].outputs[0], replace_graph_outputs=True)
        self._all.append(StandIn(node, tuple(readable)))

    def replaced_by(self, node: ir.Node) -> ir.Node | None:
        """The node that `node` replaces."""
        return next((item.node for item in self._all if node in item.readable), None)

    def guard(self, replaced: Iterable[ir.Node]) -> Guard | None:
        """The guard of rows without a key among nodes that others replace."""
        return next((self._guards[node] for node in replaced if node in self._guards), None)

    def forget(self) -> None:
        """Removes the nodes whose stand-ins were fused away."""
        for item in self._all:
            if item.result.producer() is None or item.readable[-1].graph is None:
                sweep(item.node.outputs)

    def restore(self) -> None:
        """Puts the nodes back where their stand-ins are still used, and takes all stand-ins out."""
        self.forget()
        for item in self._all:
            if item.readable[-1].graph is not None:
                item.result.replace_all_uses_with(item.node.outputs[0], replace_graph_outputs=True)
                sweep([item.result])
        self._plain.restore()
        self._all.clear()


def _is_last(node: ir.Node) -> bool:
    """Whether a softmax runs along the last axis."""
    rank = None if node.inputs[0] is None or node.inputs[0].shape is None else len(node.inputs[0].shape)
    axis: int = attribute(node, "axis", 1)
    return axis == -1 or (rank is not None and axis % rank == rank - 1)


class Annotations:
    """The shapes that were taken out of a graph."""

    def __init__(self, graph: ir.Graph) -> None:
        """Takes the shapes out of the graph."""
        self._kept: list[tuple[ir.Value, ir.Shape]] = []
        for value in graph.inputs:
            if value.shape is not None and not value.shape.is_static():
                self._keep(value, ir.Shape([None] * len(value.shape)))
        for node in graph:
            for value in node.outputs if is_standard(node) else ():
                self._keep(value, None)

    def _keep(self, value: ir.Value, shape: ir.Shape | None) -> None:
        if value.shape is not None:
            self._kept.append((value, value.shape))
            value.shape = shape

    def restore(self) -> None:
        """Puts the shapes back."""
        for value, shape in self._kept:
            value.shape = shape


class Buffers:
    """The buffers among the inputs of a graph, with initializers in their place while it is read."""

    def __init__(self, graph: ir.Graph, contents: Mapping[str, Array]) -> None:
        """Puts the initializers in.

        Args:
            graph: The graph.
            contents: By the names of inputs, their contents in every step.
        """
        self._graph = graph
        self._inputs: dict[ir.Value, ir.Value] = {}
        for value in graph.inputs:
            array = contents.get(value.name or "")
            if array is None:
                continue
            constant = ir.Value(name=f"{value.name}/constant", const_value=ir.tensor(array))
            constant.type, constant.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            graph.register_initializer(constant)
            value.replace_all_uses_with(constant)
            self._inputs[constant] = value

    def read_by(self, spec: AttentionSpec) -> tuple[str, ...]:
        """The names of buffers whose content an attention was read with."""
        operands = {source.indexed.value for operand in spec.operands() for source in operand}
        found = [*spec.values(), *(value for node in spec.nodes for value in node.inputs if value is not None)]
        seen = set(sources(found, lambda value, node: value not in operands and node.op_type != "Shape")) - operands
        return tuple(sorted(value.name or "" for constant, value in self._inputs.items() if constant in seen))

    def restore(self) -> None:
        """Makes inputs of them again."""
        for constant, value in self._inputs.items():
            constant.replace_all_uses_with(value)
            self._graph.initializers.pop(constant.name or "", None)
        self._inputs.clear()


@dataclasses.dataclass(frozen=True)
class Guard:
    """A softmax whose rows without a key are set to 0."""

    node: ir.Node
    """The node that sets them to 0."""
    sees: ir.Value
    """Truth values, one for each row: whether it has a key."""
    added: ir.Node
    """The sum of scores and bias."""
    place: int
    """The place of the bias among its inputs."""
    bias: ir.Value
    mask: ir.Value
    """The mask that the bias is made of."""
    numbers: tuple[ir.Value, ir.Value] | None
    """The meaning of a truth value of the mask; None for a mask of numbers."""


def find_guard(node: ir.Node) -> Guard | None:
    """The guard whose last node this is, if it is one."""
    softmax = _inner(node, "Where", 1, "Softmax")
    added = None if softmax is None else _inner(softmax, "Softmax", 0, "Add")
    sees = node.inputs[0] if node.inputs else None
    if added is None or sees is None or not _is_filled(node.inputs[2], 0.0):
        return None
    for place, bias in enumerate(added.inputs):
        made = None if bias is None else bias.producer()
        if bias is None or made is None or not is_standard(made, "Where") or made.inputs[1] is None:
            continue
        mask = made.inputs[1]
        if made.inputs[0] is sees and _is_filled(made.inputs[2], 0.0) and _is_any(sees, _finite(mask)):
            return Guard(node, sees, added, place, bias, mask, None)
        kept = _kept(made.inputs[0], sees)
        numbers = made.inputs[1], made.inputs[2]
        if kept is None or numbers[1] is None or not _is_any(sees, kept):
            continue
        if _is_filled(numbers[0], 0.0) and _is_filled(numbers[1], -math.inf):
            return Guard(node, sees, added, place, bias, kept, (numbers[0], numbers[1]))
    return None


class PlainMasks:
    """Masks that are added to the scores of a graph in the place of the biases of its guards."""

    def __init__(self, graph: ir.Graph, guards: list[Guard]) -> None:
        """Puts them in."""
        self._guards = guards
        for guard in guards:
            plain = guard.mask
            if guard.numbers is not None:
                made = ir.node("Where", [guard.mask, *guard.numbers], name=f"{guard.node.name}/mask")
                plain = made.outputs[0]
                plain.name, plain.type = f"{guard.node.outputs[0].name}/mask", guard.bias.type
                graph.insert_before(guard.added, made)
            guard.added.replace_input_with(guard.place, plain)

    def restore(self) -> None:
        """Adds each bias again where its attention is still there, and removes unused nodes."""
        for guard in self._guards:
            if guard.added.graph is None:
                sweep([guard.bias, guard.sees])
                continue
            plain = guard.added.inputs[guard.place]
            guard.added.replace_input_with(guard.place, guard.bias)
            if plain is not None and guard.numbers is not None:
                sweep([plain])
        self._guards = []


def _inner(node: ir.Node, operator: str, place: int, inner: str) -> ir.Node | None:
    """The node of a kind that an input of a node of another kind comes from."""
    value = given(node, place) if is_standard(node, operator) else None
    made = None if value is None else value.producer()
    return made if made is not None and is_standard(made, inner) else None


def _is_filled(value: ir.Value | None, number: float) -> bool:
    array = constant_array(value)
    return array is not None and array.size > 0 and bool((array == number).all())


def _kept(condition: ir.Value | None, sees: ir.Value) -> ir.Value | None:
    """m, of a condition that is m or not `sees`."""
    either = None if condition is None else condition.producer()
    if either is None or not is_standard(either, "Or"):
        return None
    for place in (0, 1):
        negated = _inner(either, "Or", 1 - place, "Not")
        if negated is not None and negated.inputs[0] is sees:
            return either.inputs[place]
    return None


def _finite(mask: ir.Value | None) -> tuple[ir.Value, ...]:
    """Truth values that say where a mask is not -inf."""
    compared = [user for user, _ in mask.uses() if is_standard(user, "Equal")] if mask is not None else []
    against = [node for node in compared if any(_is_filled(value, -math.inf) for value in node.inputs)]
    return tuple(user.outputs[0] for node in against for user, _ in node.outputs[0].uses() if is_standard(user, "Not"))


def _is_any(sees: ir.Value, values: ir.Value | tuple[ir.Value, ...]) -> bool:
    """Whether `sees` says of each row whether one of some truth values holds anywhere along it."""
    cast = sees.producer()
    most = None if cast is None else _inner(cast, "Cast", 0, "ReduceMax")
    numbers = None if most is None else _inner(most, "ReduceMax", 0, "Cast")
    if most is None or numbers is None or attribute(most, "keepdims", 1) != 1:
        return False
    axes = attribute(most, "axes")
    if axes is None and len(most.inputs) > 1:
        array = constant_array(most.inputs[1])
        axes = None if array is None else array.reshape(-1).tolist()
    given = values if isinstance(values, tuple) else (values,)
    return axes == [-1] and any(numbers.inputs[0] is value for value in given)
