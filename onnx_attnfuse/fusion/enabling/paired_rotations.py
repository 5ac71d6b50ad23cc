"""Queries and keys rotated with the two channels of a pair side by side, several heads as one.

    x @ W ─ RotaryEmbedding(num_heads = n)     x @ W[:, order] ─ RotaryEmbedding(interleaved = 1, num_heads = n / g)

A score is a sum over channels, so that their order may be another one if it is the same for queries and keys. With halves the two
channels of a pair are half a head apart. Side by side, their distance depends on no size of a head, so that g heads may be one.
CUDA starts a block for each token and head, with a thread for each channel: in small heads these are few.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import Moved, added_bias, moved_rows
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib

_BIAS, _FIRST_OF_CACHE = 3, 6
"""Inputs of MultiHeadAttention."""
_CHANNELS = 256
"""The most channels of heads that are one: 2, 4, 8 and 16 heads of 64 channels take the same time."""


@dataclasses.dataclass(frozen=True)
class _Rotated:
    """Queries or keys: a product, perhaps with a bias, perhaps moved, and rotated."""

    rotary: ir.Node
    moved: Moved
    bias: ir.Value | None
    product: ir.Node
    heads: int
    size: int

    @staticmethod
    def read(value: ir.Value | None, facts: Facts) -> _Rotated | None:
        """The steps above a value that one attention alone reads; None where there are others."""
        rotary = None if value is None or not _is_read_once(value) else value.producer()
        if rotary is None or not is_contrib(rotary, "RotaryEmbedding") or len(rotary.inputs) != 4:
            return None
        x, _, cosines, sines = rotary.inputs
        if x is None or cosines is None or sines is None or facts.rank(x) != 3:
            return None
        named = {"interleaved": 0, "is_packed_batching": 0, "rotary_embedding_dim": 0}
        if any(attribute(rotary, name, number) != number for name, number in named.items()):
            return None
        halves = [(facts.dims(table) or ("",))[-1] for table in (cosines, sines) if facts.rank(table) == 2]
        width = (facts.dims(x) or ("",))[-1]
        if len(halves) != 2 or halves[0] != halves[1] or not isinstance(halves[0], int) or not isinstance(width, int):
            return None
        size, moved = 2 * halves[0], moved_rows(x, facts)
        if width % size or attribute(rotary, "num_heads", 0) not in {0, width // size}:
            return None
        found = added_bias(moved.source, facts) if _is_read_once(moved.source) else None
        result, bias = (moved.source, None) if found is None else found
        product = result.producer()
        if not is_standard(product, "MatMul") or not _is_read_once(result) or not _is_read_once(moved.source):
            return None
        weight = product.inputs[1]
        if weight is None or constant_tensor(weight) is None or facts.rank(weight) != 2 or len(weight.uses()) > 1:
            return None
        return _Rotated(rotary, moved, bias, product, width // size, size)

    def paired(self, joined: int, builder: Builder) -> ir.Value:
        """The rotation with pairs side by side and so many heads as one."""
        (x, weight) = self.product.inputs
        assert x is not None
        assert weight is not None
        columns = self._turned(weight, builder)
        result = builder.node("MatMul", [x, columns], hint=f"{self.product.name}/pairs")
        if self.bias is not None:
            result = builder.elementwise("Add", [result, self._turned(self.bias, builder)])
        result = self.moved.again(result, builder)
        tables = [_repeated(table, joined, builder) for table in self.rotary.inputs[2:]]
        kept = {**attributes(self.rotary), "interleaved": 1, "num_heads": self.heads // joined}
        inputs = [result, self.rotary.inputs[1], *tables]
        old, domain = self.rotary.outputs[0], self.rotary.domain
        return builder.node("RotaryEmbedding", inputs, kept, domain=domain, hint=old.name or "")

    def _turned(self, weight: ir.Value, builder: Builder) -> ir.Value:
        """A weight whose last axis has the channels of a pair side by side, a constant in the end."""
        dims = builder.facts.dims(weight) or ()
        parts, last = [*dims[:-1], self.heads, 2, self.size // 2], len(dims) + 1
        turned = builder.transpose(builder.reshape(weight, parts), [*range(last - 1), last, last - 1])
        found = builder.reshape(turned, dims)
        builder.rearranged.append(found)
        return found

    def frontier(self) -> list[ir.Value | None]:
        """The values that all of it is computed from."""
        return [*self.product.inputs, self.bias, *self.moved.others(), *self.rotary.inputs[1:]]


@enabling(
    "rotations of queries and keys rewritten for pairs of channels side by side",
    "com.microsoft.MultiHeadAttention",
    "paired-rotations",
)
def with_paired_rotations(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """MultiHeadAttention of queries and keys whose pairs are adjacent."""
    facts, result = builder.facts, node.outputs[0]
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        return None
    if given(node, _BIAS) is not None or any(node.inputs[_FIRST_OF_CACHE:]):
        return None
    found = [_Rotated.read(given(node, place), facts) for place in range(2)]
    query, key = found
    if query is None or key is None or (query.heads, query.size) != (key.heads, key.size):
        return None
    joined = next(count for count in range(max(1, _CHANNELS // query.size), 0, -1) if query.heads % count == 0)
    if joined == 1:
        return None
    turned = [item.paired(joined, builder) for item in (query, key)]
    domain = node.domain
    new = builder.node(node.op_type, [*turned, *node.inputs[2:]], attributes(node), domain=domain, hint=node.name)
    frontier = [*query.frontier(), *key.frontier(), *node.inputs[2:]]
    return EnablingChange(((result, new),), tuple(dict.fromkeys(value for value in frontier if value is not None)))


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _repeated(table: ir.Value | None, count: int, builder: Builder) -> ir.Value:
    """A table for so many heads as one, the same for all who ask."""
    assert table is not None
    wanted, dims = [1, count], builder.facts.dims(table)
    assert dims is not None
    for user, _ in table.uses():
        repeats = constant_array(user.inputs[1], limit=2) if is_standard(user, "Tile") else None
        if repeats is not None and repeats.tolist() == wanted:
            return user.outputs[0]
    return builder.node("Tile", [table, builder.constant(wanted)])
