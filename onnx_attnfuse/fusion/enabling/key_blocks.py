"""Attention to blocks of keys as attention to all of them.

    Concat(q @ k1ᵀ, q @ k2ᵀ)                        is    q @ Concat(k1, k2)ᵀ
    Split(weights)[0] @ v1 + Split(weights)[1] @ v2 is    weights @ Concat(v1, v2)

Models with a few keys for all rows beside those of a window write it, and decoders whose past is not copied beside the new keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.contractions import read_contraction
from onnx_attnfuse.attention.match.softmax import Softmax
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, only_use
from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.constants import attribute, both_ways, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.uses import is_read_once, only_reader, viewers

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
            labels = found.labels[own]
            if found.labels[rows] == (*lead, row, summed) and row not in labels and column in labels:
                return _Block(found.operands[rows], found.operands[own], labels, tuple(lead), summed, column)
        return None

    def laid_out(self, last: Sequence[str], builder: Builder) -> ir.Value | None:
        """The own operand with all leading axes of the product, of length 1 where it lacks them, and two more."""
        own, labels, order, node = self.own, self.labels, (*self.lead, *last), self.own.producer()
        if is_standard(node, "Transpose") and node.inputs[0] is not None:
            perm: list[int] = attribute(node, "perm", [*range(len(labels))][::-1])
            own, labels = node.inputs[0], tuple(labels[perm.index(axis)] for axis in range(len(perm)))
        dims = builder.facts.dims(own)
        if dims is None:
            return None
        lengths = dict(zip(labels, dims, strict=True))
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
    for node in _above(softmax.scores):
        parts, factors = _without_factors(node, facts) if is_standard(node, "Concat") and len(node.inputs) > 1 else ([], [])
        blocks = [_Block.read(part, facts) for part in parts]
        known = [block for block in blocks if block is not None]
        rank = facts.rank(node.outputs[0])
        if not known or len(known) < len(blocks) or rank is None or attribute(node, "axis", 0) % rank != rank - 1:
            continue
        builder.at(node)
        keys = _joined([block.laid_out((block.column, block.summed), builder) for block in known], builder)
        if keys is None or any(block.rows is not known[0].rows for block in known):
            continue
        turned = builder.transpose(keys, [*range(rank - 2), rank - 1, rank - 2])
        product = builder.node("MatMul", [known[0].rows, turned])
        for op, factor in factors[::-1]:
            product = builder.elementwise(op, [product, factor])
        return EnablingChange(((node.outputs[0], product),), (known[0].rows, *(block.own for block in known)))
    return None


def _without_factors(node: ir.Node, facts: Facts) -> tuple[list[ir.Value | None], list[tuple[str, ir.Value]]]:
    """The inputs of a node before one number multiplied or divided all of them, and the operators and numbers, the last first."""
    parts, factors = list(node.inputs), list[tuple[str, ir.Value]]()
    while (scaled := [_scaled(part, facts) for part in parts]) and scaled[0] is not None:
        op, factor = scaled[0][1:]
        others = [
            item[0] for item in scaled if item is not None and (item[1], facts.number(item[2])) == (op, facts.number(factor))
        ]
        if len(others) < len(parts):
            break
        parts = list[ir.Value | None](others)
        factors.append((op, factor))
    return parts, factors


def _scaled(value: ir.Value | None, facts: Facts) -> tuple[ir.Value, str, ir.Value] | None:
    """The value that is multiplied or divided by one number, the operator, and the number."""
    node = None if value is None else value.producer()
    pairs = [*both_ways(node, "Mul"), *([tuple(node.inputs)] if is_standard(node, "Div") else [])]
    for one, factor in pairs:
        if one is not None and factor is not None and facts.rank(factor) == 0 and facts.number(factor) is not None:
            assert node is not None
            return one, node.op_type, factor
    return None


def _joined_values(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The one product with values that the sum over several blocks is."""
    for weights in below(softmax.weights):
        pieces = _pieces(weights, builder.facts)
        products = [None if (node := only_reader(piece)) is None else node.outputs[0] for piece in pieces]
        blocks = [_Block.read(product, builder.facts) for product in products]
        known = [block for block, piece in zip(blocks, pieces, strict=True) if block is not None and block.rows is piece]
        total = _total([product for product in products if product is not None])
        if len(known) < 2 or len(known) < len(blocks) or total is None or not _fit(known, builder.facts):
            continue
        builder.at(total)
        values = _joined([block.laid_out((block.summed, block.column), builder) for block in known], builder)
        if values is None:
            continue
        product = builder.node("MatMul", [weights, values])
        return EnablingChange(((total.outputs[0], product),), (weights, *(block.own for block in known)))
    return None


