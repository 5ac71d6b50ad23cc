"""The operators that stay float32: those that sum, mask and make tables.

Walked forwards, then backwards. An operator is float32 if it is one of those, or if all it reads is float32; scores, masks and
squares are float32 if all that reads them is. So a softmax takes the scores from the product on in float32, the mask as
it was, and gives its weights to a product in the half type; a norm divides by its statistics in float32; tables of
cosines are computed in float32 from integers and rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import cast

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.errors import ModelError
from onnx_attnfuse.graph.constants import MAX_READ_ELEMENTS, Array, constant_tensor, is_standard, read_tensor, subgraphs
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import (
    ASKS_SHAPE,
    CASTS,
    COMPARES,
    CONTRIB,
    CONTROL_FLOW,
    GATHERS,
    REARRANGES,
    REDUCTIONS,
    REPEATS,
    SLICES,
    plain_domain,
)
from onnx_attnfuse.graph.tensors import Computed
from onnx_attnfuse.graph.thresholds import MASKS

MAX_SCALAR_LIKE_ELEMENTS = 16
"""Constants of at most this many elements are parameters, such as the epsilon of a norm, whose 0 would be divided by."""


def rounded(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str) -> ir.TensorProtocol:
    """A tensor in another type; of weights nothing is read before they are written."""
    if tensor.size <= MAX_SCALAR_LIKE_ELEMENTS:
        return ir.tensor(_round(tensor, dtype), dtype=dtype, name=name)
    shape = ir.Shape(tensor.shape.numpy())
    return Computed(lambda: _round(tensor, dtype), (tensor,), dtype, shape, name)


def is_beyond(tensor: ir.TensorProtocol, dtype: ir.DataType) -> bool:
    """Whether a small constant holds a finite number that the type cannot say."""
    if tensor.size > MAX_READ_ELEMENTS or tensor.dtype != ir.DataType.FLOAT:
        return False
    array = read_tensor(tensor)
    return array is not None and bool((np.isfinite(array) & (np.abs(array) > largest(dtype))).any())


def _round(tensor: ir.TensorProtocol, dtype: ir.DataType) -> Array:
    array = read_tensor(tensor)
    if array is None:
        raise ModelError(f"the data of the weight {tensor.name!r} is gone; put the file back and try again")
    most = largest(dtype)
    found = np.where(np.isfinite(array), np.clip(array, -most, most), array).astype(dtype.numpy())
    if array.size > MAX_SCALAR_LIKE_ELEMENTS:
        return found
    least = cast("float", ml_dtypes.finfo(dtype.numpy()).smallest_subnormal)
    return np.where((found == 0) & (array != 0), np.copysign(least, array), found).astype(dtype.numpy())


_FLOAT = ir.DataType.FLOAT
_STATISTICS = REDUCTIONS - {"ReduceMax", "ReduceMin"}
_SUMS = _STATISTICS | frozenset("CumSum Exp Log LogSoftmax LpNormalization Resize Softmax Upsample".split())
_TABLES = frozenset("Bernoulli Cos DequantizeLinear EyeLike Multinomial QuantizeLinear Range Sin".split())
_ALWAYS = _SUMS | _TABLES | frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split())
_VIEWS = REARRANGES | REPEATS | SLICES | {"Concat", "Pad", "ScatterElements", "ScatterND"}
"""Cheap operators that compute nothing, and so are in the type of what they read."""
_FOLLOWING = (_VIEWS | CASTS | COMPARES).union(
    "Abs Add And Ceil Clip ConstantOfShape Div Floor IsInf IsNaN Max Mean Min Mod Mul Neg Pow Reciprocal ReduceMax".split(),
    "ReduceMin Round Sign Sqrt Sub Sum Tanh Trilu Where".split(),
)
"""Cheap operators: they are computed in the type of what they read, or of what reads them."""
_PRODUCTS = GATHERS | {"Einsum", "MatMul"}
"""Operators that stay float32 only if they read neither activations nor weights."""
_WEIGHTS = 1 << 12
"""Constants of more elements are the weights of a layer."""
_STAYS = {"GroupNorm": (1, 2), "SkipGroupNorm": (1, 2)}
"""Inputs of com.microsoft operators that are float32 whatever the others are."""


@dataclasses.dataclass(frozen=True)
class Islands:
    """Operators and values that stay float32."""

    nodes: frozenset[ir.Node]
    values: frozenset[ir.Value]
    """Results of these nodes, and inputs of the model that only they read."""
    beyond: frozenset[ir.Value]
    """Values among these that may hold finite numbers beyond the half type, such as masks of the lowest float32."""
    biases: frozenset[tuple[ir.Node, int]]
    """Inputs of float32 operators that are rounded to the half type all the same: weights, and summands of scores."""


def ordered(graph: ir.Graph) -> Iterator[ir.Node]:
    """All nodes, those of nested graphs before the one they are nested in."""
    for node in graph:
        for inner in subgraphs(node):
            yield from ordered(inner)
        yield node


def is_fixed(node: ir.Node, place: int, opset: int) -> bool:
    """Whether an input is float32 whatever the others are."""
    if node.domain == CONTRIB:
        return place in _STAYS.get(node.op_type, ())
    return place in _fixed(node.op_type, node.domain, opset)


class IslandFinder:
    """Decides for every operator of a graph, those of nested graphs included.

    Args:
        facts: Types of its values.
        opset: The opset of the standard.
        dtype: The half type.
        masks: Inputs of the model that are added to scores.
    """

    def __init__(self, facts: Facts, opset: int, dtype: ir.DataType, masks: frozenset[ir.Value]) -> None:
        self._facts = facts
        self._opset = opset
        self._dtype = dtype
        self._bounds = Bounds(facts)
        self._wide = set(masks)
        self._beyond = set(masks)
        self._numbers: set[ir.Value] = set()
        """Values that may hold finite mask numbers, by their intervals or those of their inputs."""
        self._mixed: set[ir.Value] = set()
        """Sums of finite mask numbers and biases, and values computed from these."""
        self._statistics: set[ir.Value] = set()
        self._pure = set(masks)
        """Values computed from no activation."""
        self._nodes: set[ir.Node] = set()

    def go(self, graph: ir.Graph) -> Islands:
        """The operators and values that stay float32."""
        nodes = list(ordered(graph))
        for node in nodes:
            if self._is_wide(node):
                self._widen(node)
        for node in reversed(nodes):
            if node not in self._nodes and is_standard(node, *_FOLLOWING) and self._is_read_widely(node):
                self._widen(node)
        for node in nodes:
            if node in self._nodes and is_standard(node, *_VIEWS) and not self._reads_wide(node):
                self._nodes.discard(node)
                self._wide.difference_update(node.outputs)
        for node in nodes:
            self._spread(node)
            self._mix(node)
        biases = frozenset(found for node in nodes for found in self._biases(node))
        return Islands(frozenset(self._nodes), frozenset(self._wide), frozenset(self._beyond), biases)

    def _reads_wide(self, node: ir.Node) -> bool:
        read = self._read(node)
        return not read or not self._wide.isdisjoint(read)

    def _biases(self, node: ir.Node) -> Iterator[tuple[ir.Node, int]]:
        """The inputs of a float32 operator on activations that are weights, or added to them and computed from none."""
        if node not in self._nodes or not self._pure.isdisjoint(node.outputs):
            return
        for place, value in enumerate(node.inputs):
            if value is None or self._facts.dtype(value) != _FLOAT or is_fixed(node, place, self._opset):
                continue
            tensor = constant_tensor(value)
            learned = tensor is not None and tensor.size > MAX_SCALAR_LIKE_ELEMENTS and not is_beyond(tensor, self._dtype)
            if learned or (value in self._pure - self._beyond and is_standard(node, "Add", "Sub") and self._fits(value)):
                yield node, place

    def _fits(self, value: ir.Value) -> bool:
        """Whether the half type keeps a mask: none is mixed, and no finite number beyond it, as the sum of two fills may be."""
        return value not in self._mixed and not -math.inf < self._bounds.of(value)[0] < -largest(self._dtype)

    def _mix(self, node: ir.Node) -> None:
        """Notes sums of a finite mask number and a bias: in rows of such sums alone a half type keeps little of the bias."""
        if self._pure.isdisjoint(node.outputs):
            return
        inputs = [value for value in node.inputs if value is not None]
        bounds = [self._bounds.of(value) for value in inputs]
        if is_standard(node, "Sub"):
            bounds[1:] = [(-high, -low) for low, high in bounds[1:]]
        masks = not self._numbers.isdisjoint(inputs) or any(-math.inf < low <= MASKS for low, _ in bounds)
        if masks:
            self._numbers.update(node.outputs)
        if is_standard(node, "Add", "Sub", "Sum"):
            biased = any((low > MASKS and (low, high) != (0, 0)) or high != 0 for low, high in bounds)
            if masks and biased:
                self._mixed.update(node.outputs)
        if not self._mixed.isdisjoint(inputs):
            self._mixed.update(node.outputs)

    def _widen(self, node: ir.Node) -> None:
        self._nodes.add(node)
        self._wide.update(node.outputs)

    def _read(self, node: ir.Node) -> list[ir.Value]:
        """The float32 inputs that are no constants and may be of another type."""
        inputs = [
            value for place, value in enumerate(node.inputs) if value is not None and not is_fixed(node, place, self._opset)
        ]
        return [value for value in inputs if self._facts.dtype(value) == _FLOAT and constant_tensor(value) is None]

    def _is_wide(self, node: ir.Node) -> bool:
        if node.op_type in ASKS_SHAPE or node.domain == CONTRIB or node.op_type in CONTROL_FLOW:
            return False
        if not is_standard(node) or not allows(node.op_type, self._opset, self._dtype):
            return True
        read = self._read(node)
        if self._pure.issuperset(read) and not _has_weights(node):
            self._pure.update(node.outputs)
        if node.op_type in _STATISTICS or (read and self._statistics.issuperset(read)):
            self._statistics.update(node.outputs)
        if node.op_type in _ALWAYS:
            return True
        if node.op_type in _FOLLOWING:
            return self._wide.issuperset(read) or not self._statistics.isdisjoint(read)
        return node.op_type in _PRODUCTS and bool(read) and self._pure.issuperset(read) and not _has_weights(node)

    def _is_read_widely(self, node: ir.Node) -> bool:
        values = [value for value in node.outputs if self._facts.dtype(value) == _FLOAT]
        if not values or any(value.is_graph_output() for value in values):
            return False
        users = [user for value in values for user, _ in value.uses() if user.op_type not in ASKS_SHAPE]
        return bool(users) and self._nodes.issuperset(users)

    def _spread(self, node: ir.Node) -> None:
        """Notes whether what a float32 operator gives may be beyond the half type."""
        if node not in self._nodes or node.op_type not in _FOLLOWING | _PRODUCTS:
            return
        inputs = [value for value in node.inputs if value is not None]
        constants = [tensor for value in inputs if (tensor := constant_tensor(value)) is not None]
        if not self._beyond.isdisjoint(inputs) or any(is_beyond(tensor, self._dtype) for tensor in constants):
            self._beyond.update(node.outputs)


def _has_weights(node: ir.Node) -> bool:
    """Whether a constant of an operator is learned: a large one, or a table that rows are picked from."""
    least = 0 if node.op_type in GATHERS else _WEIGHTS
    tensors = (constant_tensor(value) for value in node.inputs)
    return any(tensor is not None and tensor.size > least and tensor.dtype == _FLOAT for tensor in tensors)


@functools.cache
def allows(op: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether an operator of the standard takes a type wherever it takes float32."""
    schema = _schema(op, "", opset)
    if schema is None:
        return False
    wanted = f"tensor({dtype.name.lower()})"
    data = {item.type_str for item in (*schema.inputs, *schema.outputs[:1])}
    constraints = (item.allowed_type_strs for item in schema.type_constraints if item.type_param_str in data)
    return all(wanted in allowed for allowed in constraints if "tensor(float)" in allowed)


@functools.cache
def _fixed(op: str, domain: str, opset: int) -> frozenset[int]:
    schema = _schema(op, domain, opset)
    if schema is None:
        return frozenset()
    return frozenset(place for place, item in enumerate(schema.inputs) if item.type_str == "tensor(float)")


def _schema(op: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, opset, plain_domain(domain))
    except onnx.defs.SchemaError:
        return None
