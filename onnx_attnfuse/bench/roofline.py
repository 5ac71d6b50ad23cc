"""The least that a run of a model reads, writes and multiplies, and how long a device takes for that at least.

    done = work(model, {"input_ids": (8, 512)})    # bytes of weights, inputs and outputs, operations of products
    found = limit(done, limits_of("NVIDIA H200"))  # milliseconds that no implementation goes below

Weights and inputs are read once, however often they are used; of a table only the rows that are gathered; outputs are written
once. What lies between stays in the caches of the device, as far as anybody can tell from a graph. Data of weights is not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.bench.products import PAST, Shapes, Unknown, operations, shares_cache
from onnx_attnfuse.certify.pairing import inlined
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import constant_tensor, is_standard, subgraphs
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import ASKS_SHAPE, CASTS, GATHERS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.kernels.gpus import DeviceLimits

_VIEWS = REARRANGES | REPEATS | CASTS
_PARTS = GATHERS | SLICES
_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes and operations that a run of a model takes at least."""

    weights: int
    """Bytes of weights that are read."""
    inputs: int
    """Bytes of inputs that are read, caches among them."""
    outputs: int
    """Bytes of outputs that are written, caches among them."""
    operations: Mapping[str, int]
    """Operations of products, by element type; a product and a sum are two."""
    left_out: tuple[str, ...] = ()
    """Operators and outputs that could not be counted, or not in full."""

    @property
    def bytes(self) -> int:
        """All that is read and written."""
        return self.weights + self.inputs + self.outputs


@dataclasses.dataclass(frozen=True)
class Limit:
    """The least time that a device takes."""

    ms: float
    by: Literal["memory", "products"]
    """Which of the two takes longer."""
    device: str


@dataclasses.dataclass
class _Tally:
    """A count so far: bytes by weight or input, operations by element type."""

    read: dict[ir.Value, int] = dataclasses.field(default_factory=dict[ir.Value, int])
    operations: Counter[str] = dataclasses.field(default_factory=Counter[str])
    left_out: dict[str, None] = dataclasses.field(default_factory=dict[str, None])

    def reads(self, source: ir.Value, count: int) -> None:
        self.read[source] = max(count, self.read.get(source, 0))

    def add(self, other: _Tally) -> None:
        for source, count in other.read.items():
            self.reads(source, count)
        self.operations.update(other.operations)
        self.left_out.update(other.left_out)


