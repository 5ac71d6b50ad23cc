"""What operators compute, element by element, from ONNX's definitions and ONNX Runtime's: `of` finds the meaning of a node."""

from __future__ import annotations

import onnx_ir as ir

from onnx_attnfuse.certify.meanings import attention, elements, group_query, norms, reductions, rotary, views
from onnx_attnfuse.certify.meanings.call import Meaning
from onnx_attnfuse.graph.ops import CONTRIB, read_as

_STANDARD = {
    **views.MEANINGS, **elements.MEANINGS, **reductions.MEANINGS, **attention.MEANINGS, **rotary.MEANINGS, **norms.MEANINGS,
}  # fmt: skip
_CONTRIB = {
    **views.CONTRIB_MEANINGS, **attention.CONTRIB_MEANINGS, **rotary.CONTRIB_MEANINGS, **group_query.CONTRIB_MEANINGS,
    **norms.CONTRIB_MEANINGS,
}  # fmt: skip
HEAVY = frozenset(["MatMul", "Gemm", "Einsum", "Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"]).union(
    norms.MEANINGS, norms.CONTRIB_MEANINGS
)
"""Operators whose results are left uninterpreted where both models have them."""
JOINED = frozenset(norms.CONTRIB_MEANINGS)
"""Operators of which each does what several of the standard do: where one model has one, the other has a sum or a product."""


def of(node: ir.Node) -> Meaning | None:
    """The meaning of the node's operator; None if there is none here."""
    domain, op = read_as(node)
    return {"": _STANDARD, CONTRIB: _CONTRIB}.get(domain, {}).get(op)
