"""com.microsoft.BranchwiseRMSNorm: each branch divided by the root of the mean of its squares, times factors.

| | shape |
|---|---|
| X | (…, c, h), or with `num_branches` = c (…, c·h) |
| scale | (h), (c, h) or (c·h) |
| output | as X, of its type |

All is computed in float32 and rounded once, whatever the types of X and the factors are.
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results

_WIDE = np.float32


def branchwise_rms_norm(X: Array, scale: Array | None = None, *, num_branches: int = 0, epsilon: float = 1e-5) -> Results:  # noqa: N803 - its name in the schema
    """The normalized branches.

    Raises:
        ValueError: The last axis is no multiple of `num_branches`, or the factors have another shape.
    """
    if num_branches and X.shape[-1] % num_branches:
        raise ValueError(f"BranchwiseRMSNorm takes no {num_branches} branches of an axis of {X.shape[-1]}")
    grouped = X.reshape(*X.shape[:-1], num_branches, X.shape[-1] // num_branches) if num_branches else X
    size, branches = grouped.shape[-1], grouped.shape[-2]
    if scale is not None and scale.shape not in {(size,), (branches, size), (branches * size,)}:
        raise ValueError(f"BranchwiseRMSNorm takes no factors of shape {scale.shape} for {branches} branches of {size}")
    with np.errstate(all="ignore"):
        wide = grouped.astype(_WIDE)
        power: Array = (wide * wide).mean(axis=-1, keepdims=True) + _WIDE(epsilon)
        level = wide / np.sqrt(power)
        if scale is not None:
            level = level * (scale if scale.shape == (size,) else scale.reshape(branches, size)).astype(_WIDE)
        return (level.reshape(X.shape).astype(X.dtype),)


class BranchwiseRMSNorm(Operator):
    """The operator BranchwiseRMSNorm for onnx's evaluator."""

    compute = staticmethod(branchwise_rms_norm)
