"""A sum of products of queries and keys as one product, of their channels side by side.

    f · (q1 @ k1ᵀ) + g · (q2 @ k2ᵀ)               is    Concat(f · q1, g · q2) @ Concat(k1, k2)ᵀ

Two attentions that share their scores, as those to text and layout do, look into each other; after this the first needs neither
product, and the other one has both for itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.contractions import Contraction, read_contraction
from onnx_attnfuse.attention.match.normal_form import is_product
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attributes, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import viewers

_MOST_STEPS = 8
"""Nodes between products and a softmax."""
_LINEAR = ("Add", "Div", "Mul")


@dataclasses.dataclass(frozen=True)
class _Term:
    """A multiple of a value, which is a product or a mask."""

    value: ir.Value
    factor: float
    product: Contraction | None


def with_products_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """Scores that are a sum of several products, which nothing but softmaxes look at, as one product and a mask."""
    facts, scores = builder.facts, softmax.scores
    terms = _terms(scores, facts)
    products = [(term.product, term.factor) for term in terms if term.product is not None]
    first = products[0][0] if products else None
    operands = [[product.operands[side] for product, _ in products] for side in (0, 1)]
    node = scores.producer()
    if first is None or node is None or len(products) < 2 or not all(_fits(product, first, facts) for product, _ in products):
        return None
    builder.at(node)
    dtype, factors = facts.dtype(scores), [factor for _, factor in products]
    outside = factors[0] if len(set(factors)) == 1 else 1.0
    scaled = [builder.times(item, factor / outside) for item, factor in zip(operands[0], factors, strict=True)]
    (summed,) = first.summed
    joined = [
        builder.node("Concat", items, {"axis": labels.index(summed)})
        for items, labels in zip((scaled, operands[1]), first.labels, strict=True)
    ]
    made = builder.node(first.node.op_type, joined, attributes(first.node), dims=facts.dims(scores), dtype=dtype)
    made = builder.times(made, outside)
    rest = [term for term in terms if term.product is None]
    made = builder.chained("Add", [made, *(builder.times(term.value, term.factor) for term in rest)])
    ends = [*operands[0], *operands[1], *(term.value for term in rest)]
    return EnablingChange(((scores, made),), tuple(dict.fromkeys(ends)))


def _terms(scores: ir.Value, facts: Facts) -> Sequence[_Term]:
    """The summands of scores, in order; none where something else than softmaxes looks at a sum, or at a product."""
    found, pending, dims = list[_Term](), [(scores, 1.0)], facts.dims(scores)
    for value, factor in pending:
        node, is_like = value.producer(), facts.dims(value) == dims
        scaling = read_scaling(node, facts)
        if len(pending) > _MOST_STEPS:
            return []
        if is_like and is_product(value, facts):
            product = None if node is None else read_contraction(node, facts)
            found.append(_Term(value, factor, product))
        elif is_like and scaling is not None:
            pending.append((scaling.tensor, scaling.of(factor)))
        elif is_like and is_standard(node, "Add"):
            pending += [(item, factor) for item in node.inputs if item is not None]
        else:
            found.append(_Term(value, factor, None))
            continue
        if not _is_of_softmaxes(value):
            return []
    return found if all(math.isfinite(term.factor) for term in found) else []


def _is_of_softmaxes(value: ir.Value) -> bool:
    """Whether all that looks at a value are softmaxes, through sums and multiples."""
    pending = [value]
    for item in pending:
        if item.is_graph_output() or len(pending) > _MOST_STEPS:
            return False
        for node in viewers(item):
            if is_standard(node, *_LINEAR):
                pending.append(node.outputs[0])
            elif not is_standard(node, "Softmax"):
                return False
    return True


def _fits(product: Contraction, first: Contraction, facts: Facts) -> bool:
    """Whether a product has the axes of the first one, apart from the length of that which it sums over."""
    if product.node.op_type != first.node.op_type or product.labels != first.labels or product.out != first.out:
        return False
    if product.factor != 1 or first.factor != 1 or len(first.summed) != 1 or not is_standard(first.node):
        return False
    for one, other, labels in zip(product.operands, first.operands, first.labels, strict=True):
        lengths, wanted = facts.dims(one), facts.dims(other)
        if lengths is None or wanted is None:
            return False
        if not all(
            label in first.summed or facts.same(left, right) for label, left, right in zip(labels, lengths, wanted, strict=True)
        ):
            return False
    return True
