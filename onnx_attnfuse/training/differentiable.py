"""Attentions that calls of PyTorch compute and differentiate, in whichever part of a module."""

from __future__ import annotations

from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.reasons import Refused


def check_differentiable(spec: AttentionSpec) -> None:
    """Refuses attention that no call with a gradient computes.

    A factor that is not positive is among it: where a triangle is asked for, kernels multiply scores masked with -inf.

    Raises:
        Refused: A factor that is not positive, weights that are multiplied, or several types.
    """
    if not spec.scale > 0:
        raise Refused("scale-not-positive", f"the scores are scaled by {spec.scale:g}, with which kernels of PyTorch give NaN")
    if spec.renormalized is not None:
        raise Refused("scaled-weights", "the weights are masked after the softmax and divided by their sum, which may vanish")
    if spec.unshifted:
        raise Refused(
            "unshifted-exponentials", "no row maximum is subtracted before exponentials, which overflow where kernels do not"
        )
    if spec.result_scales:
        raise Refused("scaled-weights", "the weights are multiplied after the softmax, which no kernel differentiates")
    if spec.dtype is None or spec.output_dtype != spec.dtype:
        raise Refused("mixed-types", "operands and result are of different or unknown types")
