"""Floors: `max(scores, low)`, `clip(scores, low, high)`.

    Q·Kᵀ ── Add(mask) ── Max(finfo.min) ── Softmax

OPT keeps two added masks from overflowing this way; GroundingDINO clips at ±50000.
Safety: a ceiling counts as absent from 10000 up, where no score of a trained model goes; a lower one is not read.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse import Facts, score_step, steps

_CEILING = 1e4


@score_step("Max")
def maximum(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`max(scores, low)`, either way round."""
    if len(node.inputs) != 2:
        return ()
    left, right = node.inputs
    for scores, bound in ((left, right), (right, left)):
        low = facts.number(bound) if bound is not None else None
        if low is not None and scores is not None:
            return (steps.Floored(scores, low),)
    return ()


@score_step("Clip")
def clip(node: ir.Node, facts: Facts) -> Sequence[steps.ScoreStep]:
    """`clip(scores, low, high)` with a ceiling that no score reaches."""
    scores, *bounds = node.inputs
    if scores is None or "min" in node.attributes or "max" in node.attributes:
        return ()
    low = facts.number(bounds[0]) if bounds and bounds[0] is not None else None
    high = facts.number(bounds[1]) if len(bounds) > 1 and bounds[1] is not None else None
    absent = high is not None and high >= _CEILING and facts.assumed.bounded_scores
    if len(bounds) > 1 and bounds[1] is not None and not absent:
        return ()
    if low is None:
        return (steps.Passed(scores),) if not bounds or bounds[0] is None else ()
    return (steps.Floored(scores, low),)
