"""Rounding to a grid: QuantizeLinear and the DequantizeLinear after it.

    Q·Kᵀ ── QuantizeLinear ── DequantizeLinear ── Softmax        scores of a quantised model, before or after scale and mask
    Softmax ── QuantizeLinear ── DequantizeLinear ── ·V          its attention weights

Written by quantisers around each operator: onnxruntime.quantization (in QDQ format), Model Optimizer, those of mobile devices.
ONNX Runtime has operators of its own for 16 bits, which are read alike.
Safety: a fused operator rounds nothing, so an attention that is read with such a step is left as it is unless these roundings are
to be left out. Halves of different scales, zero points or axes are no rounding, and neither is one half without the other.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps, weight_step


@score_step("DequantizeLinear")
def round_scores(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """The scores, rounded."""
    pair = steps.read_pair(node, facts)
    return () if pair is None else (steps.Rounded(pair),)


@score_step("DequantizeLinear", domain="com.microsoft")
def round_scores_in_ort(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """The scores, rounded by operators of ONNX Runtime."""
    return round_scores.read(node, facts)


@weight_step("QuantizeLinear", "DynamicQuantizeLinear")
def round_weights(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """The weights, rounded."""
    readers = [user for user, index in node.outputs[0].uses() if index == 0]
    pair = steps.read_pair(readers[0], facts) if readers and node.inputs[0] is weights else None
    return None if pair is None else steps.RoundedWeights(pair)


@weight_step("QuantizeLinear", domain="com.microsoft")
def round_weights_in_ort(node: ir.Node, weights: ir.Value, facts: Facts) -> steps.WeightStep | None:
    """The weights, rounded by operators of ONNX Runtime."""
    return round_weights.read(node, weights, facts)
