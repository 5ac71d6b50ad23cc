"""Extraction of the subgraph that some values are computed by: the nodes between operands and results, and the light ones around.

    subgraph = extract((old, new), frontier, facts)

The walk goes upwards from the results. It ends at the `frontier`, at inputs of graphs, at constants, and at every operator that
is neither cheap index and mask arithmetic nor computed from the frontier; values there become inputs of the subgraph. So a
subgraph is independent of the size of the model, and no weight is read for it: a constant on the frontier is an input too. A
shape alone carries no data: a value computed from the `Shape` of a frontier value only does not depend on that value.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, constant_array, constant_tensor, has_unknown_attribute, reads, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import (
    ASKS_SHAPE,
    CASTS,
    COMPARES,
    ELEMENTWISE,
    GATHERS,
    REARRANGES,
    REDUCTIONS,
    REPEATS,
    SLICES,
    is_standard,
)
from onnx_attnfuse.graph.rounding import dequantizes, quantizes
from onnx_attnfuse.graph.uses import reached, reads_input, sources
from onnx_attnfuse.reasons import Refused

Role = Literal["operand", "weight", "activation", "given", "factor", "constant"]
"""A stop; one that is a constant; a value cut off from heavy work; an input of a graph; one that is merely a factor of the
results; a constant that is fed."""

_FEW = 64
"""Values above one that are looked at."""
EMBEDDED = 1 << 14
"""Constants of at most this many elements are in the piece itself; larger ones are fed, which saves copying them."""
_READABLE = 1 << 25
"""Constants of more bytes are never read: the piece gets random numbers in their place."""
_MAX_NODES_BELOW_FRONTIER = 4096
"""Nodes below the stops that are looked at."""

_VIEWS = REARRANGES | SLICES
_PRODUCTS = frozenset([("Div", 0), ("Einsum", 0), ("Einsum", 1), ("MatMul", 0), ("MatMul", 1), ("Mul", 0), ("Mul", 1)])
_SUMS = frozenset([("Add", 0), ("Add", 1), ("Sub", 0), ("Sub", 1), ("Where", 1), ("Where", 2)])
_MOVED = frozenset((op, 0) for op in _VIEWS | REPEATS | CASTS | {"Neg", "ReduceMean", "ReduceSum"})
_EXPONENTIALS = frozenset(["Exp", "LogSoftmax", "ReduceLogSumExp", "Softmax"])
_LINEAR = _PRODUCTS | _MOVED | _SUMS
"""Operators by the places of inputs that their output is linear in."""
_LIGHT = (ELEMENTWISE | REARRANGES | REPEATS | SLICES | GATHERS | CASTS | REDUCTIONS | ASKS_SHAPE).union(
    "ArgMax ArgMin CastLike Compress Concat Constant ConstantOfShape CumSum EyeLike NonZero OneHot Pad Range Resize".split(),
    "ScatterElements ScatterND TopK Trilu".split(),
)


@dataclasses.dataclass(frozen=True)
class Input:
    """A value that a piece is given."""

    value: ir.Value
    role: Role
    dims: Dims
    dtype: ir.DataType
    summed: int = 1
    """Along how many elements a product with it sums, if it is a weight."""


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A part of a graph that computes some values."""

    nodes: tuple[ir.Node, ...]
    """In an order in which they can run."""
    inputs: tuple[Input, ...]
    constants: tuple[ir.Value, ...]
    """Constants of the model that the subgraph holds."""
    results: tuple[ir.Value, ...]

    def read(self) -> set[ir.Value]:
        """The values that more is asked of than their shape."""
        used = {value for node in self.nodes if node.op_type not in ASKS_SHAPE for value in node.inputs if value is not None}
        return used.union(self.results)

    def apart(self) -> list[ir.Node]:
        """The nodes that no data of an operand flows into: index and mask arithmetic."""
        below = {item.value for item in self.inputs if item.role == "operand"}
        found: list[ir.Node] = []
        for node in self.nodes:
            if node.op_type in ASKS_SHAPE or below.isdisjoint(node.inputs):
                found.append(node)
            else:
                below.update(node.outputs)
        return found

    def prepared(self) -> set[ir.Value]:
        """The weights, and values computed from them alone."""
        found = {item.value for item in self.inputs if item.role == "weight"}
        constant = found.union(self.constants)
        for node in self.nodes:
            if constant.issuperset(value for value in node.inputs if value is not None) and not found.isdisjoint(node.inputs):
                found.update(node.outputs)
                constant.update(node.outputs)
        return found

    def only(self, *results: ir.Value) -> Subgraph:
        """The part of it that some values need."""
        needed = set(results)
        nodes: list[ir.Node] = []
        for node in reversed(self.nodes):
            if needed & set(node.outputs):
                nodes.append(node)
                needed.update(value for value in node.inputs if value is not None)
        return Subgraph(
            tuple(reversed(nodes)),
            tuple(item for item in self.inputs if item.value in needed),
            tuple(value for value in self.constants if value in needed),
            results,
        )


