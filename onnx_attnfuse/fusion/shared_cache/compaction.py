"""New tokens in an order in which padding follows the real ones, as the buffer holds real tokens only.

A causal attention of tokens in that order gives each real token its result in the source, and every tokenwise operator does so
in any order. So there is a region around the attentions in which tokens are in the new order: they are rearranged where they
enter it, and put back wherever anything outside reads them. Operators that mix tokens, or are unknown, stay outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.packing.tokens import Tokens, spread
from onnx_attnfuse.fusion.packing.tokenwise import Step, read_step
from onnx_attnfuse.graph.along import Marks
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.edit import connect
from onnx_attnfuse.graph.ops import ASKS_SHAPE, is_contrib
from onnx_attnfuse.graph.uses import live, reached
from onnx_attnfuse.kernels.operators import group_query_attention, rotary_embedding
from onnx_attnfuse.reasons import Reason, Refused

_INT, _TRUTH = ir.DataType.INT64, ir.DataType.BOOL


@dataclasses.dataclass(frozen=True)
class Order:
    """The two orders of new tokens, each as places in the other, (b, s) int64."""

    back: ir.Value
    """For each token of the source its place: real ones first, each kind in its order."""
    front: ir.Value
    """For each place the token of the source."""


def new_order(builder: Builder, mask: ir.Value, *, on_host: bool) -> Order:
    """Emits the order of the new tokens.

    Args:
        builder: The builder.
        mask: The mask of the new tokens, ones and zeros, (b, s).
        on_host: Sizes lie where the model runs, so that tokens may be sorted; else all is counted where the mask lies.
    """
    return _sorted(builder, mask) if on_host else _counted(builder, mask)


def _sorted(builder: Builder, mask: ir.Value) -> Order:
    """The order by two sorts, as TopK keeps the order of equal numbers; the order back is that of the places in front."""
    dims = dims_of(builder, mask)
    count = builder.shape([dims[1]])

    def places(value: ir.Value, largest: int) -> ir.Value:
        dtype = builder.facts.dtype(value)
        found = builder.node("TopK", [value, count], {"axis": 1, "largest": largest}, dims=dims, dtype=dtype, outputs=2)
        node = found.producer()
        assert node is not None
        node.outputs[1].dtype = _INT
        builder.facts.record(node.outputs[1], dims, _INT)
        return node.outputs[1]

    front = places(mask, 1)
    return Order(places(front, 0), front)


def buffer_order(builder: Builder, earlier: ir.Value, new: ir.Value) -> ir.Value:
    """Emits the order of keys in the buffer, as places in the source, (b, past + s) int64.

    Real tokens of the past come first, then the new ones, real ones before padding. Padding of the past comes last, as the buffer
    does not hold it.

    Args:
        builder: The builder, where sizes lie where the model runs.
        earlier: The mask of the past, (b, past).
        new: The mask of the new tokens, ones and zeros, (b, s) int32.
    """
    dtype = ir.DataType.INT32
    kept = builder.cast(builder.cast(earlier, _TRUTH), dtype)
    ranks = [
        builder.elementwise("Mul", [kept, builder.constant(np.asarray(2, np.int32))]),
        builder.elementwise("Add", [new, builder.constant(np.asarray(1, np.int32))]),
    ]
    ranked = builder.node("Concat", ranks, {"axis": 1})
    return _sorted(builder, ranked).front


def _counted(builder: Builder, mask: ir.Value) -> Order:
    """The order by counting real tokens and padding, and nothing by shapes."""
    one, axis = builder.constant([1]), builder.constant(np.asarray(1))

    def counted(truth: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Ones where it holds, and how many there are up to each place, less one."""
        ones = builder.cast(truth, _INT)
        sums = builder.node("CumSum", [ones, axis])
        return ones, builder.elementwise("Sub", [sums, one])

    kept = builder.cast(mask, _TRUTH)
    _, places = counted(builder.elementwise("Equal", [mask, mask]))
    ones, ahead = counted(kept)
    last = builder.elementwise("Sub", [builder.reduce("ReduceSum", ones, [1]), one])
    after = builder.elementwise("Add", [builder.elementwise("Sub", [places, ahead]), last])
    back = builder.node("Where", [kept, ahead, after])
    front = builder.node("ScatterElements", [places, back, places], {"axis": 1})
    return Order(back, front)


