"""Attention to blocks of keys as attention to all of them.

    Concat(q @ k1ᵀ, q @ k2ᵀ)                        is    q @ Concat(k1, k2)ᵀ
    Split(weights)[0] @ v1 + Split(weights)[1] @ v2 is    weights @ Concat(v1, v2)

Models with a few keys for all rows beside those of a window write it, and decoders whose past is not copied beside the new keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.contractions import read_contraction
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, only_use
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import broadcast
from onnx_attnfuse.graph.rules.reading import sorted_parts
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import dependents, is_read_once, only_reader, sources, viewers

_MOST_STEPS = 8
"""Nodes between a softmax and the place where its blocks are joined, or taken apart."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """A product of rows, which run over all but its last axis, with a block's own operand."""

    rows: ir.Value
    own: ir.Value
    labels: tuple[str, ...]
    """Those of the own operand."""
    lead: tuple[str, ...]
    summed: str
    column: str

    @staticmethod
    def read(product: ir.Value | None, facts: Facts) -> _Block | None:
        """The product that a value is; None where it is another one."""
        node = None if product is None else product.producer()
        found = None if node is None else read_contraction(node, facts)
        if found is None or found.factor != 1 or len(found.summed) != 1 or len(found.out) < 2:
            return None
        (summed,), (*lead, row, column) = found.summed, found.out
        for rows, own in ((0, 1), (1, 0)):
            labels, shapes = found.labels[own], [facts.dims(found.operands[place]) for place in (rows, own)]
            if found.labels[rows] != (*lead, row, summed) or row in labels or column not in labels or None in shapes:
                continue
            lengths = [(dims or ())[of.index(summed)] for dims, of in zip(shapes, (found.labels[rows], labels), strict=True)]
            if facts.same(*lengths):
                return _Block(found.operands[rows], found.operands[own], labels, tuple(lead), summed, column)
        return None

    def laid_out(self, last: Sequence[str], builder: Builder) -> ir.Value:
        """The own operand with all leading axes of the product, of length 1 where it lacks them, and two more."""
        own, labels, order, node = self.own, self.labels, (*self.lead, *last), self.own.producer()
        if is_standard(node, "Transpose") and node.inputs[0] is not None:
            perm: list[int] = attribute(node, "perm", [*range(len(labels))][::-1])
            own, labels = node.inputs[0], tuple(labels[perm.index(axis)] for axis in range(len(perm)))
        lengths = dict(zip(labels, dims_of(builder, own), strict=True))
        turned = builder.transpose(own, [labels.index(label) for label in order if label in labels])
        return builder.reshape(turned, [lengths.get(label, 1) for label in order])


def with_blocks_joined(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The scores of several blocks of keys as one product, and the products with the values of each block as one."""
    scores, result = _joined_scores(softmax, builder), _joined_values(softmax, builder)
    changes = [change for change in (scores, result) if change is not None]
    if not changes:
        return None
    frontier = dict.fromkeys(value for change in changes for value in change.frontier)
    return EnablingChange(tuple(pair for change in changes for pair in change.results), tuple(frontier))


def _joined_scores(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The one product that scores of several blocks are."""
    facts = builder.facts
    for node in (value.producer() for value in itertools.islice(sources([softmax.scores]), _MOST_STEPS)):
        rank = None if node is None else facts.rank(node.outputs[0])
        if not is_standard(node, "Concat") or rank is None or attribute(node, "axis", 0) % rank != rank - 1:
            continue
        parts = [_unscaled(part, facts) for part in node.inputs]
        blocks, factor = _blocks([part for part, _ in parts], facts), parts[0][1]
        builder.at(node)
        keys = _joined([block.laid_out((block.column, block.summed), builder) for block in blocks], builder)
        if keys is None or any(block.rows is not blocks[0].rows for block in blocks) or {scale for _, scale in parts} != {factor}:
            continue
        turned = builder.transpose(keys, [*range(rank - 2), rank - 1, rank - 2])
        product = builder.node("MatMul", [blocks[0].rows, turned])
        if factor != 1:
            product = builder.elementwise("Mul", [product, builder.scalar(factor, facts.dtype(product))])
        return EnablingChange(((node.outputs[0], product),), (blocks[0].rows, *(block.own for block in blocks)))
    return None


def _unscaled(value: ir.Value | None, facts: Facts) -> tuple[ir.Value | None, float]:
    """The value that a value is a multiple of, and the factor."""
    factor = 1.0
    while value is not None and (scaling := read_scaling(value.producer(), facts)) is not None:
        value, factor = scaling.tensor, scaling.of(factor)
    return value, factor


def _joined_values(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The one product with values that the sum over several blocks is."""
    for weights in below(softmax.weights):
        pieces = sorted_parts([piece for node in viewers(weights) for piece in node.outputs], builder.facts)
        products = [node.outputs[0] for piece in pieces if (node := only_reader(piece)) is not None]
        blocks, total = _blocks(products, builder.facts), _total(products)
        if total is None or [block.rows for block in blocks] != pieces:
            continue
        builder.at(total)
        values = _joined([block.laid_out((block.summed, block.column), builder) for block in blocks], builder)
        if values is None:
            continue
        product = builder.node("MatMul", [weights, values])
        return EnablingChange(((total.outputs[0], product),), (weights, *(block.own for block in blocks)))
    return None


def _blocks(products: Sequence[ir.Value | None], facts: Facts) -> list[_Block]:
    """The products of several blocks; none where one is something else."""
    found = [block for product in products if (block := _Block.read(product, facts)) is not None]
    return found if len(found) == len(products) else []


def _joined(parts: Sequence[ir.Value], builder: Builder) -> ir.Value | None:
    """Operands of blocks side by side along the last axis but one, each repeated along those that it lacks."""
    shapes = [dims_of(builder, part) for part in parts]
    wanted = broadcast([(*dims[:-2], 1, dims[-1]) for dims in shapes])
    if len(parts) < 2 or wanted is None:
        return None
    axis, whole = len(wanted) - 2, list[ir.Value]()
    for part, dims in zip(parts, shapes, strict=True):
        lengths = [*wanted[:axis], dims[axis], wanted[-1]]
        lacks = [not builder.facts.same(*pair) for pair in zip(dims, lengths, strict=True)]
        if lacks[-1] or any(dim != 1 for dim, is_short in zip(dims, lacks, strict=True) if is_short):
            return None
        whole.append(builder.expand(part, lengths, lacks) if any(lacks) else part)
    return builder.node("Concat", whole, {"axis": axis})


def _total(products: Sequence[ir.Value]) -> ir.Node | None:
    """The Add by which several products, and nothing else, become one sum."""
    left, total, node = list(products[1:]), products[0] if products else None, None
    while left and total is not None:
        node = only_use(total, "Add")
        other = None if node is None else next((item for item in node.inputs if item is not total), None)
        if node is None or other is None or other not in left or not is_read_once(other):
            return None
        left.remove(other)
        total = node.outputs[0]
    return node


def below(weights: ir.Value) -> Iterator[ir.Value]:
    """The weights and the first values that are made of them."""
    return itertools.islice(dependents([weights]), _MOST_STEPS)
