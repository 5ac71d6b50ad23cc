"""Attentions of a decoder that are operators with a past already, spelled out: what they are made of may share a buffer."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.ops import is_attention
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.kernels.operators import group_query_attention, info_of
from onnx_attnfuse.rewriting import GraphContext
from onnx_attnfuse.transforms.decompose.decompose import spell_out
from onnx_attnfuse.verify.verifier import Verifier


def spell_out_cached(model: ir.Model, verifier: Verifier) -> Counter[str]:
    """Spells out the operators of the main graph that append to a past, in place; how many of each.

    GroupQueryAttention stays: its past may be a buffer already.
    """
    scope, done = next(iter(scopes(model))), Counter[str]()
    found = [node for node in scope.graph if is_attention(node) and node.op_type != group_query_attention.INFO.name]
    cached = [node for node in found if (info := info_of(node)) is not None and info.first(node, "past") is not None]
    if cached:
        graph = GraphContext(scope, model, Builder(scope.graph, scope.facts, scope.opset, all_names(model)), verifier)
        for node in cached:
            name = f"{node.domain or 'ai.onnx'}.{node.op_type}"
            done[name] += spell_out(graph, node).status == "unfused"
    return +done
