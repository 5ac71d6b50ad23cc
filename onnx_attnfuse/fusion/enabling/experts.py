"""Experts whose matrices are gathered for each token, as MoE of com.microsoft.

    logits ── Softmax ── TopK ── chosen experts ── Gather(W1), Gather(W2)
    tokens, one for each of their experts ── W1 ── gate ── W2 ── · weight of the expert ── sum over a token's experts

So torch exports what it computes by sorting tokens: both matrices are copied for every token and each of its experts. MoE sorts
tokens too, and reads a matrix once. It chooses by the largest numbers of a row that it is given. These are the logits of the
experts that the source chose, and the lowest number for all others, so that ties and roundings choose as they do in the source.

Where weights are not those of a softmax, or experts are chosen in another way, each copy of a token is a token of its own with
one expert, and the weighted sum stays as it is.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.expert_layers import ExpertLayer, plain, read_layer
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder, dims_of, dtype_of
from onnx_attnfuse.graph.constants import attribute, both_ways, is_standard
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import axes_of
from onnx_attnfuse.graph.uses import origin

_TABLE, _CUBE = 2, 3
"""The axes of a table (tokens, channels), and of one (tokens, k, channels)."""
_SINCE = 11
"""The opset that ScatterElements is there from."""


@enabling("layers of experts fused to MoE", "ReduceSum", "experts")
def as_experts(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """MoE in place of the nodes up to the sum over the experts of each token, where a softmax made their weights."""
    found = _read(node, builder.facts) if builder.opset >= _SINCE else None
    if found is None:
        return None
    facts, routing, result = builder.facts, found.routing, node.outputs[0]
    dtype, wanted = dtype_of(builder, found.tokens), facts.dtype(result)
    best = builder.node("GatherElements", [routing.logits, routing.indices], {"axis": 1})
    router = _chosen(best, routing.indices, dims_of(builder, routing.logits), builder)
    mixed = _mixed(found.tokens, router, found.layer, found.count, builder, f"{node.name}/MoE")
    if not routing.sums_to_one:
        mixed = builder.elementwise("Mul", [mixed, builder.cast(builder.reduce("ReduceSum", routing.weights, [1]), dtype)])
    mixed = mixed if wanted is None or wanted == dtype else builder.cast(mixed, wanted)
    return EnablingChange(((result, mixed),), (found.tokens, routing.logits))


@enabling("layers of experts fused to MoE, one expert a token", "MatMul", "single-experts")
def as_single_experts(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """MoE of one expert for each copy of a token, in place of its second product; the weighted sum stays."""
    facts, result = builder.facts, node.outputs[0]
    layer = read_layer(result, facts) if builder.opset >= _SINCE else None
    dims, wanted = None if layer is None else facts.dims(layer.operand), facts.dims(result)
    if layer is None or dims is None or wanted is None or not layer.fits(facts.dtype(result), facts):
        return None
    dtype, (experts, _, channels) = facts.dtype(result), layer.first.sizes
    rows = builder.reshape(layer.operand, [dims[0], channels])
    indices = builder.reshape(layer.chosen, [dims[0], 1])
    zeros = builder.expand(builder.scalar(0.0, dtype), [dims[0], 1])
    mixed = _mixed(rows, _chosen(zeros, indices, (dims[0], experts), builder), layer, 1, builder, f"{node.name}/MoE")
    return EnablingChange(((result, builder.reshape(mixed, wanted)),), (layer.operand, layer.chosen))


def _mixed(tokens: ir.Value, router: ir.Value, layer: ExpertLayer, count: int, builder: Builder, hint: str) -> ir.Value:
    """The sum of `count` experts of each token, by weights that are a softmax of `router`."""
    gate, (first, first_bias) = layer.gate, layer.interleaved(builder)
    settings = {"k": count, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 0}
    settings |= {"activation_alpha": gate.alpha, "activation_beta": gate.beta}
    settings |= {} if gate.limit is None else {"swiglu_limit": gate.limit}
    inputs = [tokens, router, first, first_bias, layer.second.oriented(builder), layer.second.bias]
    inputs = inputs if inputs[-1] is not None else inputs[:-1]
    mixed = builder.node("MoE", inputs, settings, domain=CONTRIB, hint=hint)
    # The CPU's kernel may write its result over the tokens before it has read them, unless something reads these afterwards.
    return builder.elementwise("Where", [builder.constant(np.array([True])), mixed, tokens])


@dataclasses.dataclass(frozen=True)
class _Routing:
    """How experts are chosen."""

    logits: ir.Value
    """(tokens, experts)."""
    indices: ir.Value
    """(tokens, k)."""
    weights: ir.Value
    """(tokens, k)."""
    sums_to_one: bool
    """Whether weights do; else they are those of a softmax over all experts."""


@dataclasses.dataclass(frozen=True)
class _Experts:
    """Tokens, and the experts that each has."""

    routing: _Routing
    tokens: ir.Value
    """(tokens, channels)."""
    layer: ExpertLayer
    count: int
    """How many experts a token has."""


def _read(node: ir.Node, facts: Facts) -> _Experts | None:
    if node.inputs[0] is None or attribute(node, "keepdims", 1) != 0:
        return None
    dims = facts.dims(node.inputs[0])
    if dims is None or len(dims) != _CUBE or axes_of(node, 1, _CUBE, facts) != [1] or not isinstance(dims[1], int):
        return None
    count, weighted = dims[1], plain(node.inputs[0], facts).producer()
    least = None if weighted is None else facts.dtype(weighted.outputs[0])
    for one, other in both_ways(weighted, "Mul"):
        if (facts.dims(other) or ())[-1:] != (1,) or (facts.dims(one) or ())[:-1] != (facts.dims(other) or ())[:-1]:
            continue
        layer = read_layer(one, facts)
        tokens = None if layer is None else _repeated(layer.operand, count, facts)
        if layer is None or tokens is None or not layer.fits(least, facts):
            continue
        routing = _routing(plain(other, facts, least), layer.chosen, facts)
        if routing is not None and _fit(routing, tokens, layer, dims, facts):
            return _Experts(routing, tokens, layer, count)
    return None


def _fit(routing: _Routing, tokens: ir.Value, layer: ExpertLayer, weighed: Dims, facts: Facts) -> bool:
    """Whether tokens, logits and weights are those of one table, and `weighed` is (tokens, k, channels)."""
    rows, count, _ = weighed
    experts, _, channels = layer.first.sizes
    if any(facts.dtype(value) != facts.dtype(layer.first.value) for value in (tokens, routing.logits)):
        return False
    if facts.dims(tokens) != (rows, channels) or weighed[-1] != channels or facts.dims(routing.logits) != (rows, experts):
        return False
    return facts.dims(routing.indices) == (rows, count) == facts.dims(routing.weights)


def _repeated(value: ir.Value, count: int, facts: Facts) -> ir.Value | None:
    """The tokens of which a value has `count` copies each, in sequence."""
    whole = plain(value, facts)
    part = origin(whole, "Expand", "Tile")
    alone, dims = facts.dims(part), facts.dims(whole)
    if alone is None or len(alone) != _CUBE or alone[1] != 1 or dims != (alone[0], count, alone[2]):
        return None
    tokens = origin(part, "Unsqueeze", "Reshape")
    return tokens if tokens is not None and facts.dims(tokens) == (alone[0], alone[2]) else None


def _routing(weights: ir.Value, chosen: ir.Value, facts: Facts) -> _Routing | None:
    """Where weights are those of a softmax: over all experts, over those that are chosen, or brought to a sum of 1."""
    top = chosen.producer()
    if not is_standard(top, "TopK") or chosen is not top.outputs[1] or top.inputs[0] is None:
        return None
    rank = facts.rank(top.inputs[0])
    if rank != _TABLE or attribute(top, "largest", 1) != 1 or attribute(top, "axis", -1) % rank != rank - 1:
        return None
    best, source, node = top.outputs[0], plain(top.inputs[0], facts), weights.producer()
    if is_standard(node, "Softmax") and node.inputs[0] is not None and _is_along_rows(node, facts):
        is_best = plain(node.inputs[0], facts) is best
        return _Routing(source, chosen, weights, sums_to_one=True) if is_best else None
    softmax = source.producer()
    if not is_standard(softmax, "Softmax") or softmax.inputs[0] is None or not _is_along_rows(softmax, facts):
        return None
    logits = plain(softmax.inputs[0], facts)
    if weights is best:
        return _Routing(logits, chosen, weights, sums_to_one=False)
    if not is_standard(node, "Div") or node.inputs[0] is None or node.inputs[1] is None:
        return None
    total = node.inputs[1].producer()
    is_sum = is_standard(total, "ReduceSum") and axes_of(total, 1, _TABLE, facts) == [1] and attribute(total, "keepdims", 1) == 1
    if not is_sum or total is None or total.inputs[0] is None or plain(node.inputs[0], facts) is not best:
        return None
    return _Routing(logits, chosen, weights, sums_to_one=True) if plain(total.inputs[0], facts) is best else None


def _is_along_rows(node: ir.Node, facts: Facts) -> bool:
    value = node.outputs[0]
    return facts.rank(value) == _TABLE and attribute(node, "axis", -1) % _TABLE == _TABLE - 1


def _chosen(best: ir.Value, indices: ir.Value, dims: Dims, builder: Builder) -> ir.Value:
    """The numbers that MoE chooses by: `best` for the experts of these indices, and the lowest for all others."""
    dtype = dtype_of(builder, best)
    others = builder.expand(builder.scalar(-largest(dtype), dtype), dims)
    return builder.node("ScatterElements", [others, indices, best], {"axis": 1})
