"""Rewrites around an attention: the operators of a model, and the model that `optimize` makes of one."""

from __future__ import annotations

import collections

import onnx

import onnx_attnfuse


def counts(model: onnx.ModelProto) -> collections.Counter[str]:
    """How many nodes there are of each operator."""
    return collections.Counter(node.op_type for node in model.graph.node)


def optimized(model: onnx.ModelProto, ep: str = "cuda") -> onnx.ModelProto:
    """The model with its one attention fused, and each rewrite verified."""
    result = onnx_attnfuse.optimize(model, ep=ep, verify="sites")
    assert (result.report.fused, result.report.differing, result.report.failures) == (1, 0, ())
    return result.model