def extract(results: Sequence[ir.Value], frontier: Iterable[ir.Value], facts: Facts) -> Subgraph:
    """The piece that computes `results` from `frontier`.

    Raises:
        Refused: No piece can be made: control flow, an attribute that a function is called with, a value of unknown type.
    """
    stops = frozenset(frontier)
    subgraph = _Walk(stops, tuple(results), facts).go()
    given = {item.value for item in subgraph.inputs}
    shown = {value: _shown_by(value, given) if value in given else value for value in stops}
    moved = frozenset(value for value in shown.values() if value not in given or not _is_elsewhere(value, subgraph, facts))
    return subgraph if moved == stops else _Walk(moved, tuple(results), facts).go()


def _is_elsewhere(value: ir.Value, subgraph: Subgraph, facts: Facts) -> bool:
    """Whether one result reads a value, and another what that is made of: rotated keys are values, too, in one of them."""
    drawn = {item.value for item in subgraph.inputs if item.role == "operand"}

    def follows(item: ir.Value, node: ir.Node) -> bool:
        return (item is value or item not in drawn) and node.op_type not in ASKS_SHAPE and _is_light(node, facts)

    below = drawn.intersection(itertools.islice(sources([value], follows), 1, _FEW))
    read = [{item.value for item in subgraph.only(result).inputs} for result in subgraph.results] if below else []
    return any(value in inputs and not below <= inputs for inputs in read)


def _shown_by(value: ir.Value, given: Container[ir.Value]) -> ir.Value:
    """The input that a value is a view of, so that the two cannot be drawn apart; or the value itself."""
    node = value.producer()
    while node is not None and node.op_type in REARRANGES and is_standard(node) and (shown := node.inputs[0]) is not None:
        if shown in given:
            return shown
        node = shown.producer()
    return value


def with_factors(subgraph: Subgraph, results: Sequence[ir.Value]) -> Subgraph:
    """The piece with those inputs marked as factors that `results` are linear in, and that something is multiplied by.

    Nothing is masked by a factor of the lowest float or of -inf, as by something that is added to scores: the products overflow
    however they are computed, and then it is the order of a sum that decides between infinities and NaN.
    """
    users: dict[ir.Value | None, list[tuple[ir.Node, int]]] = {}
    for node in subgraph.only(*results).nodes:
        for place, value in enumerate(node.inputs):
            users.setdefault(value, []).append((node, place))
    marked = [
        dataclasses.replace(item, role="factor")
        if item.role == "given" and item.dtype.is_floating_point() and _is_factor(item.value, users)
        else item
        for item in subgraph.inputs
    ]
    return dataclasses.replace(subgraph, inputs=tuple(marked))


def _is_inside(value: ir.Value, node: ir.Node) -> bool:
    """Whether a value is computed in a graph nested in a node."""
    graph = value.graph
    return graph is not node.graph and any(graph in (inner, *inner.subgraphs()) for inner in subgraphs(node))


def _is_factor(value: ir.Value, users: Mapping[ir.Value | None, Sequence[tuple[ir.Node, int]]]) -> bool:
    values = reached([value], lambda item: (output for node, _ in users.get(item, ()) for output in node.outputs))
    places = [(node, place) for item in values for node, place in users.get(item, ())]
    is_linear = all(is_standard(node) and (node.op_type, place) in _LINEAR for node, place in places)
    return is_linear and any((node.op_type, place) in _PRODUCTS for node, place in places)


