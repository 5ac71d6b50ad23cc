"""com.microsoft.BiasSplitGelu: `l · gelu(r)` of the halves `(l | r)` of `x + bias`, with the error function.

| | shape |
|---|---|
| X, bias | (b, s, 2·c), (2·c) |
| output | (b, s, c) |

The sum is rounded to the type of X; all else is computed in float32, and rounded once.
"""

from __future__ import annotations

import math

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results

_ERF = np.vectorize(math.erf, otypes=[np.float32])


def bias_split_gelu(X: Array, bias: Array) -> Results:  # noqa: N803 - its name in the schema
    """The gated half.

    Raises:
        ValueError: The last axis is odd, or the bias has another length.
    """
    if X.ndim != 3 or X.shape[-1] % 2 or bias.shape != X.shape[-1:]:
        raise ValueError(f"BiasSplitGelu takes no input of shape {X.shape} with a bias of shape {bias.shape}")
    with np.errstate(all="ignore"):
        left, right = np.split((X + bias).astype(np.float32), 2, axis=-1)
        half, one = np.float32(0.5), np.float32(1)
        gated = left * (right * half * (_ERF(right / np.float32(math.sqrt(2))) + one))
        return (gated.astype(X.dtype),)


class BiasSplitGelu(Operator):
    """The operator BiasSplitGelu for onnx's evaluator."""

    compute = staticmethod(bias_split_gelu)
