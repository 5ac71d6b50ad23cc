"""Operators of com.microsoft for onnx's evaluator that the library gives no body."""

from __future__ import annotations

from typing import Any

from onnx.reference.op_run import OpRun


class FusedMatMul(OpRun):
    """A product, scaled, of operands whose matrices are turned on request."""

    op_domain = "com.microsoft"

    def _run(self, left: Any, right: Any, alpha: float = 1.0, transA: int = 0, transB: int = 0, **batch: int) -> tuple[Any]:  # noqa: N803
        assert not any(batch.values())
        left, right = left.swapaxes(-1, -2) if transA else left, right.swapaxes(-1, -2) if transB else right
        return ((alpha * (left @ right)).astype(left.dtype),)