def is_addend(value: ir.Value) -> bool:
    """Whether a value, or a view of it, is a term of a sum whose other term is no constant."""
    uses = uses_through(value, lambda node, place: (node.op_type, place) in _MOVED)
    return any(node.op_type in {"Add", "Sub"} and constant_tensor(node.inputs[1 - place]) is None for node, place in uses)


def is_score(value: ir.Value) -> bool:
    """Whether a value reaches a softmax or an exponential with nothing but sums on the way."""
    through = _MOVED | _SUMS
    uses = uses_through(value, lambda node, place: (node.op_type, place) in through)
    return any(node.op_type in _EXPONENTIALS for node, _ in uses)


def uses_through(
    value: ir.Value, passes: Callable[[ir.Node, int], bool], most: int = _MAX_NODES_BELOW_FRONTIER
) -> Iterator[tuple[ir.Node, int]]:
    """The uses of a value and of its results through some operators, by the places of inputs, nearest first.

    Args:
        value: The value.
        passes: Whether the outputs of a node count, which reads a value at a place.
        most: Values beyond which no more are looked at.
    """

    def after(item: ir.Value) -> Iterator[ir.Value]:
        return (output for node, place in item.uses() if passes(node, place) for output in node.outputs)

    return (use for item in itertools.islice(reached([value], after), most) for use in item.uses())


class _Walk:
    def __init__(self, frontier: frozenset[ir.Value], results: tuple[ir.Value, ...], facts: Facts) -> None:
        self._stops = frontier
        self._results = results
        self._facts = facts
        self._below = _below(frontier, results)
        self._nodes: dict[ir.Node, None] = {}
        self._inputs: dict[ir.Value, Input] = {}
        self._constants: dict[ir.Value, None] = {}
        self._read = self._values_read()

    def go(self) -> Subgraph:
        pending: list[tuple[ir.Value | ir.Node, bool]] = [(value, False) for value in reversed(self._results)]
        while pending:
            item, ready = pending.pop()
            if isinstance(item, ir.Node):
                if ready:
                    self._nodes[item] = None
                elif item not in self._nodes:
                    pending.append((item, True))
                    pending.extend((value, False) for value in reversed(tuple(reads(item))) if not _is_inside(value, item))
                continue
            node = self._entered(item)
            if node is not None:
                pending.append((node, False))
        return Subgraph(tuple(self._nodes), tuple(self._inputs.values()), tuple(self._constants), self._results)

    def _values_read(self) -> set[ir.Value]:
        """All values of the piece but those that only a shape is wanted of, and that the shape is known of."""

        def follows(value: ir.Value, node: ir.Node) -> bool:
            return self._end(value) is None and not (node.op_type in ASKS_SHAPE and self._is_plain(node.inputs[0]))

        return set(sources(self._results, follows))

    def _is_plain(self, value: ir.Value | None) -> bool:
        """Whether this is an activation of a shape that is known from those of other values."""
        known = None if value is None else self._known(value)
        if value is None or known is None or not known[1].is_floating_point() or len(known[0]) < 3:
            return False
        names = {name for dim in known[0] for name in sizes.symbols(dim)}
        return not any(is_fresh(name, self._facts) and self._facts.origins[name][0] is not value for name in names)

    def _end(self, value: ir.Value) -> Role | None:
        """The role of a value at which the walk ends, or None where it goes on."""
        tensor = constant_tensor(value)
        if value in self._stops:
            return "operand" if tensor is None else "weight"
        if tensor is not None:
            return "constant" if tensor.nbytes <= _READABLE else "activation"
        node = value.producer()
        if node is None:
            return "given"
        heavy = node not in self._below and not _is_light(node, self._facts)
        return "activation" if heavy and self._known(value) is not None else None

    def _entered(self, value: ir.Value) -> ir.Node | None:
        """The node to go on with, or None where the walk ends."""
        node = value.producer()
        if value in self._inputs or value in self._constants or node in self._nodes:
            return None
        role = self._end(value)
        if role is None and value not in self._read:
            role = "activation"
        if role is not None:
            self._ended(value, role)
            return None
        assert node is not None
        if any(True for _ in subgraphs(node)) and not is_standard(node, "Scan", "Loop"):
            raise Refused("control-flow", f"there is control flow in it, {node.op_type}", node.name)
        if has_unknown_attribute(node):
            raise Refused("function-attribute", f"an attribute of {node.op_type} is a parameter of the function", node.name)
        return node

    def _ended(self, value: ir.Value, role: Role) -> None:
        tensor = constant_tensor(value)
        if role == "constant" and tensor is not None and tensor.size <= EMBEDDED:
            self._constants[value] = None
            return
        known = self._known(value)
        if known is None:
            raise Refused("unknown-type", f"the shape or the element type of '{value.name}' is unknown")
        self._inputs[value] = Input(value, role, *known, summed=_summed(value, self._facts) if role == "weight" else 1)

    def _known(self, value: ir.Value) -> tuple[Dims, ir.DataType] | None:
        dims, dtype = self._facts.dims(value), self._facts.dtype(value)
        return None if dims is None or dtype is None else (dims, dtype)


