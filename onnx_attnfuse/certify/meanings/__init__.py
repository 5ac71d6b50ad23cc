"""The semantics of operators, element by element, from ONNX's definitions and ONNX Runtime's: `of` finds that of a node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.bodies.table import BODIES, NORMS
from onnx_attnfuse.certify.arrays import Array
from onnx_attnfuse.certify.meanings import bodies, elements, norms, reductions, views
from onnx_attnfuse.certify.meanings.call import Call, Meaning
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB, is_contrib, read_as

_STANDARD = {**views.MEANINGS, **elements.MEANINGS, **reductions.MEANINGS, **norms.MEANINGS}
_CONTRIB = {**views.CONTRIB_MEANINGS, **norms.CONTRIB_MEANINGS, **reductions.CONTRIB_MEANINGS}
JOINED = frozenset(["BranchwiseRMSNorm", *norms.CONTRIB_MEANINGS, *(op for domain, op in NORMS if domain)])
"""Operators of which each does the work of several of the standard: where one model has one, the other has a sum or a product."""
HEAVY = JOINED.union(
    ["MatMul", "FusedMatMul", "Gemm", "Einsum", "Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"],
    norms.MEANINGS,
    (op for _, op in NORMS),
)
"""Operators whose results are left uninterpreted where both models have them."""


def of(node: ir.Node) -> Meaning | None:
    """The meaning of the node's operator; None if there is none here."""
    domain, op = read_as(node)
    found = {"": _STANDARD, CONTRIB: _CONTRIB}.get(domain, {}).get(op)
    return found or (_by_its_body if (domain, op) in BODIES or (domain, op) in NORMS else None)


def _by_its_body(call: Call) -> Sequence[Array | None]:
    return bodies.executed(call, of)


def is_plain_product(node: ir.Node) -> bool:
    """Whether a FusedMatMul neither turns nor scales, as a MatMul."""
    return is_contrib(node, "FusedMatMul") and all(
        attribute(node, name, default) == default for name, default in reductions.UNCHANGED.items()
    )
