"""Queries and keys of GroupQueryAttention before their normalization, which the operator does itself.

    x ── MatMul(Wq) ── heads apart ── RMS normalization ── heads joined ── query

becomes `x ── MatMul(Wq) ── query`, with the weights of both normalizations as inputs of the operator. It normalizes each head
before it rotates. One number under both roots is all it takes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, attribute, constant_array, is_standard
from onnx_attnfuse.graph.edit import answer_needless
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.targets.rms_norm import read_rms_norm

_INFO = group_query_attention.INFO
_HEADS_FIRST = [0, 2, 1, 3]
EPSILON = "qk_norm_epsilon"
"""The attribute for the summand under the root."""


@dataclasses.dataclass(frozen=True)
class PlainOperands:
    """Inputs and attribute of a GroupQueryAttention that normalizes itself.

    Attributes:
        inputs: All its inputs.
        epsilon: Its attribute `qk_norm_epsilon`.
        sources: Queries and keys that are not normalized.
    """

    inputs: tuple[ir.Value | None, ...]
    epsilon: float
    sources: tuple[ir.Value, ir.Value]


def before_norms(node: ir.Node, builder: Builder) -> PlainOperands | None:
    """The operands of a GroupQueryAttention where it normalizes itself; None if they are not normalized like that."""
    given = {name: _INFO.input(node, name) for name in _INFO.inputs}
    if any(given[name] is None for name in ("key", "value")) or any(
        given[name] is not None for name in ("q_norm_weight", "k_norm_weight", "k_scale", "v_scale")
    ):
        return None
    query, key = (
        None if value is None else _read(value, attribute(node, heads, 0), builder.facts)
        for value, heads in ((given["query"], "num_heads"), (given["key"], "kv_num_heads"))
    )
    if query is None or key is None or np.float32(query.epsilon) != np.float32(key.epsilon):
        return None
    if not (math.isfinite(query.epsilon) and query.epsilon > 0):
        return None
    sources = query.source(builder), key.source(builder)
    given |= {"query": sources[0], "key": sources[1]}
    given |= {"q_norm_weight": query.factors(builder), "k_norm_weight": key.factors(builder)}
    return PlainOperands(tuple(_INFO.arranged(given)), query.epsilon, sources)


def take_in_norms(node: ir.Node, builder: Builder) -> None:
    """Hands an operator of the graph the operands before normalization, if its operands are normalized as it does it."""
    builder.at(node)
    found = before_norms(node, builder)
    if found is None:
        return
    replaced = [value for value in node.inputs[:2] if value is not None]
    node.resize_inputs(len(found.inputs))
    for place, value in enumerate(found.inputs):
        node.replace_input_with(place, value)
    node.attributes[EPSILON] = ir.AttrFloat32(EPSILON, found.epsilon)
    for value in replaced:
        answer_needless(value, builder)
        sweep([value])


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Queries or keys before their normalization, and that normalization."""

    before: ir.Value
    """(b, s, n·h), or the heads apart."""
    joined: Dims
    """(b, s, n·h)."""
    weight: ir.Value | Array
    """(h)."""
    epsilon: float

    def source(self, builder: Builder) -> ir.Value:
        """Queries or keys that are not normalized, (b, s, n·h)."""
        return self.before if builder.facts.dims(self.before) == self.joined else builder.reshape(self.before, list(self.joined))

    def factors(self, builder: Builder) -> ir.Value:
        """The weights of the normalization, (h)."""
        return self.weight if isinstance(self.weight, ir.Value) else builder.constant(self.weight)


def _read(value: ir.Value, heads: int, facts: Facts) -> _Operand | None:
    """The normalization of each head that gives a value (b, s, n·h)."""
    dims, joined = facts.dims(value), value.producer()
    normal = joined.inputs[0] if is_standard(joined, "Reshape") else None
    if dims is None or normal is None or not isinstance(dims[-1], int) or not heads or dims[-1] % heads:
        return None
    apart: Dims = (dims[0], dims[1], heads, dims[-1] // heads)
    normal, turned = _turned_from(normal, apart, facts)
    norm = None if normal is None else read_rms_norm(normal, facts)
    if norm is None:
        return None
    weight = _weight(norm.weight, dims[-1] // heads, facts.dtype(value), facts)
    before = _before_heads(norm.x, apart, dims, facts, turned=turned)
    return None if weight is None or before is None else _Operand(before, dims, weight, norm.epsilon)


def _turned_from(value: ir.Value, apart: Dims, facts: Facts) -> tuple[ir.Value | None, bool]:
    """The value with heads apart, and whether heads come before positions in it."""
    if facts.dims(value) == apart:
        node = value.producer()
        if is_standard(node, "Transpose") and attribute(node, "perm", []) == _HEADS_FIRST:
            return node.inputs[0], True
        return value, False
    return (value, True) if apart[2] == 1 and facts.dims(value) == _heads_first(apart) else (None, False)


def _heads_first(apart: Dims) -> Dims:
    return (apart[0], apart[2], apart[1], apart[3])


def _before_heads(x: ir.Value, apart: Dims, joined: Dims, facts: Facts, *, turned: bool) -> ir.Value | None:
    """Queries or keys that are normalized, heads joined if that can be seen, else after positions; None if before those."""
    node = x.producer()
    if facts.dims(x) != (_heads_first(apart) if turned else apart):
        return None
    if turned and is_standard(node, "Transpose") and attribute(node, "perm", []) == _HEADS_FIRST and node.inputs[0] is not None:
        x, node, turned = node.inputs[0], node.inputs[0].producer(), False
    if turned and apart[2] != 1:
        return None
    before = node.inputs[0] if is_standard(node, "Reshape") else None
    return before if before is not None and facts.dims(before) == joined else x


def _weight(weight: ir.Value | None, size: int, dtype: ir.DataType | None, facts: Facts) -> ir.Value | Array | None:
    """The factors of a normalization in the element type of its operand, if that holds them; ones if there are none."""
    if dtype is None:
        return None
    if weight is None:
        return np.ones(size, dtype.numpy())
    if facts.dims(weight) != (size,):
        return None
    if facts.dtype(weight) == dtype:
        return weight
    widened = weight.producer()
    if is_standard(widened, "Cast") and widened.inputs[0] is not None and facts.dtype(widened.inputs[0]) == dtype:
        return widened.inputs[0]
    array = constant_array(weight)
    if array is None:
        return None
    narrow = array.astype(dtype.numpy())
    return narrow if np.array_equal(narrow.astype(array.dtype), array) else None
