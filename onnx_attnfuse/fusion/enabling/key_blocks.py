"""Attention to blocks of keys as attention to all of them.

    Concat(q @ k1ᵀ, q @ k2ᵀ)                        is    q @ Concat(k1, k2)ᵀ
    Concat(f · q @ k1ᵀ + m1, f · q @ k2ᵀ + m2)      is    f · q @ Concat(k1, k2)ᵀ + Concat(m1, m2)
    Concat(q1 @ k1ᵀ, q2 @ k2ᵀ)                      is    Concat(q1, q2) @ [k1 0; 0 k2]ᵀ
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
from onnx_attnfuse.graph.constants import attribute, both_ways, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.rules.reading import sorted_parts
from onnx_attnfuse.graph.scaling import read_scaling
from onnx_attnfuse.graph.uses import dependents, is_read_once, only_reader, sources, viewers

_MOST_STEPS = 8
"""Nodes between a softmax and the place where its blocks are joined, or taken apart."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """A multiple of a product of rows, which run over all but its last axis, with a block's own operand, and a mask."""

    dims: Dims
    rows: ir.Value
    own: ir.Value
    labels: tuple[str, ...]
    """Those of the own operand."""
    lead: tuple[str, ...]
    summed: str
    column: str
    factor: float = 1.0
    added: ir.Value | None = None

    @staticmethod
    def read(value: ir.Value | None, facts: Facts) -> _Block | None:
        """The product that a value is, with what multiplies it and is added then; None where it is something else."""
        if value is None:
            return None
        for product, added in both_ways(value.producer(), "Add"):
            block = _Block._multiple(product, facts)
            if block is not None and block.dims == facts.dims(value):
                return dataclasses.replace(block, added=added)
        return _Block._multiple(value, facts)

    @staticmethod
    def _multiple(value: ir.Value, facts: Facts) -> _Block | None:
        """The multiple of a product that a value is."""
        factor = 1.0
        while (scaling := read_scaling(value.producer(), facts)) is not None:
            value, factor = scaling.tensor, scaling.of(factor)
        block = _Block._product(value, facts)
        return None if block is None else dataclasses.replace(block, factor=factor)

    @staticmethod
    def _product(product: ir.Value, facts: Facts) -> _Block | None:
        """The product that a value is."""
        node, dims = product.producer(), facts.dims(product)
        found = None if node is None else read_contraction(node, facts)
        if found is None or dims is None or found.factor != 1 or len(found.summed) != 1 or len(found.out) < 2:
            return None
        (summed,), (*lead, row, column) = found.summed, found.out
        for rows, own in ((0, 1), (1, 0)):
            labels, shapes = found.labels[own], [facts.dims(found.operands[place]) for place in (rows, own)]
            if found.labels[rows] != (*lead, row, summed) or row in labels or column not in labels or None in shapes:
                continue
            lengths = [(dims or ())[of.index(summed)] for dims, of in zip(shapes, (found.labels[rows], labels), strict=True)]
            if facts.same(*lengths):
                return _Block(dims, found.operands[rows], found.operands[own], labels, tuple(lead), summed, column)
        return None

    @property
    def source(self) -> tuple[ir.Value, tuple[str, ...]]:
        """The own operand before it is transposed, with its labels."""
        node, labels = self.own.producer(), self.labels
        if not is_standard(node, "Transpose") or node.inputs[0] is None:
            return self.own, labels
        perm: list[int] = attribute(node, "perm", [*range(len(labels))][::-1])
        return node.inputs[0], tuple(labels[perm.index(axis)] for axis in range(len(perm)))

    @property
    def ends(self) -> list[ir.Value]:
        """The values that the scores are computed from."""
        return [value for value in (self.rows, self.source[0], self.added) if value is not None]

    def laid_out(self, last: Sequence[str], builder: Builder) -> ir.Value:
        """The own operand with all leading axes of the product, of length 1 where it lacks them, and two more."""
        (own, labels), order = self.source, (*self.lead, *last)
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
    """The one product that scores of several blocks are, and the mask that they have."""
    facts = builder.facts
    for node in (value.producer() for value in itertools.islice(sources([softmax.scores]), _MOST_STEPS)):
        rows = [] if node is None else _rows_of_blocks(node, facts)
        blocks = [block for row in rows for block in row]
        if node is None or not blocks or len({block.factor for block in blocks}) > 1 or not _have_same_keys(rows):
            continue
        builder.at(node)
        made = _product(rows, builder)
        made = None if made is None else builder.times(made, blocks[0].factor)
        if made is not None and any(block.added is not None for block in blocks):
            masks = [mask for row in rows if (mask := _masks(row, builder)) is not None]
            mask = builder.joined(masks, -2) if len(masks) == len(rows) else None
            made = None if mask is None else builder.elementwise("Add", [made, mask])
        if made is not None:
            ends = dict.fromkeys(value for block in blocks for value in block.ends)
            return EnablingChange(((node.outputs[0], made),), tuple(ends))
    return None