def _fit(blocks: Sequence[_Block], facts: Facts) -> bool:
    """Whether blocks have as many values as weights, and none is repeated."""
    for block in blocks:
        rows, own = facts.dims(block.rows), facts.dims(block.own)
        if rows is None or own is None or not facts.same(rows[-1], own[block.labels.index(block.summed)]):
            return False
    return True


def _joined(parts: Sequence[ir.Value | None], builder: Builder) -> ir.Value | None:
    """Operands of blocks side by side along the last axis but one, each repeated along those that it lacks."""
    known = [part for part in parts if part is not None]
    shapes = [dims_of(builder, part) for part in known]
    if not known or len(known) < len(parts) or len({len(dims) for dims in shapes}) > 1:
        return None
    axis, wanted = len(shapes[0]) - 2, list(shapes[0])
    for place in range(len(wanted)):
        lengths = [dims[place] for dims in shapes]
        wanted[place] = next((length for length in lengths if length != 1), 1)
        repeats = place < axis
        if place != axis and not all(
            (repeats and length == 1) or builder.facts.same(length, wanted[place]) for length in lengths
        ):
            return None
    whole: list[ir.Value] = []
    for part, dims in zip(known, shapes, strict=True):
        lacks = [place < axis and dims[place] == 1 != length for place, length in enumerate(wanted)]
        repeated = [dims[axis] if place == axis else length for place, length in enumerate(wanted)]
        whole.append(builder.expand(part, repeated, lacks) if any(lacks) else part)
    return builder.node("Concat", whole, {"axis": axis})


def _pieces(weights: ir.Value, facts: Facts) -> list[ir.Value]:
    """The ranges that all readers of weights cut along their columns, in order; none where they leave or repeat some."""
    dims = facts.dims(weights)
    found = {piece: read_part(piece, facts) for node in viewers(weights) for piece in node.outputs}
    parts = {piece: part for piece, part in found.items() if part is not None and part.whole is weights}
    if (
        dims is None
        or len(parts) < max(len(found), 2)
        or any((part.axis, part.step) != (len(dims) - 1, 1) for part in parts.values())
    ):
        return []
    ordered, end = list[ir.Value](), 0
    while parts:
        piece = next((piece for piece, part in parts.items() if facts.same(part.start, end)), None)
        if piece is None:
            return []
        ordered.append(piece)
        end = parts.pop(piece).stop
    return ordered if facts.same(end, dims[-1]) else []


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


def _above(scores: ir.Value) -> list[ir.Node]:
    """The nodes right above a softmax."""
    found, values = list[ir.Node](), [scores]
    for value in values:
        node = value.producer()
        if node is not None and node not in found and len(found) < _MOST_STEPS:
            found.append(node)
            values += [item for item in node.inputs if item is not None]
    return found


def below(weights: ir.Value) -> list[ir.Value]:
    """The weights and the first values that are made of them."""
    found = [weights]
    for value in found:
        if len(found) > _MOST_STEPS:
            break
        found += [node.outputs[0] for node, _ in value.uses() if node.outputs[0] not in found]
    return found
