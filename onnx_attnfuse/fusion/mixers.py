"""Sequence mixers that are no softmax attention, in one graph: what is found, and why it is left."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.mixers.candidates import MixerKind, find_mixers
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import MixerReport

_LEFT: Mapping[MixerKind, Reason] = {
    "recurrence": Reason("mixer-step", "a step of a recurrence is not fused"),
    "unrolled recurrence": Reason("mixer-unrolled", "the export unrolled its tokens, so it is for one length"),
    "recurrence in a loop": Reason("mixer-loop", "a recurrence in the body of a Scan or Loop is not fused"),
    "chunked recurrence": Reason("mixer-chunked", "a recurrence in chunks, with running sums of decays, is not fused"),
    "causal convolution": Reason("mixer-convolution", "a causal convolution with its state is not fused"),
}


def found_in(scope: Scope, main: ir.Graph) -> list[MixerReport]:
    """The report on each mixer of a graph; one in the body of a loop is reported with the loop."""
    if isinstance(scope.graph, ir.Graph) and scope.graph is not main and scope.graph.inputs:
        return []
    return [
        MixerReport(label(item.node), scope.path, item.kind, (_LEFT[item.kind],))
        for item in find_mixers(scope.graph, scope.facts)
    ]