class Compaction:
    """Rearranges the tokens of one graph around its attentions."""

    def __init__(self, builder: Builder, tokens: Tokens, order: Order) -> None:
        self._builder, self._tokens, self.order = builder, tokens, order
        self._marks: dict[ir.Value, Marks] = {}
        """Values that nodes of the region give."""
        self._steps: dict[ir.Node, Step] = {}
        """The nodes of the region."""
        self._moved: dict[tuple[ir.Value, Marks], ir.Value] = {}

    def apply(self, attentions: Sequence[ir.Node]) -> None:
        """Rearranges tokens in front of the attentions and puts them back after them, in place.

        Raises:
            Refused: A value would be needed in two layouts at once.
        """
        tokens: Marks = ("", "bs", "") if self._tokens.batch == 1 else ("b", "s", "")
        for node in attentions:
            self._take(Step(node, self._attention(node, tokens), (tokens,)))
        starts = [place for step in self._steps.values() for place in step.inputs()]
        for _ in reached(starts, self._above):
            pass
        self._check_layouts()
        readers = self._readers()
        for node, step in self._steps.items():
            for place, marks in step.marks.items():
                value = node.inputs[place]
                if value is not None and value not in self._marks:
                    node.replace_input_with(place, self._moved_to_front(value, marks))
        for value, outside in readers.items():
            restored = self._gathered(value, self._marks[value], self.order.back)
            if value.is_graph_output():
                connect(value, restored, self._builder, [])
            for node in outside:
                for place, item in enumerate(node.inputs):
                    if item is value:
                        node.replace_input_with(place, restored)

    def _attention(self, node: ir.Node, tokens: Marks) -> dict[int, Marks]:
        """The inputs of an attention that consist of tokens."""
        info = group_query_attention.INFO
        key = node.inputs[1]
        is_alone = key is not None and 0 in dims_of(self._builder, key)  # it reads keys that are in the buffer already
        found = dict.fromkeys(range(1 if is_alone else 3), tokens)
        if info.input(node, "position_ids") is not None:
            found[info.place("position_ids")] = tokens[:2]
        return found

    def _take(self, step: Step) -> None:
        """Makes a node one of the region."""
        self._steps[step.node] = step
        self._marks.update(zip(step.node.outputs, step.outputs, strict=False))

    def _check_layouts(self) -> None:
        """Checks that values of the region are read as they are given.

        Raises:
            Refused: One is not.
        """
        for step in self._steps.values():
            for value, marks in step.inputs():
                if self._marks.get(value, marks) != marks:
                    raise Refused("two-layouts", f"'{value.name}' is used in two layouts", step.node.name)

    def _above(self, place: tuple[ir.Value, Marks]) -> list[tuple[ir.Value, Marks]]:
        """Takes in whatever computes tokens of the region one by one, and gives what it reads."""
        value, marks = place
        node = value.producer()
        if node is None or value in self._marks or node in self._steps or not self._tokens.is_full(value, marks):
            return []
        step = self._step(node, value, marks)
        if isinstance(step, Reason):
            return []
        self._take(step)
        return step.inputs()

    def _step(self, node: ir.Node, value: ir.Value, marks: Marks) -> Step | Reason:
        places = node.inputs[1] if is_contrib(node, rotary_embedding.INFO.name) else None
        if places is None or self._tokens.facts.rank(places) != 1:
            return read_step(node, value, marks, self._tokens, in_place=True)
        # the first place, from which tokens are counted
        node.replace_input_with(1, self._builder.elementwise("Add", [self.order.front, places]))
        return Step(node, {0: marks}, (marks,))

    def _readers(self) -> dict[ir.Value, list[ir.Node]]:
        """The values of the region that are read outside, in the source's order, and by whom."""
        graph = self._builder.graph
        needed = live(graph)
        found: dict[ir.Value, list[ir.Node]] = {}
        for value in self._marks:
            users = dict.fromkeys(
                node
                for node, place in value.uses()
                if node in needed
                and node.op_type not in ASKS_SHAPE
                and not (node in self._steps and place in self._steps[node].marks)
            )
            if any(node.graph is not graph for node in users):
                raise Refused("control-flow", f"'{value.name}' is read in a branch or body")
            if any(node in self._steps for node in users):
                raise Refused("two-layouts", f"'{value.name}' is used in two layouts")
            if users or value.is_graph_output():
                found[value] = list(users)
        return found

    def _moved_to_front(self, value: ir.Value, marks: Marks) -> ir.Value:
        """A value that enters the region, with its tokens in the new order and one for each entry of the batch."""
        key = value, marks
        if key not in self._moved:
            each = value if self._tokens.batch == 1 else spread(self._builder, value, marks, self._tokens)
            self._moved[key] = self._gathered(each, marks, self.order.front)
        return self._moved[key]

    def _gathered(self, value: ir.Value, marks: Marks, order: ir.Value) -> ir.Value:
        """The tokens of a value in another order."""
        builder, tokens, dims = self._builder, self._tokens, dims_of(self._builder, value)
        if tokens.batch == 1:
            axis = marks.index("bs") - len(marks)
            row = builder.reshape(order, [tokens.length])
            return builder.node("Gather", [value, row], {"axis": axis})
        joined = next((axis for axis, mark in enumerate(marks) if len(mark) == 2), None)
        if joined is not None:
            letters = tuple(marks[joined])
            split = builder.reshape(value, [*dims[:joined], *map(tokens.size, letters), *dims[joined + 1 :]])
            return builder.reshape(self._gathered(split, (*marks[:joined], *letters, *marks[joined + 1 :]), order), dims)
        if marks == ("b", "s"):
            return builder.node("GatherElements", [value, order], {"axis": 1})
        lead = [marks.index("b"), marks.index("s")]
        perm = [*lead, *(axis for axis in range(len(marks)) if axis not in lead)]
        turned = builder.transpose(value, perm)
        index = builder.reshape(order, [tokens.batch, tokens.length, 1])
        found = builder.node("GatherND", [turned, index], {"batch_dims": 1})
        return builder.transpose(found, [perm.index(axis) for axis in range(len(perm))])
