"""Rewrites that are wrong on purpose: a fused model with one thing changed at a fused operator, or in what was built for it.

Each change is a mistake that a fusion could make: a triangle too many or too few, a window off by one, a lost scale, keys for
values, heads or positions in another order, a guard or a mask that is dropped, a fill that does not mask, branches of a test that
change places, angles of the wrong pairs, a cache that is one position too long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

ATTENTIONS = frozenset(["MultiHeadAttention", "Attention", "GroupQueryAttention"])
_FAR = np.iinfo(np.int64).max


class Place:
    """One node of a copy of the model, in the graph or in a branch, and what changes it."""

    def __init__(self, model: onnx.ModelProto, path: tuple[int, ...], number: int) -> None:
        self.model, self.graph, self.number = model, _graph(model, path), number
        self.node = self.graph.node[number]

    @property
    def inputs(self) -> dict[str, int]:
        """Where an attention operator reads what."""
        names = {
            "MultiHeadAttention": ["queries", "keys", "values", "bias", "key mask", "mask", "past keys", "past values"],
            "Attention": ["queries", "keys", "values", "mask", "past keys", "past values"],
            "GroupQueryAttention": ["queries", "keys", "values", "past keys", "past values", "last places", "length"],
        }[self.node.op_type]
        return {name: place for place, name in enumerate(names) if place < len(self.node.input) and self.node.input[place]}

    def attribute(self, name: str) -> onnx.AttributeProto | None:
        """An attribute of the node."""
        return next((item for item in self.node.attribute if item.name == name), None)

    def set(self, name: str, value: float) -> bool:
        """Sets an attribute."""
        found = self.attribute(name)
        if found is not None:
            self.node.attribute.remove(found)
        self.node.attribute.append(helper.make_attribute(name, value))
        return True

    def constant(self, array: np.ndarray) -> str:
        """A new constant of the model."""
        name = f"wrong_constant_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def insert(self, place: int, *nodes: onnx.NodeProto) -> bool:
        """Puts nodes in front; the node's input at `place` is the last one's output."""
        self.node.input[place] = nodes[-1].output[0]
        for node in reversed(nodes):
            self.graph.node.insert(self.number, node)
        return True


Change = Callable[[Place], bool]


def _graph(model: onnx.ModelProto, path: tuple[int, ...]) -> onnx.GraphProto:
    graph = model.graph
    for number, attribute in zip(path[::2], path[1::2], strict=True):
        graph = graph.node[number].attribute[attribute].g
    return graph


def _flip(name: str, operator: str, default: int = 0) -> Change:
    def change(at: Place) -> bool:
        if at.node.op_type != operator or (name == "is_causal" and at.node.domain):
            return False
        found = at.attribute(name)
        return at.set(name, 1 - (found.i if found is not None else default))

    return change


def _factor(name: str, factor: float) -> Change:
    def change(at: Place) -> bool:
        found = at.attribute(name)
        return found is not None and found.f != 0 and at.set(name, found.f * factor)

    return change


def _step(name: str, step: int) -> Change:
    def change(at: Place) -> bool:
        found = at.attribute(name)
        return found is not None and found.i > 0 and at.set(name, found.i + step if step else -1)

    return change


def _fill(value: float) -> Change:
    return lambda at: "key mask" in at.inputs and at.set("mask_filter_value", value)


def _swap(one: str, other: str) -> Change:
    def change(at: Place) -> bool:
        first, second = at.inputs.get(one), at.inputs.get(other)
        inputs = at.node.input
        if first is None or second is None or inputs[first] == inputs[second]:
            return False
        inputs[first], inputs[second] = inputs[second], inputs[first]
        return True

    return change


def _drop(*names: str) -> Change:
    def change(at: Place) -> bool:
        places = [at.inputs.get(name) for name in names]
        for place in places:
            if place is not None:
                at.node.input[place] = ""
        return None not in places

    return change


def _heads(names: tuple[str, ...], factor: float) -> Change:
    def change(at: Place) -> bool:
        found = [item for name in names if (item := at.attribute(name)) is not None]
        if not found or any(item.i * factor != int(item.i * factor) for item in found):
            return False
        for item in found:
            item.i = int(item.i * factor)
        return True

    return change


def _halves(name: str) -> Change:
    """The two halves of the channels change places, and the heads with them."""

    def change(at: Place) -> bool:
        place = at.inputs.get(name)
        if place is None:
            return False
        version = next((item.version for item in at.model.opset_import if item.domain in {"", "ai.onnx"}), 0)
        more = {"num_outputs": 2} if version >= 18 else {}
        halves = helper.make_node("Split", [at.node.input[place]], ["wrong_a", "wrong_b"], axis=-1, **more)
        return at.insert(place, halves, helper.make_node("Concat", ["wrong_b", "wrong_a"], ["wrong_c"], axis=-1))

    return change


def _moved(name: str, axis: int) -> Change:
    """All along an axis moves on by one, the first to the end."""

    def change(at: Place) -> bool:
        place = at.inputs.get(name)
        if place is None:
            return False
        source = at.node.input[place]
        zero, one, far, axes = (at.constant(np.array([item], np.int64)) for item in (0, 1, _FAR, axis))
        later = helper.make_node("Slice", [source, one, far, axes], ["wrong_a"])
        first = helper.make_node("Slice", [source, zero, one, axes], ["wrong_b"])
        return at.insert(place, later, first, helper.make_node("Concat", ["wrong_a", "wrong_b"], ["wrong_c"], axis=axis))

    return change


def _mapped(name: str, operator: str) -> Change:
    def change(at: Place) -> bool:
        place = at.inputs.get(name)
        return place is not None and at.insert(place, helper.make_node(operator, [at.node.input[place]], ["wrong_a"]))

    return change


def _added(name: str, step: int) -> Change:
    """An integer input is off by one."""

    def change(at: Place) -> bool:
        place = at.inputs.get(name)
        if place is None:
            return False
        return at.insert(
            place, helper.make_node("Add", [at.node.input[place], at.constant(np.array(step, np.int32))], ["wrong_a"])
        )

    return change


_ALL_HEADS = ("num_heads", "q_num_heads", "kv_num_heads")
AT_ATTENTIONS: dict[str, Change] = {
    "triangle": _flip("unidirectional", "MultiHeadAttention"), "is_causal": _flip("is_causal", "Attention"),
    "no triangle": _flip("causal", "GroupQueryAttention", 1),
    "scale lost": _factor("scale", 3.0), "scale squared": _factor("scale", 0.5), "scale negated": _factor("scale", -1.0),
    "cap doubled": _factor("softcap", 2.0), "cap lost": _factor("softcap", 0.0), "window + 1": _step("local_window_size", 1),
    "window - 1": _step("local_window_size", -1), "window lost": _step("local_window_size", 0),
    "a fill that does not mask": _fill(-1.0),
    "keys for values": _swap("keys", "values"), "queries for keys": _swap("queries", "keys"),
    "key mask dropped": _drop("key mask"), "bias dropped": _drop("bias"), "mask dropped": _drop("mask"),
    "past dropped": _drop("past keys", "past values"), "past keys for past values": _swap("past keys", "past values"),
    "heads doubled": _heads(_ALL_HEADS, 2), "heads halved": _heads(_ALL_HEADS, 0.5), "one group": _heads(("kv_num_heads",), 0.5),
    "last place + 1": _added("last places", 1), "last place - 1": _added("last places", -1), "length + 1": _added("length", 1),
    "mask negated": _mapped("mask", "Neg"), "keys negated": _mapped("keys", "Neg"), "values negated": _mapped("values", "Neg"),
    "queries capped": _mapped("queries", "Relu"),
    **{f"{name} of other heads": _halves(name) for name in ("queries", "keys", "values")},
    **{f"{name} of the next position": _moved(name, 1) for name in ("queries", "keys", "values")},
    **{f"{name} of the next position": _moved(name, 2) for name in ("past keys", "past values")},
    **{f"{name} of the next head": _moved(name, 1) for name in ("past keys", "past values", "mask")},
    **{f"{name} of the next channel": _moved(name, -1) for name in ("queries", "keys", "values", "past keys", "past values")},
    **{f"{name} of the next entry": _moved(name, 0) for name in ("queries", "keys", "values", "past keys", "mask")},
    "mask of the next key": _moved("mask", -1), "mask of the next row": _moved("mask", -2),
    "key mask of the next key": _moved("key mask", -1),
}  # fmt: skip
_RENAMED = {
    "LessOrEqual": "Less", "Less": "LessOrEqual", "GreaterOrEqual": "Greater", "Greater": "GreaterOrEqual", "And": "Or",
    "Or": "And", "ReduceMax": "ReduceMin", "ReduceMin": "ReduceMax", "Max": "Min", "Sub": "Add",
}  # fmt: skip
_LEFT_OUT = {"Where": (1, 2), "Not": (0,), "Mul": (0, 1), "Add": (0, 1), "Sub": (0, 1), "Neg": (0,)}
_WITH_NUMBERS = {"Add", "Sub", "Mul", "Where", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Slice", "Trilu"}


def _renamed(at: Place) -> bool:
    if at.node.op_type not in _RENAMED:
        return False
    at.node.op_type = _RENAMED[at.node.op_type]
    return True


def _passed(place: int) -> Change:
    """A node is left out: what reads it reads one of its inputs."""

    def change(at: Place) -> bool:
        node = at.node
        if place not in _LEFT_OUT.get(node.op_type, ()) or any(item.name == node.output[0] for item in at.graph.output):
            return False
        found = False
        for other in _nodes(at.graph):
            for index, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[index], found = node.input[place], True
        return found

    return change


def _turned(at: Place) -> bool:
    """What is chosen where a test holds, and what where it does not, change places."""
    if at.node.op_type == "Where":
        at.node.input[1], at.node.input[2] = at.node.input[2], at.node.input[1]
        return True
    for item in at.node.attribute if at.node.op_type == "If" else ():
        item.name = {"then_branch": "else_branch", "else_branch": "then_branch"}[item.name]
    return at.node.op_type == "If"


def _number(step: float, factor: float) -> Change:
    """A small constant that the node reads is another one."""

    def change(at: Place) -> bool:
        if at.node.op_type not in _WITH_NUMBERS:
            return False
        for tensor in at.model.graph.initializer:
            if tensor.name in at.node.input and int(np.prod(tensor.dims, dtype=np.int64)) <= 4:
                array = numpy_helper.to_array(tensor)
                if array.dtype.kind not in "fi":
                    return False
                with np.errstate(over="ignore"):
                    moved = (array * factor + step).astype(array.dtype)
                if array.dtype.kind == "f" and np.any(np.abs(array) > 100):
                    moved = np.where(np.abs(array) > 100, -10 * step, array).astype(array.dtype)
                if np.array_equal(moved, array, equal_nan=array.dtype.kind == "f"):
                    return False
                at.node.input[list(at.node.input).index(tensor.name)] = at.constant(moved)
                return True
        return False

    return change


def _pairs(at: Place) -> bool:
    return _flip("interleaved", "RotaryEmbedding")(at)


def _angles(at: Place) -> bool:
    if at.node.op_type != "RotaryEmbedding":
        return False
    one, other = (2, 3) if at.node.domain else (1, 2)
    at.node.input[one], at.node.input[other] = at.node.input[other], at.node.input[one]
    return True


IN_FRONT: dict[str, Change] = {
    "another operator": _renamed, "second input in the place of the node": _passed(1),
    "first in the place of the node": _passed(0), "third in the place of the node": _passed(2), "choices turned": _turned,
    "constant + 1": _number(1, 1), "constant - 1": _number(-1, 1), "constant doubled": _number(0, 2),
    "angles of other pairs": _pairs, "sines for cosines": _angles,
}  # fmt: skip


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for item in node.attribute:
            yield from _nodes(item.g)


def _read(node: onnx.NodeProto) -> list[str]:
    """What a node reads, in its branches too."""
    return [*node.input, *(name for item in node.attribute for inner in _nodes(item.g) for name in inner.input)]


def _above(graph: onnx.GraphProto, place: int, own: set[str]) -> list[int]:
    """The nodes that were built for an operator, from it upwards."""
    producers = {name: index for index, node in enumerate(graph.node) for name in node.output}
    found, pending = list[int](), _read(graph.node[place])
    while pending:
        index = producers.get(pending.pop())
        if index is not None and index not in found and not own.isdisjoint(graph.node[index].output):
            found.append(index)
            pending += _read(graph.node[index])
    return sorted(found)


def _below(graph: onnx.GraphProto, node: onnx.NodeProto, known: set[str]) -> str:
    """The first value of the model before that a node's first output leads to."""
    value = node.output[0]
    while value not in known:
        value = next((other.output[0] for other in graph.node if value in other.input), "")
        if not value:
            return node.output[0]
    return value


