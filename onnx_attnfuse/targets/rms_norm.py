"""RMS normalization as sources write it: an operator of ai.onnx, or decomposed.

    weight · x / sqrt(mean(x²) + epsilon)

Decomposed, x may be widened for it, the quotient be a product with a reciprocal, and the result be rounded before or after the
product with the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import new_axes, refined
from onnx_attnfuse.attention.axes.views import IndexedValue, views_above
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import Array, attribute, both_ways, constant_array, is_standard
from onnx_attnfuse.graph.dtypes import narrows
from onnx_attnfuse.graph.edit import replace_inputs
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.uses import origin
from onnx_attnfuse.kernels.operators import group_query_attention
from onnx_attnfuse.language.expression import Tensor, mean, sqrt
from onnx_attnfuse.language.matcher.formula import Formula


@dataclasses.dataclass(frozen=True)
class RmsNorm:
    """A normalization along the last axis.

    Attributes:
        x: The normalized input, of any shape.
        weight: The factors, as many as x has channels; None if there are none.
        epsilon: The summand of the mean of the squares.
        inside: Its nodes, the last one first.
    """

    x: ir.Value
    weight: ir.Value | None
    epsilon: float
    inside: tuple[ir.Node, ...]


def read_rms_norm(value: ir.Value, facts: Facts) -> RmsNorm | None:
    """The normalization that gives a value, in its own element type; None if none does."""
    found = _operator(value, facts) or _decomposed(value, facts)
    return found if found is not None and facts.dtype(found.x) == facts.dtype(value) else None


def _operator(value: ir.Value, facts: Facts) -> RmsNorm | None:
    around: list[ir.Node] = []
    node = _before_cast(value, around).producer()
    if not is_standard(node, "RMSNormalization") or attribute(node, "stash_type", 1) != 1:
        return None
    x, weight = node.inputs
    rank = facts.rank(x)
    if x is None or weight is None or rank is None or attribute(node, "axis", -1) % rank != rank - 1:
        return None
    inside = [*around, node]
    x = _before_cast(x, inside) if around else x
    return RmsNorm(x, weight, attribute(node, "epsilon", 1e-5), tuple(inside)) if _keeps(inside, x, facts) else None


@Formula
def _over_root(x: Tensor, epsilon: Tensor) -> Tensor:
    return x / sqrt(mean(x * x) + epsilon)


def _decomposed(value: ir.Value, facts: Facts) -> RmsNorm | None:
    around: list[ir.Node] = []
    value = _before_cast(value, around)
    outer = value.producer()
    for one, weight in both_ways(outer, "Mul"):
        if outer is not None and facts.rank(weight) == 1:
            inside = [*around, outer]
            found = _quotient(_before_cast(one, inside), weight, inside, facts)
            if found is not None:
                return found
    return _quotient(value, None, around, facts)


def _quotient(value: ir.Value, weight: ir.Value | None, around: Sequence[ir.Node], facts: Facts) -> RmsNorm | None:
    """A value over the root of the mean of its squares, with the nodes around it."""
    found = _over_root.at(value, facts)
    if found is None or "epsilon" not in found.numbers:
        return None
    inside = [*around, *found.nodes]
    x = _before_cast(found.values["x"], inside)
    return RmsNorm(x, weight, found.numbers["epsilon"], tuple(inside)) if _keeps(inside, x, facts) else None


def _before_cast(value: ir.Value, inside: list[ir.Node]) -> ir.Value:
    """The value before it is cast, if it is."""
    node = value.producer()
    if is_standard(node, "Cast") and node.inputs[0] is not None:
        inside.append(node)
        return node.inputs[0]
    return value


def _keeps(inside: list[ir.Node], x: ir.Value, facts: Facts) -> bool:
    """Whether nothing is rounded to fewer bits on the way than x has."""
    return facts.dtype(x) is not None and not any(narrows(facts.dtype(x), facts.dtype(node.outputs[0])) for node in inside)


_INFO = group_query_attention.INFO
_RANK = 3
"""The axes of queries and keys: batch, positions, heads · channels."""
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
    """The operands of a GroupQueryAttention where it normalizes itself; None if they are not normalized like that.

        x ── MatMul(Wq) ── heads apart ── RMS normalization ── heads joined ── query

    becomes `x ── MatMul(Wq) ── query`, with the weights of both normalizations as inputs of the operator. It normalizes each head
    before it rotates. One number under both roots is all it takes.
    """
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
    if found is not None:
        replace_inputs(node, found.inputs, [value for value in node.inputs[:2] if value is not None], builder)
        node.attributes[EPSILON] = ir.AttrFloat32(EPSILON, found.epsilon)


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
    dims = facts.dims(value)
    if dims is None or len(dims) != _RANK or not isinstance(dims[-1], int) or not heads or dims[-1] % heads:
        return None
    batch, rows, by_head, channels = new_axes((dims[0], dims[1], heads, dims[-1] // heads))
    indexed = IndexedValue(value, (batch, rows, (*by_head, *channels)))
    found = next(((item, norm) for item in views_above(indexed, facts) if (norm := read_rms_norm(item.value, facts))), None)
    if found is None:
        return None
    (indexed, norm), layouts = found, ((batch, rows, (*by_head, *channels)), (batch, rows, by_head, channels))
    above = [item for item in views_above(IndexedValue(norm.x, indexed.axes), facts) if refined(item.axes) in layouts]
    weight = _weight(norm.weight, dims[-1] // heads, facts.dtype(value), facts)
    if not above or weight is None or refined(indexed.axes)[-1] != channels:
        return None
    return _Operand(above[-1].value, dims, weight, norm.epsilon)


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
    given = origin(weight, "Cast")
    if given is not None and facts.dtype(given) == dtype:
        return given
    array = constant_array(weight)
    if array is None:
        return None
    narrow = array.astype(dtype.numpy())
    return narrow if np.array_equal(narrow.astype(array.dtype), array) else None
