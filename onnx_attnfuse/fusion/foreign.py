"""Fused operators that were made for another execution provider: decomposed, so that they are planned for this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.plan import PlanContext, why_wrong
from onnx_attnfuse.graph.dtypes import type_name
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib, is_standard
from onnx_attnfuse.kernels.conditions import AttentionParams
from onnx_attnfuse.kernels.execution_provider import ExecutionProvider, OpSupport
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.operators import OpInfo, info_of
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.transforms.decompose.decompose import decompose_node, is_fused
from onnx_attnfuse.transforms.rewriting import GraphContext

_SUM = 3
"""The place of the sum among the results of a normalization with one in front."""
_PACKED_RANK, _BY_HEAD_RANK = 5, 4


def decompose_foreign(graph: GraphContext, plan_context: PlanContext) -> Counter[str]:
    """Decomposes operators that the execution provider is not known to run, each verified; returns their numbers."""
    if plan_context.device.provider.keeps_fused:
        return Counter()
    fused = [node for node in graph.scope.graph if is_fused(node)]
    found = [node for node in fused if why_foreign(node, graph.scope.facts, plan_context) is not None]
    found += [node for node in graph.scope.graph if _is_foreign_norm(node, plan_context.device.provider)]
    return decompose_nodes(graph, found)


def decompose_nodes(graph: GraphContext, nodes: Sequence[ir.Node]) -> Counter[str]:
    """Decomposes fused operators, each verified; returns how many were, by their names."""
    sites = [decompose_node(graph, node) for node in nodes]
    return Counter(f"{site.domain or 'ai.onnx'}.{site.op}" for site in sites if site.status == "unfused")


def _is_foreign_norm(node: ir.Node, provider: ExecutionProvider) -> bool:
    """Whether a node is a normalization that the execution provider is known not to run."""
    if provider.decomposed_norms and is_standard(node, *provider.decomposed_norms):
        return True
    if not is_contrib(node, "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        return False
    gives_sum = any(value.uses() or value.is_graph_output() for value in node.outputs[_SUM:])
    return provider.skip_norms == "none" or (provider.skip_norms is not None and gives_sum)


def why_foreign(node: ir.Node, facts: Facts, plan_context: PlanContext) -> Reason | None:
    """Why a fused operator of a model is not known to run right on the execution provider, or None."""
    provider = plan_context.device.provider
    if provider.keeps_fused or not is_fused(node):
        return None
    info = info_of(node)
    if info is None or info.kind == "padding":
        return Reason("no-kernel-for-device", f"it is not known whether {provider.name} runs {node.op_type}", node.name)
    if info.kind == "rotation":
        known = provider.rotates and bool(info.domain)
        return None if known else Reason("no-kernel-for-device", f"{info.key} is not known to run on {provider.name}", node.name)
    found = support(info.key, provider)
    if isinstance(found, Reason):
        return Reason(found.code, found.message, node.name)
    if not found.by_default and provider.unfused_form is not None and plan_context.target != info.key:
        return Reason("fastest", f"{provider.name} is as fast with unfused attention", node.name)
    params = params_of_node(node, facts)
    if isinstance(params, Reason):  # the operator is one that runs there, and too little is known to say that this node does not
        return None
    return _refused(params, found, node, info, facts, provider) or why_wrong(params, plan_context)


def _refused(
    params: AttentionParams, found: OpSupport, node: ir.Node, info: OpInfo, facts: Facts, provider: ExecutionProvider
) -> Reason | None:
    """Why kernels of the operator do not take one of its nodes."""
    if params.dtype not in found.runs:
        message = f"{info.key} has no kernel on {provider.name} for {type_name(params.dtype)}"
        return Reason("no-kernel-for-type", message, node.name)
    if (
        params.mask not in found.masks
        or (params.causal and not found.causal)
        or not _takes_layout(params, found, node, info, facts)
    ):
        return Reason("mask-form", f"{info.key} has a form of mask or keys that {provider.name} does not take", node.name)
    return None


def _takes_layout(params: AttentionParams, found: OpSupport, node: ir.Node, info: OpInfo, facts: Facts) -> bool:
    """Whether operands and bias lie as the kernels want them, and are rotated if need be."""
    if info.first(node, "cos") is not None and not found.rotates_inside:
        return False
    ranks = [facts.rank(value) for role in ("query", "key") if (value := info.first(node, role)) is not None]
    if _PACKED_RANK in ranks and not found.packed_inputs:
        return False
    if _BY_HEAD_RANK in ranks and info.domain and not found.keys_by_head:
        return False
    bias = info.first(node, "bias")
    dims = facts.dims(bias)
    return dims is None or found.broadcasts_bias or dims[:2] == (params.batch, params.heads)
