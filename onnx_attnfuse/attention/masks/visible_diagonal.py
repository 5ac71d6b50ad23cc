"""Proof that every row sees its own key, for masks such as documents, where it follows from the rule and not from its kind."""

from __future__ import annotations

from onnx_attnfuse.attention.axes.factors import leaves
from onnx_attnfuse.attention.masks.fully_masked import implied
from onnx_attnfuse.attention.masks.mask_terms import index, normal
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import TRUE, Term, substitute


def rows_see_themselves(allowed: Term, spec: AttentionSpec, given: Term = TRUE) -> bool:
    """Whether key i is certainly seen in row i, of as many keys as rows.

    Args:
        allowed: Where a key is seen.
        spec: The attention.
        given: Known facts about key i.
    """
    rows, keys = leaves(spec.query_axis), leaves(spec.key_axis)
    if [leaf.size for leaf in rows] != [leaf.size for leaf in keys]:
        return False
    places = dict(zip(map(index, keys), map(index, rows), strict=True))
    seen = normal(substitute(allowed, places))
    return seen is TRUE or implied(normal(substitute(given, places)), seen)
