"""Proof that every row sees its own key, for masks such as documents, where it follows from the rule and not from its kind."""

from __future__ import annotations

from onnx_attnfuse.attention.axes.factors import leaves
from onnx_attnfuse.attention.masks.fully_masked import implied
from onnx_attnfuse.attention.masks.mask_terms import conjuncts, constant_of, elements_of, index, normal
from onnx_attnfuse.attention.masks.operators import RELATIONS
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import TRUE, Term, conjoin, number, rebuilt, substitute, truth


def rows_see_themselves(allowed: Term, spec: AttentionSpec, given: Term = TRUE) -> bool:
    """Whether key i is certainly seen in row i, of as many keys as rows.

    Args:
        allowed: Where a key is seen.
        spec: The attention.
        given: Known facts about key i.
    """
    seen, known = on_diagonal(allowed, spec), on_diagonal(given, spec)
    return seen is not None and known is not None and (seen is TRUE or implied(known, seen))


def on_diagonal(part: Term, spec: AttentionSpec) -> Term | None:
    """A term of an attention's mask at key i in row i; None where there may not be as many keys as rows."""
    rows, keys = leaves(spec.query_axis), leaves(spec.key_axis)
    if [leaf.size for leaf in rows] != [leaf.size for leaf in keys]:
        return None
    found = normal(substitute(part, dict(zip(map(index, keys), map(index, rows), strict=True))))
    return conjoin(*map(_without_differences, conjuncts(found))) if found.sort == "Bool" else found


def _without_differences(term: Term) -> Term:
    """A term in which what is computed of indices alone is 0 where it is subtracted from itself."""
    if not term.args or term.op in {"index", "element"}:
        return term
    args = tuple(map(_without_differences, term.args))
    values = [constant_of(item) for item in args]
    if term.data == "Sub" and args[0] is args[1] and not elements_of(args[0]):
        return number(0, term.sort)
    if term.data == "Abs" and values[0] == 0:
        return args[0]
    if term.data in RELATIONS and None not in values:
        return truth(bool(RELATIONS[term.data][0](*values)))
    return term if args == term.args else rebuilt(term, args)
