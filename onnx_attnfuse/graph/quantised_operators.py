"""Operators that compute on quantised numbers (QLinearMatMul and its like), decomposed around attentions, and put back.

    a, b ─ QLinearMatMul ─ y                                                    as quantisers write it in QOperator format
    a ─ DequantizeLinear ┐
    b ─ DequantizeLinear ┴ MatMul ─ QuantizeLinear ─ y                          its meaning

A model decomposed so is a quantised model like any other (`graph.rounding`). Kernels round a number that falls between two
steps as they like, so a decomposition may be one step off: nodes that need none are put back, one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes, given, is_standard
from onnx_attnfuse.graph.edit import connect
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CASTS, CONTRIB, REARRANGES, REPEATS, SLICES, is_contrib, plain_domain, read_as
from onnx_attnfuse.graph.rounding import dequantizes, quantizes
from onnx_attnfuse.graph.sweep import Detached, detach, sweep
from onnx_attnfuse.graph.uses import before, label, origin, reached

_VIEWS = REARRANGES | REPEATS | SLICES
_FLOAT_STEPS = _VIEWS | CASTS | frozenset("Add Clip Div Max Min Mul Neg Sub Tanh Where".split())
"""Operators of floats between a softmax and its products, gone through in both directions."""
_MOST_NODES = 4096
_PRODUCTS = ("QLinearMatMul",)


@dataclasses.dataclass(frozen=True)
class _Meaning:
    """The operator of floats that an operator on quantised numbers computes, with the places of its inputs."""

    op: str
    operands: tuple[int | tuple[int, int, int], ...]
    """For each input of the operator of floats: the place of one that is taken as it is, or those of numbers, scale and point."""
    scale: int
    """The place of the scale of the result; its zero point is after it."""
    attributes: tuple[str, ...] = ()


_TWO = ((0, 1, 2), (3, 4, 5))
_MEANINGS: dict[tuple[str, str], _Meaning] = {
    ("", "QLinearMatMul"): _Meaning("MatMul", _TWO, 6),
    (CONTRIB, "QLinearAdd"): _Meaning("Add", _TWO, 6),
    (CONTRIB, "QLinearMul"): _Meaning("Mul", _TWO, 6),
    (CONTRIB, "QLinearSoftmax"): _Meaning("Softmax", ((0, 1, 2),), 3, ("axis",)),
    (CONTRIB, "QLinearWhere"): _Meaning("Where", (0, (1, 2, 3), (4, 5, 6)), 7),
}


@dataclasses.dataclass(frozen=True)
class DecomposedOperator:
    """One operator on quantised numbers, and the views right after it, decomposed."""

    old: ir.Value
    """The quantised numbers that it gave."""
    new: ir.Value
    """The same in its place."""
    nodes: Detached
    """The operator and the views."""
    op: ir.Node
    """The operator of floats."""
    given: tuple[ir.Value | None, ...]
    """Its inputs."""

    @property
    def names(self) -> Iterator[tuple[str, str]]:
        """The names of new nodes, each with that of the operator which the node is part of; empty for its inputs."""
        made = self.new.producer()
        if made is not None:
            yield label(made), self.op.name or ""
        for value in self.given:
            node = None if value is None else before(value, *_VIEWS).producer()
            if dequantizes(node):
                yield label(node), ""

    @property
    def is_whole(self) -> bool:
        """Whether all of the decomposition is as it was built, and is read."""
        made = self.new.producer()
        if made is None or made.graph is None or self.op.graph is None or not self.new.uses():
            return False
        before = made.inputs[0]
        while before is not None and before is not self.op.outputs[0]:
            before = origin(before, *_VIEWS)
        return before is not None and tuple(self.op.inputs) == self.given

    def put_back(self, builder: Builder) -> None:
        """Puts the operator back in the place of its decomposition; nodes are to be sorted afterwards."""
        made = self.new.producer()
        assert made is not None
        self.nodes.restore(made)
        annotated = self.old.shape, self.old.type
        connect(self.new, self.old, builder, [user for user, _ in self.new.uses()])
        self.old.shape, self.old.type = annotated
        sweep([self.new])


@dataclasses.dataclass(frozen=True)
class DecomposedOperators:
    """All decomposed operators of a graph."""

    operators: tuple[DecomposedOperator, ...] = ()
    """In the order of the graph."""
    views: Detached = dataclasses.field(default_factory=lambda: Detached(()))
    """The views of quantised numbers that nothing reads since."""

    @property
    def names(self) -> dict[str, str]:
        """The names of new nodes, each with that of the operator which the node is part of; empty for its inputs."""
        return dict(pair for item in self.operators for pair in item.names)

    def put_back(self, builder: Builder) -> int:
        """Puts back, in place, the operators whose decomposition is unchanged; their number."""
        whole = [item for item in reversed(self.operators) if item.is_whole]
        first = next((item.new.producer() for item in whole), None)
        if first is not None:
            self.views.restore(first)
        for item in whole:
            item.put_back(builder)
        views = [node.outputs[0] for node, _ in self.views.nodes if node.graph is not None]
        sweep([*views, *(value for item in self.operators for _, inputs in item.nodes.nodes for value in inputs)])
        if whole:
            builder.graph.sort()
        return len(whole)


def is_quantised(node: ir.Node) -> bool:
    """Whether a node computes on quantised numbers in a way that can be decomposed."""
    return node.op_type.startswith("QLinear") and read_as(node) in _MEANINGS


def decompose_quantised(graph: ir.Graph, facts: Facts, builder: Builder) -> DecomposedOperators:
    """Decomposes the operators on quantised numbers between the two products of an attention, in place.

    Args:
        graph: The graph; it is sorted afterwards.
        facts: Facts on it.
        builder: The builder of new nodes in it.

    Returns:
        The decompositions.
    """
    if not any(is_quantised(node) for node in graph):
        return DecomposedOperators()
    wanted = {node for softmax in graph if _is_softmax(softmax) for node in _around(softmax, facts)}
    decomposer = _Decomposer(facts, builder)
    found = [decomposer.decompose(node) for node in list(graph) if node in wanted]
    graph.sort()
    return DecomposedOperators(tuple(item for item in found if item is not None), detach(decomposer.viewed))


def _is_softmax(node: ir.Node) -> bool:
    return is_standard(node, "Softmax") or is_contrib(node, "QLinearSoftmax")


def _around(softmax: ir.Node, facts: Facts) -> frozenset[ir.Node]:
    """The operators on quantised numbers of an attention; none where it has no product of these after its softmax."""
    below = _walk(softmax.outputs, down=True)
    if not any(node.op_type in _PRODUCTS for node in below):
        return frozenset()
    above = _walk([value for value in softmax.inputs[:1] if value is not None], down=False)
    return frozenset(node for node in (softmax, *above, *below) if is_quantised(node) and _readable(node, facts))


def _walk(values: Iterable[ir.Value], *, down: bool) -> Sequence[ir.Node]:
    """The operators on the way from values to products, these included, in one direction."""

    def near(values: Iterable[ir.Value | None]) -> Iterator[ir.Node]:
        known = (value for value in values if value is not None)
        nodes = (node for value in known for node in ([user for user, _ in value.uses()] if down else [value.producer()]))
        return (node for node in nodes if node is not None and (is_quantised(node) or _goes_on(node)))

    def after(node: ir.Node) -> Iterable[ir.Node]:
        return () if node.op_type in _PRODUCTS else near(node.outputs if down else node.inputs)

    return list(itertools.islice(reached(near(values), after), _MOST_NODES))


def _goes_on(node: ir.Node) -> bool:
    return quantizes(node) or dequantizes(node) or is_standard(node, *_FLOAT_STEPS)


def _readable(node: ir.Node, facts: Facts) -> bool:
    """Whether a node's meaning can be written down: one scale for each tensor, a zero point that says its type, columns last."""
    meaning = _MEANINGS[plain_domain(node.domain), node.op_type]
    scales = [places[1] for places in meaning.operands if not isinstance(places, int)]
    inputs = [*node.inputs, *[None] * (meaning.scale + 2 - len(node.inputs))]
    needed = [inputs[meaning.scale + 1], *(inputs[place] for place in (*scales, meaning.scale))]
    if node.outputs[0].is_graph_output() or not all(value is not None and _is_single(value, facts) for value in needed):
        return False
    rank = facts.rank(node.outputs[0])
    return meaning.op != "Softmax" or attribute(node, "axis", -1) in {-1, None if rank is None else rank - 1}


