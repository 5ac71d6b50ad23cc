"""Attentions of the standard with a window, written with the mask that the window is; put back where nothing comes of that."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.bodies.fused_node import FusedNode
from onnx_attnfuse.bodies.onnx_attention import WINDOWS
from onnx_attnfuse.fusion.pattern_rewrites.undoable_rewrite import NewNodes, PatternRewriter
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.operators import onnx_attention
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.transforms.decompose.decompose import exact_body

_NAME = "window of Attention"


def write_windows(rewriter: PatternRewriter) -> None:
    """Writes every Attention with a window; a refusal is reported at its site."""
    for node in list(rewriter.graph.scope.graph):
        if not is_standard(node, onnx_attention.INFO.name) or all(attribute(node, name, -1) < 0 for name in WINDOWS):
            continue
        if not rewriter.attempt(node, _NAME, lambda node=node: _decomposed(node, rewriter)):
            rewriter.refused[label(node)] = rewriter.spoken.pop(label(node))


def _decomposed(node: ir.Node, rewriter: PatternRewriter) -> NewNodes:
    """The attention in operators of the standard.

    Raises:
        Refused: It has a cache, or cannot be decomposed exactly.
    """
    if any(node.inputs[4:]) or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        raise Refused("cache-inside", "it appends to a cache, takes lengths or has more outputs than its result", node.name)
    graph = rewriter.graph.scope.graph
    before = set(graph)
    answer = exact_body(FusedNode(node, rewriter.graph.builder, tuple(node.inputs)))
    new, *others = answer.values
    assert new is not None
    sweep([value for value in others if value is not None and value.producer() not in before])
    softmaxes = [made for made in graph if made not in before and is_standard(made, "Softmax")]
    return NewNodes(new, tuple(softmaxes), answer.frontier)
