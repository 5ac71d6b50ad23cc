"""Keys that rows certainly see: by the kind of the mask, or their own, as in masks of documents, where the rule says so."""

from __future__ import annotations

from onnx_attnfuse.attention.axes.factors import leaves
from onnx_attnfuse.attention.masks import predicates
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.attention.masks.mask_terms import conjuncts, constant_of, elements_of, index, normal, position
from onnx_attnfuse.attention.masks.operators import RELATIONS
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.certify.terms import TRUE, Term, conjoin, number, rebuilt, substitute, truth


def sees_a_key(meaning: Meaning, bounds: Bounds) -> bool:
    """Whether every row certainly has a key whose score counts: the predicates leave one, and nothing low is added to it.

    Low numbers are low whatever is taken to mask: a row of -1e5 alone is rounded, and -65504 is the lowest of its type.
    """
    return meaning.rows_see_a_key and not any(map(bounds.may_mask, meaning.biases))


def rows_keep_a_key(kept: Term, spec: AttentionSpec) -> bool:
    """Whether every row certainly has a key at which a condition holds."""
    row, column = position(spec.query_axis), position(spec.key_axis)
    found = [predicates.read(part, row, column, spec.axes.n) for part in conjuncts(kept)]
    return predicates.rows_see_a_key(found, spec) or rows_see_themselves(kept, spec)


def implied(premise: Term, conclusion: Term) -> bool:
    """Whether a conjunction contains every part of another."""
    return set(conjuncts(conclusion)) <= set(conjuncts(premise))


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
