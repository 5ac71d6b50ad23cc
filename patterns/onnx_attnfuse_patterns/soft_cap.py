"""Soft capping: `cap * tanh(scores / cap)`.

    Q·Kᵀ ── Div(cap) ── Tanh ── Mul(cap) ── Add(mask) ── Softmax

Gemma-2 writes it. The factors around tanh are read as scalings, this is the tanh.
Safety: only before any mask; tanh of a masked score is a finite number.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps


@score_step("Tanh")
def tanh(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`tanh(scores)`."""
    return (steps.Squashed(node.inputs[0]),) if node.inputs[0] is not None else ()
