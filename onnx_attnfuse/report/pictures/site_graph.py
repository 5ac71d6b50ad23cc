"""From the nodes of a site to a drawing: the nodes that its operands flow through, and the other inputs, by role.

Arithmetic on shapes and what makes a mask are left out: a drawing shows an attention, not its surroundings.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array, constant_tensor, subgraphs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE
from onnx_attnfuse.graph.uses import reached
from onnx_attnfuse.kernels.operators import OpInfo, info_of
from onnx_attnfuse.report.pictures.model import Arrow, Box, BoxKind, Drawing

_MAX_DRAWN_NODES = 160
"""Nodes from which on a drawing would show nothing."""
_NODES_AROUND_UNREAD = 10
"""Nodes that are drawn around an attention that nothing more is known of."""
_MAX_LENGTH_CHARACTERS = 15
"""Characters of a length."""
UNNAMED = "input"
"""The role of an operand that is only called something by who reads it."""
_MAX_VIEW_CHAIN = 4
"""Views between a value and what it is known as."""
_VIEWS = frozenset(["Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
_SHAPES = ASKS_SHAPE | {"Constant"}
_CONDITIONS = {("If", 0): "test at run time", ("Where", 0): "condition"}
_SHOWN_ATTRIBUTES = (
    "num_heads kv_num_heads q_num_heads scale unidirectional is_causal local_window_size do_rotary softcap".split()
)
"""Attributes of fused operators that are shown."""
_SIGNS = {"Mul": "×", "Div": "÷", "Add": "+", "Sub": "−", "Pow": "^"}


@dataclasses.dataclass(frozen=True)
class PicturedSite:
    """The part of a graph that a drawing shows: from operands to results."""

    results: tuple[ir.Value, ...]
    operands: Mapping[ir.Value, str]
    """The operands, each with its role in the attention."""
    others: Mapping[ir.Value, str]
    """The other inputs: masks, scales, tables."""
    fused: ir.OperatorIdentifier | None = None
    """The name of the fused operator."""
    anchor: ir.Node | None = None
    """The node that the site is called after."""


def trace(site: PicturedSite, facts: Facts) -> Drawing | None:
    """Draws what lies between the operands and the results of a site; None if that is too much to see, or cannot be followed."""
    above = _above(site.results, [*site.operands, *site.others])
    if above is None:
        return None
    below = _below(site.operands, above)
    nodes = [node for node in above if node in below]
    return _Sheet(site, facts, nodes).drawing() if nodes else None


def surroundings(node: ir.Node, facts: Facts, *, fused: bool) -> Drawing | None:
    """Draws the nodes nearest to an attention that is not read; weights are left out.

    Args:
        node: Its Softmax, or the fused operator.
        facts: Shapes.
        fused: Whether it is the operator.
    """

    def near(item: ir.Node) -> Iterator[ir.Node]:
        others = (*_producers(item), *(user for value in item.outputs for user, _ in value.uses()))
        return (other for other in others if other.op_type not in _SHAPES and other.graph is node.graph)

    found = list(itertools.islice(reached([node], near), _NODES_AROUND_UNREAD))
    results = tuple(value for item in found for value in item.outputs if not any(user in found for user, _ in value.uses()))
    operator = node.op_identifier() if fused else None
    return _Sheet(PicturedSite(results, {}, {}, operator, anchor=node), facts, found).drawing()


def _above(results: Iterable[ir.Value], frontier: Iterable[ir.Value]) -> list[ir.Node] | None:
    """The nodes that results are computed by up to the stops, those in branches included."""
    ends = set(frontier)
    found: dict[ir.Node, None] = {}
    pending = list(results)
    while pending:
        value = pending.pop()
        node = None if value in ends else value.producer()
        if node is None or node in found or node.op_type in _SHAPES:
            continue
        found[node] = None
        pending += _read(node)
        if len(found) > 4 * _MAX_DRAWN_NODES:
            return None
    return list(found)


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a node, and the results of its branches."""
    yield from (value for value in node.inputs if value is not None)
    for graph in subgraphs(node):
        yield from graph.outputs


