"""Casts inside an attention to a type that holds less than those around it, which no fused operator makes.

A cast to a wider type changes nothing, and one of the weights to the type of the values is what a fused operator does, too. But
scores that are rounded after a mask was added may become equal, or -inf, in whole rows.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.attention.match.scores import ScorePath
from onnx_attnfuse.attention.match.weights import WeightPath
from onnx_attnfuse.graph.dtypes import narrows
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.reasons import Refused


def check_types(scores: ScorePath, weights: WeightPath, softmax: ir.Value, facts: Facts) -> None:
    """Refuses an attention that rounds its scores, or rounds its weights and goes on in a wider type.

    Args:
        scores: From the product of queries and keys to the softmax.
        weights: From the softmax to the product with the values.
        softmax: The attention weights as the softmax gives them.
        facts: Types of the graph's values.

    Raises:
        Refused: With the node that rounds, code `narrowed-scores` or `narrowed-weights`.
    """
    for taken in scores.steps:
        before, after = facts.dtype(taken.step.scores), facts.dtype(taken.node.outputs[0])
        if before is not None and after is not None and narrows(before, after):
            message = f"the scores are cast from {before.name.lower()} to {after.name.lower()}, which rounds them"
            raise Refused("narrowed-scores", message, taken.node.name)
    ends = (facts.dtype(softmax), facts.dtype(weights.value.value))
    for node in weights.nodes:
        inner = facts.dtype(node.outputs[0])
        if inner is not None and all(narrows(end, inner) for end in ends):
            message = f"the weights are cast to {inner.name.lower()}, and multiplied with values of a wider type"
            raise Refused("narrowed-weights", message, node.name)