def _summed(weight: ir.Value, facts: Facts) -> int:
    """Along how many elements the first product sums that takes a weight, or a view of it; 1 if there is none."""
    for node, place in uses_through(weight, lambda node, _: node.op_type in _VIEWS):
        value = node.inputs[place]
        dims = facts.dims(value)
        if node.op_type in {"Gemm", "MatMul"} and place == 1 and dims is not None and len(dims) == 2:
            length = dims[1 if attribute(node, "transB", 0) else 0]
            return length if isinstance(length, int) else 1
    return 1


def is_fresh(name: str, facts: Facts) -> bool:
    """Whether the symbol names an axis that nothing is known of and that a node computes, under whatever name."""
    origin = facts.origins.get(name)
    return origin is not None and origin[0].producer() is not None


def _below(frontier: Iterable[ir.Value], results: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that data of a stop flows into, nearest first, up to a bound; from a result only those that lead to another."""
    above = _above(frozenset(frontier), results)

    def users(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
        uses = ((node, value) for value in values for node, _ in value.uses() if node.op_type not in ASKS_SHAPE)
        return (node for node, value in uses if value not in results or node in above)

    return set(itertools.islice(reached(users(frontier), lambda node: users(node.outputs)), _MAX_NODES_BELOW_FRONTIER))


def _above(frontier: frozenset[ir.Value], results: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that compute the results from the stops, nearest first, up to a bound."""
    values = sources(results, lambda value, _: value not in frontier)
    made = (node for value in values if value not in frontier and (node := value.producer()) is not None)
    return set(itertools.islice(made, _MAX_NODES_BELOW_FRONTIER))


def _is_light(node: ir.Node, facts: Facts) -> bool:
    """Whether the node is cheap and reads no weights."""
    if quantizes(node) or dequantizes(node):
        return True
    if not is_standard(node, *_LIGHT):
        return False
    if node.op_type not in {"Gather", "Div", "Mod"}:
        return True
    first, second = node.inputs[:2]
    if node.op_type == "Gather":
        table = constant_tensor(first)
        return table is None or table.nbytes <= _READABLE
    dtype = facts.dtype(first)
    if dtype is None or not dtype.is_integer():
        return True
    return second is not None and not reads_input(second)  # on a zero that data makes, some kernels end the process


_COUNTING = COMPARES | {"Add", "Clip", "Div", "Max", "Min", "Sub", "Trilu"}
_WINDOWS = "left_window_size", "right_window_size", "local_window_size"
_SHOWS, _MOST = 4, 1024
"""Numbers up to the first show at the usual lengths; those above the second would make pieces too large to judge."""


def reach_of(nodes: Iterable[ir.Node]) -> int:
    """The largest number that positions are compared with, moved or divided by, as far as longer sequences pay; else 0."""
    found = 0
    for node in nodes:
        numbers = [attribute(node, name, 0) for name in _WINDOWS if name in node.attributes]
        for value in node.inputs if node.op_type in _COUNTING else ():
            array = constant_array(value, limit=1)
            if array is not None and array.dtype.kind in "iu":
                numbers.append(abs(int(array.reshape(-1)[0])))
        found = max([found, *(number for number in numbers if _SHOWS < number <= _MOST)])
    return found