def _below(operands: Iterable[ir.Value], within: Sequence[ir.Node]) -> set[ir.Node]:
    """The nodes of `within` that data of an operand flows through."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in within:
        for value in _read(node):
            readers.setdefault(value, []).append(node)

    def below(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
        return (node for value in values for node in readers.get(value, ()))

    return set(reached(below(operands), lambda node: below(node.outputs)))


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer


class _Sheet:
    """A drawing in the making."""

    def __init__(self, site: PicturedSite, facts: Facts, nodes: Sequence[ir.Node]) -> None:
        self._site = site
        self._facts = facts
        self._nodes = nodes
        self._boxes: list[Box] = []
        self._arrows: dict[tuple[int, int], str] = {}
        self._places: dict[object, int] = {}

    def drawing(self) -> Drawing | None:
        """The drawing, or None if it is too large."""
        if len(self._nodes) > _MAX_DRAWN_NODES:
            return None
        for node in self._nodes:
            self._places[node] = self._box(node)
        for node in self._nodes:
            self._enter(node)
        for value in self._site.results:
            tail = self._places.get(value.producer())
            if tail is not None:
                self._arrow(tail, self._put(Box("result", self._shape(value), "result", value.name or "")))
        arrows = tuple(Arrow(tail, head, label) for (tail, head), label in self._arrows.items())
        return Drawing(tuple(self._boxes), arrows)

    def _put(self, box: Box) -> int:
        self._boxes.append(box)
        return len(self._boxes) - 1

    def _arrow(self, tail: int, head: int, label: str = "") -> None:
        self._arrows.setdefault((tail, head), label)

    def _box(self, node: ir.Node) -> int:
        is_fused = node.op_identifier() == self._site.fused
        kind: BoxKind = "fused" if is_fused else "anchor" if node is self._site.anchor else "node"
        return self._put(Box(node.op_type, self._detail(node, kind), kind, node.name or ""))

    def _enter(self, node: ir.Node) -> None:
        """Arrows into a node, from other nodes, its branches, and operands."""
        for slot, value in enumerate(node.inputs):
            if value is None:
                continue
            tail = self._places.get(value.producer())
            if tail is None or value in self._site.operands or value in self._site.others:
                tail = self._operand(value, node, slot)
            if tail is not None:
                self._arrow(tail, self._places[node])
        for name, branch in node.attributes.items():
            if branch.type is ir.AttributeType.GRAPH and not branch.is_ref():
                for value in branch.as_graph().outputs:
                    tail = self._places.get(value.producer())
                    if tail is not None:
                        self._arrow(tail, self._places[node], name.removesuffix("_branch"))

    def _operand(self, value: ir.Value, node: ir.Node, slot: int) -> int | None:
        """The box of a value from outside; None where it is no operand: shapes, axes, single numbers."""
        role = self._site.operands.get(value)
        if role in {None, UNNAMED}:
            role = self._other(value) or self._role(value, node, slot) or role
        if role is None:
            return None
        key = value if value in self._site.operands else (value, node)
        if key not in self._places:
            self._places[key] = self._put(Box(role, self._shape(value), "operand", value.name or ""))
        return self._places[key]

    def _other(self, value: ir.Value) -> str | None:
        """The role of a value that is a view of a mask, a scale or a table."""
        viewed: ir.Value | None = value
        for _ in range(_MAX_VIEW_CHAIN):
            if viewed is None or viewed in self._site.others:
                break
            node = viewed.producer()
            viewed = node.inputs[0] if node is not None and node.op_type in _VIEWS else None
        return None if viewed is None else self._site.others.get(viewed)

    def _role(self, value: ir.Value, node: ir.Node, slot: int) -> str | None:
        info = _fused(node)
        if info is not None and slot < len(info.inputs):
            name = list(info.inputs)[slot]
            return name.replace("_", " ") if len(name) > 1 else info.role(slot)
        if (node.op_type, slot) in _CONDITIONS:
            return _CONDITIONS[node.op_type, slot]
        tensor = constant_tensor(value)
        if tensor is not None and (tensor.size < 2 or not tensor.dtype.is_floating_point() or not self._site.operands):
            return None
        dtype = self._facts.dtype(value)
        is_data = dtype is None or dtype.is_floating_point() or dtype is ir.DataType.BOOL
        return ("weight" if tensor is not None else UNNAMED) if is_data else None

    def _detail(self, node: ir.Node, kind: BoxKind) -> str:
        """The detail that tells most of a node, on one line."""
        if kind == "fused" or _fused(node) is not None:
            shown = [
                f"{name}={_number(value)}" for name in _SHOWN_ATTRIBUTES if (value := attribute(node, name)) not in (None, 0)
            ]
            return ", ".join(shown)
        if node.op_type in _SIGNS:
            arrays = (constant_array(value, 1) for value in node.inputs)
            number = next((array.item() for array in arrays if array is not None and array.size), None)
            return self._shape(node.outputs[0]) if number is None else f"{_SIGNS[node.op_type]} {_number(number)}"
        if node.op_type == "Transpose":
            return "perm " + " ".join(map(str, attribute(node, "perm", [])))
        if node.op_type == "Softmax":
            return f"axis {attribute(node, 'axis', -1)}"
        return self._shape(node.outputs[0])

    def _shape(self, value: ir.Value) -> str:
        dims = self._facts.dims(value)
        return "" if dims is None else " × ".join(_short(str(dim)) for dim in dims)


def _fused(node: ir.Node) -> OpInfo | None:
    """The record of an operator that computes a part of an attention, or None; operators that move padding are no such parts."""
    info = info_of(node)
    return None if info is None or info.kind in {"padding", "normalization", "activation", "view"} else info


def _short(text: str) -> str:
    """A length that would make a box too wide, cut."""
    return text if len(text) <= _MAX_LENGTH_CHARACTERS else text[: _MAX_LENGTH_CHARACTERS - 1] + "…"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
