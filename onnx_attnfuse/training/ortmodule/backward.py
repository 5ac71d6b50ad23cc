"""The backward part of an attention, found from the forward part by the results of its nodes.

With weights P = dropout(softmax(S)) and result O = P·V, and X for whatever takes the place of O's gradient:

    dV = Pᵀ·X      dP = X·Vᵀ      dS = softmax'(dropout'(dP))      dQ = scale · dS·K      dK = scale · dSᵀ·Q

Every product is read as a sum over factors, so that transposed operands, fused transposes and factors all come out alike. What
satisfies these equations is the gradient for X, whatever X is; so nothing is taken on trust, neither names nor order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, leaves, length
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.match.contractions import Contraction, read_contraction
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.attention.spec import AttentionSpec, Replaced
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.training.ortmodule.products import (
    Labelled,
    Views,
    finds_repeated_axes,
    labelled,
    operand_of,
    over,
    reads_gradient,
    under,
)
from onnx_attnfuse.training.ortmodule.site import Backward, BiasGradient, Dropout

_SAME_SCALE = 1e-5
"""Factors that differ by less, relatively, are one number rounded twice."""


def read_backward(
    spec: AttentionSpec,
    softmax: Softmax,
    dropout: Dropout | None,
    replaced: Collection[ir.Node],
    facts: Facts,
    sees: ir.Value | None = None,
) -> Backward:
    """Reads the backward part.

    Args:
        spec: The forward part.
        softmax: The softmax of the forward part.
        dropout: The dropout of the weights; None without one.
        replaced: Nodes that others were read in the place of.
        facts: Shapes and types.
        sees: Which rows have a key, if weights of others are set to 0.

    Raises:
        Refused: There is no backward part, or it computes something else, or an inner value is used by others too.
    """
    return _Reading(spec, softmax, dropout, replaced, facts, sees).read()


@dataclasses.dataclass(frozen=True)
class _Step:
    """A place on the walk down from dS."""

    indexed: IndexedValue
    factor: float = 1.0
    selected: tuple[tuple[ir.Value, bool], ...] = ()
    """Conditions under which the gradient was set to 0 on the way, and the truth value that keeps it."""


class _Reading:
    """A backward part as far as it has been read."""

    def __init__(
        self,
        spec: AttentionSpec,
        softmax: Softmax,
        dropout: Dropout | None,
        replaced: Collection[ir.Node],
        facts: Facts,
        sees: ir.Value | None,
    ) -> None:
        self.spec, self.softmax, self.dropout, self.facts, self.sees = spec, softmax, dropout, facts, sees
        self.forward = {*spec.nodes, *replaced}
        self.weights = _weights(spec, facts)
        self.query, self.key, self.value = (Views(operand[0].indexed, facts) for operand in spec.operands())
        self.selects = tuple((step.condition.value, step.keep_where) for step in spec.mask if isinstance(step, Replaced))
        self.products: list[tuple[Contraction, int, Axes]] = []
        self.gradients: list[tuple[ir.Node, Axes]] = []
        self.found: dict[str, IndexedValue] = {}
        self.biases: list[BiasGradient] = []
        self.inner: list[ir.Value] = []

    def read(self) -> Backward:
        """Reads from the weights to the gradients."""
        self._check_inner_uses()
        for indexed in _chain(self.weights, self.softmax.weights, self.facts):
            self._uses_of_weights(indexed)
        if len(self.gradients) > 1 or len(self.products) > 1:
            raise Refused("several-gradients", "the weights have several gradients", self.softmax.node.name)
        if not self.gradients and not self.products:
            raise Refused("no-backward", "no gradient flows here: the attention is frozen, or its result is not used")
        output = self._output_gradient()
        self._value_gradient(output)
        for node, axes in self.gradients:
            self._below_scores(_Step(IndexedValue(node.outputs[0], axes)))
        query, key, value = (self.found.get(role) for role in ("query", "key", "value"))
        return Backward(output, query, key, value, tuple(self.biases), tuple(self.inner))

    def _check_inner_uses(self) -> None:
        """Inner values other than the weights serve the forward part alone."""
        kept = {indexed.value for indexed in _chain(self.weights, self.softmax.weights, self.facts)}
        kept.add(self.spec.output[0].value)
        for node in self.spec.nodes:
            for value in node.outputs:
                others = [user for user, _ in value.uses() if user not in self.forward and user.op_type != "Shape"]
                if value in kept or not (others or value.is_graph_output()):
                    continue
                user = f"{others[0].op_type} '{others[0].name}'" if others else "the graph's results"
                raise Refused("inner-value-used", f"the intermediate value '{value.name}' is also used by {user}", node.name)

    def _uses_of_weights(self, indexed: IndexedValue) -> None:
        """Sorts the users of the weights, and of views of them, into products and gradients of the softmax."""
        if indexed.value.is_graph_output():
            raise Refused("weights-used", f"the attention weights '{indexed.value.name}' are an output of the graph")
        for user, index in indexed.value.uses():
            if user in self.forward or user.op_type == "Shape":
                continue
            contraction = read_contraction(user, self.facts)
            view = under(user, indexed.axes, self.facts)
            if contraction is not None and index < 2:
                self.products.append((contraction, index, indexed.axes))
            elif reads_gradient(user) and index == 1:
                self._softmax_gradient(user, indexed)
            elif view is not None:
                self._uses_of_weights(view)
            else:
                message = f"the attention weights '{indexed.value.name}' are also used by {user.op_type} '{user.name}'"
                raise Refused("weights-used", message, user.name)

    def _softmax_gradient(self, node: ir.Node, indexed: IndexedValue) -> None:
        axis: int = attribute(node, "axis", -1 if node.op_type.endswith("_13") else 1) % len(indexed.axes)
        last = axis == len(indexed.axes) - 1 or node.op_type.endswith("_13")
        if not last or set(leaves(indexed.axes[axis])) != set(leaves(self.spec.key_axis)):
            raise Refused("other-softmax-axis", "the softmax is differentiated along another axis", node.name)
        self.gradients.append((node, indexed.axes))

    def _output_gradient(self) -> IndexedValue:
        """X: the common operand of dV and dP."""
        found = [self._from_weights_gradient(node, axes) for node, axes in self.gradients]
        for contraction, index, axes in self.products if not found else ():
            product = labelled(contraction, {index: axes}, None, self.spec.v_head_axis, self.facts)
            if product is None:
                raise Refused(
                    "other-product", "the weights are not multiplied by the gradient of the result", contraction.node.name
                )
            found.append(operand_of(product, 1 - index, self.facts))
        return found[0]

    def _from_weights_gradient(self, node: ir.Node, axes: Axes) -> IndexedValue:
        """X, from the gradient of the softmax up to X·Vᵀ."""
        indexed, dropped, zeroed = IndexedValue(_given(node, 0), axes), False, False
        while True:
            self.inner.append(indexed.value)
            producer = indexed.value.producer()
            if producer is None:
                raise Refused("no-weights-gradient", "the gradient of the weights is not a product with the values", node.name)
            contraction = read_contraction(producer, self.facts)
            if contraction is not None:
                break
            if producer.op_type in {"DropoutGrad", "BitmaskDropoutGrad"}:
                self._check_dropout(producer)
                indexed, dropped = IndexedValue(_given(producer, 0), indexed.axes), True
                continue
            if is_standard(producer, "Where") and producer.inputs[0] is self.sees and self.facts.number(_given(producer, 2)) == 0:
                indexed, zeroed = IndexedValue(_given(producer, 1), indexed.axes), True
                continue
            above = over(indexed, self.facts)
            if above is None:
                message = f"{producer.op_type} in the gradient of the weights cannot be read"
                raise Refused("no-weights-gradient", message, producer.name)
            indexed = above
        if dropped != (self.dropout is not None):
            raise Refused("other-dropout", "dropout is applied in one direction only", node.name)
        if zeroed != (self.sees is not None):
            raise Refused("row-rule", "rows are zeroed in one direction only", node.name)
        for index in (0, 1):
            values = self.value.axes_of(contraction.operands[index])
            known = None if values is None else labelled(contraction, {index: values}, indexed.axes, (), self.facts)
            if known is not None and contraction.factor == 1.0 and known.summed == frozenset(leaves(self.spec.v_head_axis)):
                return operand_of(known, 1 - index, self.facts)
        raise Refused(
            "no-weights-gradient", "the gradient of the weights is not a product with the values", contraction.node.name
        )

    def _check_dropout(self, node: ir.Node) -> None:
        mine, ratio = self.dropout, self.facts.number(_given(node, 2))
        if mine is None or node.inputs[1] is not mine.mask or ratio != mine.ratio:
            raise Refused("other-dropout", "dropout's gradient is that of another one", node.name)

    def _value_gradient(self, output: IndexedValue) -> None:
        """The gradient of the values, Pᵀ·X."""
        views = Views(output, self.facts)
        for contraction, index, axes in self.products:
            given = views.axes_of(contraction.operands[1 - index])
            product = None if given is None else labelled(contraction, {index: axes, 1 - index: given}, None, (), self.facts)
            if product is None or contraction.factor != 1.0 or not self._is(product, self.spec.query_axis, self.spec.v_head_axis):
                message = "the weights are multiplied with something else than the gradient of the result"
                raise Refused("other-product", message, contraction.node.name)
            self.found["value"] = product.result

    def _is(self, product: Labelled, summed: Axis, channels: Axis) -> bool:
        """Whether a product sums over an axis and keeps all others of the attention, with these channels."""
        spec = self.spec
        others = spec.key_axis if set(leaves(summed)) == set(leaves(spec.query_axis)) else spec.query_axis
        wanted = {*leaves(spec.batch_axis), *leaves(others), *leaves(channels)}
        kept = [leaf for axis in product.result.axes for leaf in leaves(axis)]
        return product.summed == frozenset(leaves(summed)) and set(kept) == wanted and len(kept) == len(wanted)

    def _below_scores(self, step: _Step) -> None:
        """Follows dS down to dQ and dK; its other users differentiate a summand of the scores."""
        unread = step.indexed.value.is_graph_output()
        self.inner.append(step.indexed.value)
        for node, index in step.indexed.value.uses():
            if node.op_type == "Shape":
                continue
            further = self._through(node, index, step)
            if further is not None:
                self._below_scores(further)
            elif not self._operand_gradient(node, index, step):
                unread = True
        if not unread:
            return
        if step.selected:
            raise Refused("masked-bias", "a bias has a gradient and is masked after it is added", step.indexed.value.name)
        self.biases.append(BiasGradient(step.indexed, step.factor))

    def _through(self, node: ir.Node, index: int, step: _Step) -> _Step | None:
        """The step after an operator that the gradient passes on its way through the steps between Q·Kᵀ and the softmax."""
        view = under(node, step.indexed.axes, self.facts)
        if view is not None:
            return dataclasses.replace(step, indexed=view)
        if self._keeps_all(node, step):
            return dataclasses.replace(step, indexed=IndexedValue(node.outputs[0], step.indexed.axes))
        if not is_standard(node, "Mul", "Div", "Neg", "Where"):
            return None
        indexed = IndexedValue(node.outputs[0], step.indexed.axes)
        match node.op_type:
            case "Neg":
                return dataclasses.replace(step, indexed=indexed, factor=-step.factor)
            case "Where":
                kept = self._selected(node, index)
                return None if kept is None else dataclasses.replace(step, indexed=indexed, selected=(*step.selected, kept))
            case _:
                return self._scaled(node, index, step)

    def _keeps_all(self, node: ir.Node, step: _Step) -> bool:
        """Whether a sum over axes that are found at run time is over none: the operand that the gradient is of was not repeated.

        Where lengths are unknown, ONNX Runtime compares the shape of the operand with that of the other one.
        """
        axes = node.inputs[1] if is_standard(node, "ReduceSum") and len(node.inputs) > 1 else None
        compared = None if axes is None else axes.producer()
        if axes is None or compared is None or not finds_repeated_axes(compared):
            return False
        if not attribute(node, "keepdims", 1) or not attribute(node, "noop_with_empty_axes", 0):
            return False
        shape = compared.inputs[axes.index() or 0]
        measured = None if shape is None or not is_standard(shape.producer(), "Shape") else producer_of(shape).inputs[0]
        dims = self.facts.dims(measured)
        return dims is not None and dims == tuple(length(axis) for axis in step.indexed.axes)

    def _scaled(self, node: ir.Node, index: int, step: _Step) -> _Step | None:
        """The step after a product with a number, or a division by one."""
        other = _given(node, 1 - index)
        number, rank = self.facts.number(other), self.facts.rank(other)
        if not number or (node.op_type == "Div" and index == 1) or rank is None or rank > len(step.indexed.axes):
            return None
        factor = step.factor * number if node.op_type == "Mul" else step.factor / number
        return dataclasses.replace(step, indexed=IndexedValue(node.outputs[0], step.indexed.axes), factor=factor)

    def _selected(self, node: ir.Node, index: int) -> tuple[ir.Value, bool] | None:
        """The condition under which the gradient of a replaced score is kept, if the forward part replaced by the same."""
        condition, other = _given(node, 0), _given(node, 3 - index) if index else None
        if other is None or self.facts.number(other) != 0:
            return None
        kept = condition, index == 1
        return kept if kept in self.selects else None

    def _operand_gradient(self, node: ir.Node, index: int, step: _Step) -> bool:
        """Notes dQ or dK; whether the node computes one of them."""
        contraction = read_contraction(node, self.facts)
        if contraction is None or index > 1:
            return False
        spec = self.spec
        roles = (("query", self.key, spec.key_axis), ("key", self.query, spec.query_axis))
        for role, views, summed in roles:
            axes = views.axes_of(contraction.operands[1 - index])
            given = None if axes is None else {index: step.indexed.axes, 1 - index: axes}
            product = None if given is None else labelled(contraction, given, None, (), self.facts)
            if product is None or not self._is(product, summed, spec.head_axis):
                continue
            if not math.isclose(step.factor * contraction.factor, spec.scale, rel_tol=_SAME_SCALE):
                raise Refused("other-scale", f"the gradient of the {role} has another factor than the scores", node.name)
            if role in self.found:
                raise Refused("several-gradients", f"the {role} has several gradients", node.name)
            self.found[role] = product.result
            return True
        return False


def _given(node: ir.Node, index: int) -> ir.Value:
    value = given(node, index)
    if value is None:
        raise Refused("malformed", f"{node.op_type} lacks an input", node.name)
    return value


def _weights(spec: AttentionSpec, facts: Facts) -> IndexedValue:
    """The weights as they enter the product with the values."""
    output, values = spec.output[0], spec.value[0].indexed
    producer = output.value.producer()
    contraction = None if producer is None else read_contraction(producer, facts)
    if contraction is None:
        raise Refused("no-product", "the result is not a product with the values", spec.name)
    index = 1 if contraction.operands[1] is values.value else 0
    found = labelled(contraction, {index: values.axes}, output.axes, (), facts)
    if found is None:
        raise Refused("no-product", "the result is not a product with the values", spec.name)
    return operand_of(found, 1 - index, facts)


def _chain(weights: IndexedValue, softmax: ir.Value, facts: Facts) -> Iterator[IndexedValue]:
    """The weights where they enter the product, and before each view up to the softmax."""
    indexed: IndexedValue | None = weights
    while indexed is not None:
        yield indexed
        if indexed.value is softmax:
            return
        indexed = over(indexed, facts)
    raise Refused("changed-weights", "the weights are changed in a way that has no fused gradient")