def _is_single(value: ir.Value, facts: Facts) -> bool:
    dims = facts.dims(value)
    return dims is not None and all(dim == 1 for dim in dims)


class _Decomposer:
    """Builds decompositions in graph order; each tensor of quantised numbers is one of floats for all who read it."""

    def __init__(self, facts: Facts, builder: Builder) -> None:
        self.facts, self.builder = facts, builder
        self.viewed: list[ir.Value] = []
        """The views of quantised numbers that there are now of floats."""

    def decompose(self, node: ir.Node) -> DecomposedOperator | None:
        """Decomposes one operator, with the views that alone read it; None where its shape is not known."""
        facts, builder = self.facts, self.builder
        dims, meaning = facts.dims(node.outputs[0]), _MEANINGS[plain_domain(node.domain), node.op_type]
        if dims is None:
            return None
        views = list(_views_after(node)) if node.op_type in _PRODUCTS else []
        last = views[-1] if views else node
        builder.at(last)
        operands = [
            node.inputs[places] if isinstance(places, int) else self._floats(*(given(node, place) for place in places))
            for places in meaning.operands
        ]
        scale, point = node.inputs[meaning.scale], node.inputs[meaning.scale + 1]
        assert scale is not None
        attributes = {name: attribute(node, name) for name in meaning.attributes if name in node.attributes}
        dtype = facts.dtype(scale)
        result = builder.node(meaning.op, operands, attributes, dims=dims, dtype=dtype, hint=node.name or meaning.op)
        op, old = result.producer(), last.outputs[0]
        for view in views:
            result = self._viewed(view, result)
        hint, dims, dtype = f"{node.name or node.op_type}/rounded", facts.dims(old), facts.dtype(old)
        new = builder.node("QuantizeLinear", [result, scale, point], dims=dims, dtype=dtype, hint=hint)
        connect(old, new, builder, [user for user, _ in old.uses()])
        taken = _take_out([node, *views])
        assert op is not None
        op.name = node.name or op.name
        facts.learn(op)
        return DecomposedOperator(old, new, taken, op, tuple(op.inputs))

    def _floats(self, codes: ir.Value | None, scale: ir.Value | None, point: ir.Value | None) -> ir.Value:
        """The floats that quantised numbers represent, after their views rather than before."""
        assert codes is not None
        facts, node = self.facts, codes.producer()
        if node is not None and is_standard(node, *_VIEWS) and len(node.outputs) == 1 and facts.dims(codes) is not None:
            self.viewed.append(codes)
            return self._viewed(node, self._floats(node.inputs[0], scale, point))
        dtype = facts.dtype(scale)
        inputs = [codes, scale, *([] if point is None else [point])]
        return self.builder.node("DequantizeLinear", inputs, dims=facts.dims(codes), dtype=dtype)

    def _viewed(self, view: ir.Node, floats: ir.Value) -> ir.Value:
        """A view of floats in the place of the numbers that they represent."""
        dims, dtype = self.facts.dims(view.outputs[0]), self.facts.dtype(floats)
        return self.builder.node(view.op_type, [floats, *view.inputs[1:]], attributes(view), dims=dims, dtype=dtype)


def _views_after(node: ir.Node) -> Iterator[ir.Node]:
    """The views that alone read a node's output, in order."""
    while len(uses := list(node.outputs[0].uses())) == 1 and not node.outputs[0].is_graph_output():
        node, place = uses[0]
        if place or not is_standard(node, *REARRANGES) or node.outputs[0].is_graph_output():
            return
        yield node


def _take_out(nodes: Sequence[ir.Node]) -> Detached:
    """Takes nodes out whose results nothing reads but themselves."""
    found = [(node, tuple(node.inputs)) for node in nodes]
    for node, inputs in reversed(found):
        for place in range(len(inputs)):
            node.replace_input_with(place, None)
        assert node.graph is not None
        node.graph.remove(node)
    return Detached(tuple(found))