def work(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> Work:
    """Counts what one run does at least.

    Args:
        model: The model.
        shapes: The shape of each input by its name.
    """
    model = inlined(model)
    graph = model.graph
    given = [tuple(shapes[value.name or ""]) if value.name in shapes else None for value in graph.inputs]
    facts = Facts(graph, [(shape, None) for shape in given])
    reader = _Reader(model, Shapes(facts, _lengths(graph.inputs, given)))
    tally = reader.count(graph)
    outputs = 0
    for value in graph.outputs:
        if value in reader.in_place:
            continue
        reader.read(value, tally)
        try:
            outputs += reader.size(value)
        except Unknown:
            tally.left_out[f"the output '{value.name}'"] = None
    weights = {source: count for source, count in tally.read.items() if constant_tensor(source) or source.const_value is not None}
    inputs = sum(tally.read.values()) - sum(weights.values())
    return Work(sum(weights.values()), inputs, outputs, dict(tally.operations), tuple(tally.left_out))


def _lengths(inputs: Sequence[ir.Value], given: Sequence[tuple[int, ...] | None]) -> dict[str, int]:
    """Numbers of the symbols that are alone in the shapes of inputs."""
    found: dict[str, int] = {}
    for value, shape in zip(inputs, given, strict=True):
        for dim, number in zip(value.shape or (), shape or (), strict=False):
            text = None if isinstance(dim, int) else dim.value
            name = sizes.lone_symbol(sizes.parse(text)) if isinstance(text, str) else None
            if name is not None:
                found[name] = number
    return found


class _Reader:
    """Counts the graphs of a model, whose functions are in the place of their calls."""

    def __init__(self, model: ir.Model, shapes: Shapes) -> None:
        self._model = model
        self._shapes = shapes
        self.in_place: set[ir.Value] = set()
        """Caches that are written where they lie, so that new positions only are written."""

    def count(self, graph: ir.Graph) -> _Tally:
        """The work of the nodes of a graph."""
        tally = _Tally()
        for node in graph:
            self._node(node, tally)
        return tally

    def size(self, value: ir.Value) -> int:
        """The bytes of a value.

        Raises:
            Unknown: They are not known.
        """
        return math.ceil(self._shapes.count(value) * self._bits(value) / 8)

    def read(self, value: ir.Value, tally: _Tally, node: ir.Node | None = None) -> None:
        """Notes that a value is read, if it is a view of a weight or an input; of a table the rows that `node` gives.

        Weights are converted before the first run, inputs in every one.
        """
        bits = self._bits(value)
        while is_standard(view := value.producer(), *_VIEWS) and view.inputs[0] is not None:
            value = view.inputs[0]
            bits = min(bits, self._bits(value))
        is_weight = value.const_value is not None or constant_tensor(value) is not None
        if not is_weight and not value.is_graph_input():
            return
        bits = bits if is_weight else self._bits(value)
        try:
            count = self._shapes.count(value)
            if node is not None:
                count = min(
                    count, sum(self._shapes.count(item) for item in node.outputs if item.uses() or item.is_graph_output())
                )
        except Unknown:
            tally.left_out[f"'{value.name}'"] = None
            return
        tally.reads(value, math.ceil(count * bits / 8))

    def _node(self, node: ir.Node, tally: _Tally) -> None:
        if is_standard(node, *ASKS_SHAPE, *_VIEWS, "Constant"):
            return
        if node.op_identifier() in self._model.functions:
            tally.left_out[node.op_type] = None
        parts = is_standard(node, *_PARTS)
        unread: Sequence[ir.Value | None] = ()
        if shares_cache(node, self._shapes):
            unread = node.inputs[PAST : PAST + 2]
            self.in_place.update(node.outputs[1:3])
            tally.left_out["what a cache in one buffer holds"] = None
        for index, value in enumerate(node.inputs):
            if value is not None and value not in unread:
                self.read(value, tally, node if parts and index == 0 else None)
        self._nested(node, tally)
        try:
            if count := operations(node, self._shapes):
                tally.operations[self._type(node)] += count
        except Unknown:
            tally.left_out[node.op_type] = None

    def _nested(self, node: ir.Node, tally: _Tally) -> None:
        """Branches: the work that all of them do; a body: once, as nobody knows how often it runs."""
        bodies = [self.count(graph) for graph in subgraphs(node)]
        if is_standard(node, "If") and bodies:
            tally.add(_least(bodies))
            return
        for body in bodies:
            tally.add(body)
            if body.operations:
                tally.left_out[f"{node.op_type}, counted once"] = None

    def _bits(self, value: ir.Value) -> int:
        dtype = self._shapes.facts.dtype(value)
        return 0 if dtype is None or dtype in {ir.DataType.STRING, ir.DataType.UNDEFINED} else dtype.bitwidth

    def _type(self, node: ir.Node) -> str:
        dtype = self._shapes.facts.dtype(node.inputs[0])
        return "unknown" if dtype is None else type_name(dtype)


def _least(branches: Sequence[_Tally]) -> _Tally:
    """The work that is done whichever branch is taken."""
    first, *others = branches
    for other in others:
        read = {source: min(count, other.read[source]) for source, count in first.read.items() if source in other.read}
        first = _Tally(read, first.operations & other.operations, {**first.left_out, **other.left_out})
    return first


def limit(done: Work, device: DeviceLimits) -> Limit:
    """The least time for some work: reading and writing, or multiplying, whichever takes longer, as both go on at once.

    Products in an element type of which no peak is known take no time here.
    """
    memory = done.bytes / device.bandwidth
    products = sum(count / device.peaks[dtype] for dtype, count in done.operations.items() if dtype in device.peaks)
    return Limit(1e3 * max(memory, products), "memory" if memory >= products else "products", device.name)


def share_in_words(done: Work, found: Limit | None, ms: float) -> str:
    """A line on how near a run of `ms` milliseconds comes to the limit of its device; without one, on the rates it reached."""
    if found is None:
        rates = [f"{_scaled(count / ms * 1e3, 'FLOP/s')} in {dtype}" for dtype, count in done.operations.items()]
        return f"limit of this device unknown; reached {', '.join([*rates, _scaled(done.bytes / ms * 1e3, 'B/s')])}"
    return f"share of the limit: {found.ms / ms:.0%} ({found.ms:.2g} ms of {ms:.3g} ms: {_what(done, found)})".replace(
        "%", " %", 1
    )


def _what(done: Work, found: Limit) -> str:
    if found.by == "products":
        return ", ".join(f"{_scaled(count, 'FLOP')} in {dtype}" for dtype, count in done.operations.items())
    parts = (("weights", done.weights), ("inputs", done.inputs), ("outputs", done.outputs))
    return ", ".join(f"{name} {_scaled(count, 'B')}" for name, count in _largest(parts))


def _largest(parts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The parts that make at least a fiftieth."""
    known = list(parts)
    return [part for part in known if part[1] * 50 >= sum(count for _, count in known)]


def _scaled(number: float, unit: str) -> str:
    """A number with three digits and a prefix.

    >>> _scaled(2_213_000_000, "B")
    '2.21 GB'
    """
    prefix, scale = next(((prefix, scale) for prefix, scale in _SCALES if number >= scale), ("", 1.0))
    return f"{number / scale:.3g} {prefix}{unit}"