def _rows_of_blocks(node: ir.Node, facts: Facts) -> list[list[_Block]]:
    """The products that a Concat has side by side, or those of several below each other; none where one is no product."""
    rank = facts.rank(node.outputs[0])
    if not is_standard(node, "Concat") or rank is None:
        return []
    is_row = attribute(node, "axis", 0) % rank == rank - 1
    below = [node] if is_row else [None if item is None else item.producer() for item in node.inputs]
    if not is_row and attribute(node, "axis", 0) % rank != rank - 2:
        return []
    rows = list[list[_Block]]()
    for item in below:
        if not is_standard(item, "Concat") or attribute(item, "axis", 0) % rank != rank - 1:
            return []
        rows.append(_blocks(item.inputs, facts))
    return rows if all(len(row) == len(rows[0]) > 1 for row in rows) else []


def _have_same_keys(rows: Sequence[Sequence[_Block]]) -> bool:
    """Whether blocks below each other have the same keys."""
    keys = [[(block.own, block.labels) for block in row] for row in rows]
    return all(item == keys[0] for item in keys)


def _product(rows: Sequence[Sequence[_Block]], builder: Builder) -> ir.Value | None:
    """One product of all queries with all keys.

    Where a row of blocks has several queries, their channels are side by side, and those of other blocks are 0 in the keys.
    """
    is_split = any(block.rows is not row[0].rows for row in rows for block in row)
    widths = [[dims_of(builder, block.rows)[-1] for block in row] for row in rows]
    numbers = [width for width in widths[0] if isinstance(width, int)]
    if is_split and (len(numbers) < len(rows[0]) or any(item != widths[0] for item in widths)):
        return None
    parts = [block.laid_out((block.column, block.summed), builder) for block in rows[0]]
    if is_split:
        parts = [
            builder.pad(part, len(dims_of(builder, part)) - 1, sum(numbers[:place]), sum(numbers[place + 1 :]))
            for place, part in enumerate(parts)
        ]
    across = [builder.joined([block.rows for block in row], -1) if is_split else row[0].rows for row in rows]
    queries = [query for query in across if query is not None]
    keys, query = builder.joined(parts, -2), builder.joined(queries, -2) if len(queries) == len(rows) else None
    if keys is None or query is None:
        return None
    rank = len(dims_of(builder, keys))
    return builder.node("MatMul", [query, builder.transpose(keys, [*range(rank - 2), rank - 1, rank - 2])])


def _masks(row: Sequence[_Block], builder: Builder) -> ir.Value | None:
    """The masks of blocks side by side."""
    parts = list[ir.Value]()
    for block in row:
        added = block.added or builder.scalar(0.0, builder.facts.dtype(block.rows))
        dims = dims_of(builder, added)
        mask = builder.reshape(added, [*[1] * (len(block.dims) - len(dims)), *dims])
        parts.append(builder.expand(mask, [*dims_of(builder, mask)[:-2], *block.dims[-2:]]))
    return builder.joined(parts, -1)


def _joined_values(softmax: Softmax, builder: Builder) -> EnablingChange | None:
    """The one product with values that the sum over several blocks is."""
    for weights in below(softmax.weights):
        pieces = sorted_parts([piece for node in viewers(weights) for piece in node.outputs], builder.facts)
        products = [node.outputs[0] for piece in pieces if (node := only_reader(piece)) is not None]
        blocks, total = _blocks(products, builder.facts), _total(products)
        if total is None or [block.rows for block in blocks] != pieces or len(blocks) < 2:
            continue
        builder.at(total)
        values = builder.joined([block.laid_out((block.summed, block.column), builder) for block in blocks], -2)
        if values is None:
            continue
        product = builder.node("MatMul", [weights, values])
        return EnablingChange(((total.outputs[0], product),), (weights, *(block.source[0] for block in blocks)))
    return None


def _blocks(values: Sequence[ir.Value | None], facts: Facts) -> list[_Block]:
    """The products of several blocks; none where one is something else."""
    found = [block for value in values if (block := _Block.read(value, facts)) is not None]
    return found if len(found) == len(values) else []


def _total(products: Sequence[ir.Value]) -> ir.Node | None:
    """The Add by which several products, and nothing else, become one sum."""
    total, node, found = products[0] if products else None, None, set[ir.Value]()
    while total is not None and len(found) < len(products) and (node := only_use(total, "Add")) is not None:
        total = node.outputs[0]
        found = _addends(total, set(products))
    return node if len(found) == len(products) and found == set(products) else None


def _addends(total: ir.Value, known: set[ir.Value]) -> set[ir.Value]:
    """The values that are added to one, as far as nothing else reads the sums between: those known are not taken apart."""
    found, pending = set[ir.Value](), [total]
    for value in pending:
        node = value.producer()
        if value is total or (value not in known and is_standard(node, "Add") and is_read_once(value) and len(pending) < 32):
            pending += [item for item in (node.inputs if node is not None else ()) if item is not None]
        elif is_read_once(value):
            found.add(value)
    return found


def below(weights: ir.Value) -> Iterator[ir.Value]:
    """The weights and the first values that are made of them."""
    return itertools.islice(dependents([weights]), _MOST_STEPS)
