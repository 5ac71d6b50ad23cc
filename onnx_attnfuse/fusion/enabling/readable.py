"""Rewrites of attentions that could not be read, after which they may be.

    Pad(scores, one column of c)                  is    Concat(scores, c)                         a sink that is one number
    weights @ v1, weights @ v2                    is    Split(weights @ Concat(v1, v2))           values in two parts
    (weights - others) @ v                        is    weights @ v - others @ v                  differential attention

The others are in `normal_scores.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.fusion.enabling.normal_scores import with_factor_inside, with_plain_scores
from onnx_attnfuse.fusion.enabling.rule import EnablingChange
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, given, is_standard
from onnx_attnfuse.graph.rules.reading import int_list
from onnx_attnfuse.graph.sizes import Dim

_MOST_STEPS = 8
"""Nodes between a softmax and the products with its values."""


def with_column_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """One column that scores are padded by, joined to them."""
    padded, facts = softmax.scores, builder.facts
    node = padded.producer()
    scores = given(node, 0) if is_standard(node, "Pad") else None
    dims, pads = None if scores is None else facts.dims(scores), None if node is None else int_list(node, 1, "pads", facts)
    if node is None or scores is None or dims is None or pads is None or attribute(node, "mode", "constant") != "constant":
        return None
    axis, rank = softmax.axis % len(dims), len(dims)
    columns = [place for place, pad in enumerate(pads) if pad != 0]
    if len(pads) != 2 * rank or columns not in ([axis], [axis + rank]) or pads[columns[0]] != 1 or given(node, 3) is not None:
        return None
    number = given(node, 2) or builder.scalar(0.0, facts.dtype(scores))
    lengths: list[Dim] = [1 if place == axis else dim for place, dim in enumerate(dims)]
    sink = builder.expand(number, lengths, [True] * rank)
    parts = [sink, scores] if columns == [axis] else [scores, sink]
    joined = builder.node("Concat", parts, {"axis": axis})
    return EnablingChange(((padded, joined),), (scores,))


def with_values_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The products of one attention's weights with several values as one product with all of them."""
    facts = builder.facts
    found = (
        (value, [node for node, place in value.uses() if is_standard(node, "MatMul") and place == 0]) for value in _below(softmax)
    )
    weights, products = next((item for item in found if item[1]), (softmax.weights, list[ir.Node]()))
    values = [node.inputs[1] for node in products if node.inputs[1] is not None]
    shapes = [facts.dims(value) or () for value in values]
    widths = [dims[-1] for dims in shapes if len(dims) > 1 and isinstance(dims[-1], int)]
    if len(products) < 2 or len(widths) < len(products) or len({dims[:-1] for dims in shapes}) > 1:
        return None
    places = {node: place for place, node in enumerate(products[0].graph or ())}
    first, last = (pick(products, key=lambda node: places.get(node, -1)) for pick in (min, max))
    above = [value.producer() for value in values]
    for node in above:
        if node in products:
            return None  # a value depends on another product
        if node is not None and places.get(node, -1) > places.get(first, -1):
            above += [producer for item in node.inputs if item is not None and (producer := item.producer()) not in above]
    results = [node.outputs[0] for node in products]
    axis = len(shapes[0]) - 1
    builder.at(last)
    value = builder.node("Concat", values, {"axis": axis})
    product = builder.node("MatMul", [weights, value])
    pairs, start = list[tuple[ir.Value, ir.Value]](), 0
    for result, width in zip(results, widths, strict=True):
        pairs.append((result, builder.slice(product, axis, start, start + width)))
        start += width
    return EnablingChange(tuple(pairs), (weights, *dict.fromkeys(values)))


def with_terms_apart(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The product of a sum of weights and others with values as a sum of products."""
    facts = builder.facts
    for total in _below(softmax):
        node, users = total.producer(), [user for user, place in total.uses() if place == 0]
        if not is_standard(node, "Add", "Sub") or len(users) != 1 or len(total.uses()) > 1 or total.is_graph_output():
            continue
        product = users[0]
        terms, values, dims = [item for item in node.inputs if item is not None], given(product, 1), facts.dims(total)
        if not is_standard(product, "MatMul") or values is None or dims is None or len(terms) < 2:
            continue
        if any((facts.dims(term) or ())[-2:] != dims[-2:] for term in terms) or (facts.dims(values) or ())[:-2] != dims[:-2]:
            continue
        builder.at(product)
        result = product.outputs[0]
        parts = [builder.node("MatMul", [term, values]) for term in terms]
        return EnablingChange(((result, builder.elementwise(node.op_type, parts)),), (*terms, values))
    return None


def _below(softmax: Softmax) -> list[ir.Value]:
    """The weights and the first values that are made of them."""
    found = [softmax.weights]
    for value in found:
        if len(found) > _MOST_STEPS:
            break
        found += [node.outputs[0] for node, _ in value.uses() if node.outputs[0] not in found]
    return found


REWRITES: tuple[Callable[[Softmax, Builder], EnablingChange | None], ...] = (
    lambda softmax, builder: with_plain_scores(softmax.scores, builder),
    lambda softmax, builder: with_factor_inside(softmax.weights, builder),
    with_column_joined,
    with_values_joined,
    with_terms_apart,
)
"""Rewrites tried in sequence until an attention can be read."""
