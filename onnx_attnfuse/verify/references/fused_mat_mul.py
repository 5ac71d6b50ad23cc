"""com.microsoft.FusedMatMul: a product, scaled, of operands whose matrices are turned on request.

| | shape |
|---|---|
| A, B | (..., m, k), (..., k, n); turned where `transA`, `transB` |
| Y | (..., m, n) |
"""

from __future__ import annotations

import numpy as np

from onnx_attnfuse.verify.references.core import Array, Operator, Results, in_float32


@in_float32
def fused_mat_mul(a: Array, b: Array, *, alpha: float = 1.0, transA: int = 0, transB: int = 0) -> Results:  # noqa: N803 - names in the schema
    """The product in the element type of `a`; batches that move (`transBatchA`, `transBatchB`) are refused."""
    left, right = (np.swapaxes(item, -1, -2) if turned else item for item, turned in ((a, transA), (b, transB)))
    return (np.asarray(alpha * np.matmul(left, right), a.dtype),)


class FusedMatMul(Operator):
    """The operator FusedMatMul for onnx's evaluator."""

    compute = staticmethod(fused_mat_mul)
