"""Each fused operator as its documentation says and ONNX Runtime computes it, by its body.

    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS))

They replace the kernel where there is none, as for packed attention on the CPU, and give the result that a kernel should
have computed. Half precision is computed in float32 and rounded once. Where an operator leaves something open its body
describes the choice made here.
"""

from __future__ import annotations

from onnx_attnfuse.bodies.table import BODIES, RUN
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.verify.references.by_body import Operator, by_body

OPERATORS: tuple[type[Operator], ...] = tuple(by_body(*key) for key in (*BODIES, *RUN))
"""The operators that have a body, for onnx's evaluator."""


def operator(op: str, domain: str = CONTRIB) -> type[Operator]:
    """The reference of one operator."""
    return next(item for item in OPERATORS if (item.op_domain, item.__name__) == (domain, op))
