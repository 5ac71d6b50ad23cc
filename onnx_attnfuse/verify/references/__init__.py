"""Each fused operator as its documentation says and ONNX Runtime computes it: by its body, or in NumPy.

    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS))

They replace the kernel where there is none, as for packed attention on the CPU, and give the result that a kernel should
have computed. Half precision is computed in float32 and rounded once. Where an operator leaves something open its file
describes the choice made here.
"""

from __future__ import annotations

from typing import cast

from onnx_attnfuse.bodies.table import BODIES
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.operators import load, records
from onnx_attnfuse.verify.references.by_body import by_body
from onnx_attnfuse.verify.references.core import Operator
from onnx_attnfuse.verify.references.fused_mat_mul import FusedMatMul

_IN_NUMPY = tuple(cast("type[Operator]", load(info.reference)) for info in records().values() if info.reference is not None)
_NAMED = {(operator.op_domain, operator.__name__) for operator in _IN_NUMPY}
OPERATORS: tuple[type[Operator], ...] = (*_IN_NUMPY, FusedMatMul, *(by_body(*key) for key in BODIES if key not in _NAMED))
"""The references that the records of operators name, a product of ours, and the bodies of others."""


def operator(op: str, domain: str = CONTRIB) -> type[Operator]:
    """The reference of one operator."""
    return next(item for item in OPERATORS if (item.op_domain, item.__name__) == (domain, op))