def _places(after: onnx.ModelProto) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Attention operators: where their graph is, their number in it, and that of the node of the outermost graph they are in."""
    for number, node in enumerate(after.graph.node):
        if node.op_type in ATTENTIONS:
            yield (), number, number
        for place, item in enumerate(node.attribute):
            yield from (
                ((number, place), inner, number) for inner, other in enumerate(item.g.node) if other.op_type in ATTENTIONS
            )


def wrong_rewrites(before: onnx.ModelProto, after: onnx.ModelProto) -> Iterator[tuple[str, str, onnx.ModelProto]]:
    """Changes of a fused model: what was changed, the value of the model before at which it shows, and the model."""
    known = {name for node in before.graph.node for name in node.output}
    own = {name for node in after.graph.node for name in node.output} - known
    for path, place, outer in _places(after):
        value = _below(after.graph, after.graph.node[outer], known)
        targets = [(path, place, AT_ATTENTIONS)]
        targets += [((), index, IN_FRONT) for index in (*_above(after.graph, outer, own), *([outer] if path else []))]
        for where, index, changes in targets:
            for name, change in changes.items():
                model = copy.deepcopy(after)
                at = Place(model, where, index)
                operator = at.node.op_type + (" in a branch" if where else "")
                if change(at):
                    yield f"{name} at {operator}", value, model
