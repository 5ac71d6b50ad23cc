"""Rewrites that are wrong on purpose: a fused model with one thing changed at a fused operator, or in what was built for it.

Each mutation is a mistake that a fusion could make: a triangle too many or too few, a window off by one, a lost scale, keys for
values, heads in another order, a guard or a mask that is dropped, a fill that does not mask, angles of the wrong pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

ATTENTIONS = frozenset(["MultiHeadAttention", "Attention", "GroupQueryAttention"])
Change = Callable[[onnx.ModelProto, int], bool]


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((item for item in node.attribute if item.name == name), None)


def _set(node: onnx.NodeProto, name: str, value: float) -> None:
    found = _attribute(node, name)
    if found is not None:
        node.attribute.remove(found)
    node.attribute.append(helper.make_attribute(name, value))


def _flip(name: str, operator: str) -> Change:
    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        if node.op_type != operator or (name == "is_causal" and node.domain):
            return False
        found = _attribute(node, name)
        _set(node, name, 1 - (found.i if found is not None else 0))
        return True

    return change


def _scale(factor: float) -> Change:
    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        found = _attribute(node, "scale")
        if found is None or not found.f:
            return False
        _set(node, "scale", found.f * factor)
        return True

    return change


def _swap(one: int, other: int) -> Change:
    def change(model: onnx.ModelProto, place: int) -> bool:
        inputs = model.graph.node[place].input
        if max(one, other) >= len(inputs) or not inputs[one] or not inputs[other] or inputs[one] == inputs[other]:
            return False
        inputs[one], inputs[other] = inputs[other], inputs[one]
        return True

    return change


def _drop(input_place: int) -> Change:
    def change(model: onnx.ModelProto, place: int) -> bool:
        inputs = model.graph.node[place].input
        if input_place >= len(inputs) or not inputs[input_place]:
            return False
        inputs[input_place] = ""
        return True

    return change


def _heads(names: tuple[str, ...], factor: float) -> Change:
    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        found = [item for name in names if (item := _attribute(node, name)) is not None]
        if not found or any(item.i * factor != int(item.i * factor) for item in found):
            return False
        for item in found:
            item.i = int(item.i * factor)
        return True

    return change


def _reordered(input_place: int) -> Change:
    """The two halves of the channels change places, and the heads with them."""

    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        if input_place >= len(node.input) or not node.input[input_place]:
            return False
        name = node.input[input_place]
        halves = helper.make_node("Split", [name], ["wrong_a", "wrong_b"], axis=-1, num_outputs=2)
        version = next((item.version for item in model.opset_import if item.domain in {"", "ai.onnx"}), 0)
        if version < 18:
            del halves.attribute[1:]
        joined = helper.make_node("Concat", ["wrong_b", "wrong_a"], ["wrong_c"], axis=-1)
        node.input[input_place] = "wrong_c"
        model.graph.node.insert(place, joined)
        model.graph.node.insert(place, halves)
        return True

    return change


AT_ATTENTIONS: dict[str, Change] = {
    "triangle": _flip("unidirectional", "MultiHeadAttention"), "is_causal": _flip("is_causal", "Attention"),
    "scale lost": _scale(3.0), "scale squared": _scale(0.5),
    "keys for values": _swap(1, 2), "queries for keys": _swap(0, 1), "key mask dropped": _drop(4), "bias dropped": _drop(5),
    "mask dropped": _drop(3), "past keys for past values": _swap(6, 7), "past values for past keys": _swap(4, 5),
    "heads doubled": _heads(("num_heads", "q_num_heads", "kv_num_heads"), 2),
    "heads halved": _heads(("num_heads", "q_num_heads", "kv_num_heads"), 0.5),
    "queries of other heads": _reordered(0), "keys of other heads": _reordered(1), "values of other heads": _reordered(2),
}  # fmt: skip
_RENAMED = {
    "LessOrEqual": "Less", "Less": "LessOrEqual", "GreaterOrEqual": "Greater", "Greater": "GreaterOrEqual", "And": "Or",
    "Or": "And",    "ReduceMax": "ReduceMin", "Max": "Min",
}  # fmt: skip


def _renamed(model: onnx.ModelProto, place: int) -> bool:
    node = model.graph.node[place]
    if node.op_type not in _RENAMED:
        return False
    node.op_type = _RENAMED[node.op_type]
    return True


def _passed(input_place: int) -> Change:
    """A node is left out: what reads it reads one of its inputs."""

    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        if node.op_type not in {"Where", "Not", "Mul", "Add", "Sub", "Neg"} or input_place >= len(node.input):
            return False
        if any(item.name == node.output[0] for item in model.graph.output):
            return False
        found = False
        for other in model.graph.node:
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index], found = node.input[input_place], True
        return found

    return change


def _number(step: float, factor: float) -> Change:
    """A small constant that the node reads is another one."""

    def change(model: onnx.ModelProto, place: int) -> bool:
        node = model.graph.node[place]
        for tensor in model.graph.initializer:
            if tensor.name in node.input and int(np.prod(tensor.dims, dtype=np.int64)) <= 4:
                array = numpy_helper.to_array(tensor)
                if array.dtype.kind not in "fi" or node.op_type not in {
                    "Add", "Sub", "Mul", "Where", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Slice", "Trilu",
                }:  # fmt: skip
                    return False
                moved = (array * factor + step).astype(array.dtype)
                if array.dtype.kind == "f" and np.any(np.abs(array) > 100):
                    moved = np.where(np.abs(array) > 100, -10 * step, array).astype(array.dtype)
                if np.array_equal(moved, array):
                    return False
                copied = numpy_helper.from_array(moved, f"wrong_{tensor.name}")
                for index, name in enumerate(node.input):
                    if name == tensor.name:
                        node.input[index] = copied.name
                model.graph.initializer.append(copied)
                return True
        return False

    return change


def _turned(model: onnx.ModelProto, place: int) -> bool:
    return _flip("interleaved", "RotaryEmbedding")(model, place)


def _angles(model: onnx.ModelProto, place: int) -> bool:
    node = model.graph.node[place]
    if node.op_type != "RotaryEmbedding":
        return False
    return _swap(2, 3)(model, place) if node.domain else _swap(1, 2)(model, place)


IN_FRONT: dict[str, Change] = {
    "another comparison": _renamed, "second input in the place of the node": _passed(1),
    "first in the place of the node": _passed(0),
    "third in the place of the node": _passed(2), "constant + 1": _number(1, 1), "constant - 1": _number(-1, 1),
    "constant doubled": _number(0, 2), "angles of other pairs": _turned, "sines for cosines": _angles,
}  # fmt: skip


def _above(model: onnx.ModelProto, place: int, own: set[str]) -> list[int]:
    """The nodes that were built for an operator, from it upwards."""
    producers = {name: index for index, node in enumerate(model.graph.node) for name in node.output}
    found, pending = list[int](), list(model.graph.node[place].input)
    while pending:
        index = producers.get(pending.pop())
        if index is not None and index not in found and not own.isdisjoint(model.graph.node[index].output):
            found.append(index)
            pending += model.graph.node[index].input
    return sorted(found)


def wrong_rewrites(before: onnx.ModelProto, after: onnx.ModelProto) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Mutations of a fused model: what was changed, the value at which it shows, and the model."""
    known = {name for node in before.graph.node for name in node.output}
    own = {name for node in after.graph.node for name in node.output} - known
    for place, node in enumerate(after.graph.node):
        if node.op_type not in ATTENTIONS or (node.op_type == "Attention" and node.output[0] not in known | own):
            continue
        targets = [(place, AT_ATTENTIONS)] + [(index, IN_FRONT) for index in _above(after, place, own)]
        for index, changes in targets:
            for name, change in changes.items():
                model = copy.deepcopy(after)
                if change(model, index):
                    yield f"{name} at {after.graph.node[index].op_type}", node.output[0], model
