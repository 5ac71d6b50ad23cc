"""Each fused operator in NumPy, as its documentation says and ONNX Runtime computes it; plain rather than fast.

    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS))

They stand in for the kernel where there is none, as for packed attention on the CPU, and say what a kernel should have computed.
Half precision is computed in float32 and rounded once. Where an operator leaves something open its file says what is done here.
"""

from __future__ import annotations

from typing import cast

from onnx_attnfuse.kernels.operators import load, records
from onnx_attnfuse.verify.references.core import Operator

OPERATORS: tuple[type[Operator], ...] = tuple(
    cast("type[Operator]", load(info.reference)) for info in records().values() if info.reference is not None
)
"""The references that the records of operators name."""
