"""Attention that gives zeros for rows without a key, as `scaled_dot_product_attention` has it since PyTorch 2.5.

`symbolics` exports it so that its gradients are zeros there too, and not NaN:

    sees     any(m), or any(M != -inf) of a mask of numbers
    bias     where(m or not sees, 0, -inf), or where(sees, M, 0)
    weights  where(sees, softmax(scores + bias), 0)

It is read as the mask itself, m or M, added to the scores, and as the plain softmax; the zeros of rows are recorded beside that.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.graph.constants import attribute, constant_array, given, is_standard
from onnx_attnfuse.graph.sweep import sweep


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
