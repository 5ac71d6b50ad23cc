"""Rotations by RotaryEmbedding of other tokens, or in another order of channels, for less work."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, Moved, enabling, moved_rows, only_use, own_bias, same_node
from onnx_attnfuse.graph.build import Builder, dims_of, dtype_of
from onnx_attnfuse.graph.constants import attribute, attributes, constant_array, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import is_contrib
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.uses import is_read_once

_LONGEST, _SHORTEST = 512, 8
"""Rows of a part."""
_INDEX = ir.DataType.INT64


@enabling("rows of tokens rotated before they are put back in their places", "com.microsoft.RotaryEmbedding", "rotated-rows")
def with_rotated_rows(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """RestorePadding of rotated rows, in the place of a rotation of its result.

        RestorePadding ─ RotaryEmbedding(positions (b, s))     RotaryEmbedding(positions of the rows) ─ RestorePadding

    A rotation leaves 0 as it is, and RestorePadding has 0 elsewhere. The operator takes no more tokens than its tables have
    rows, so that the rows are passed in parts of that length, as entries.
    """
    facts = builder.facts
    if len(node.inputs) != 4 or attribute(node, "is_packed_batching", 0):
        return None
    x, positions, *tables = node.inputs
    restoring = None if x is None or not is_read_once(x) else x.producer()
    if restoring is None or not is_contrib(restoring, "RestorePadding") or positions is None:
        return None
    rows, offset = restoring.inputs
    whole, count = _numbers(node.outputs[0], facts), None if rows is None else (_numbers(rows, facts) or (None,))[0]
    lengths = [(facts.dims(table) or (None,))[0] for table in tables if table is not None]
    known = [size for size in lengths if isinstance(size, int)]
    if rows is None or offset is None or whole is None or len(whole) != 3 or count is None or len(known) != len(tables):
        return None
    part = math.gcd(count, _LONGEST)
    while part > min(known):
        part //= 2
    own = _positions(positions, offset, whole, count, builder)
    if part < _SHORTEST or own is None:
        return None
    shape, width = [count // part, part], whole[2]
    inputs = [builder.reshape(rows, [*shape, width]), builder.reshape(own, shape), *tables]
    kept, domain = attributes(node), node.domain
    turned = builder.node(node.op_type, inputs, kept, domain=domain, hint=node.name)
    flat = builder.reshape(turned, [count, width])
    hint = f"{node.name}/RestorePadding"
    restored = builder.node("RestorePadding", [flat, offset], domain=domain, dims=whole, hint=hint)
    frontier = (rows, offset, positions, *(table for table in tables if table is not None))
    return EnablingChange(((node.outputs[0], restored),), frontier)


def _numbers(value: ir.Value, facts: Facts) -> tuple[int, ...] | None:
    """The shape of a value where all sizes are numbers."""
    dims = facts.dims(value)
    sizes = tuple(size for size in dims or () if isinstance(size, int))
    return sizes if dims is not None and len(sizes) == len(dims) else None


def _positions(positions: ir.Value, offset: ir.Value, whole: tuple[int, ...], count: int, builder: Builder) -> ir.Value | None:
    """The position of each row, from those of each place, or from the first of all entries."""
    (batch, length, _), known = whole, _numbers(positions, builder.facts)
    taken = builder.cast(builder.slice(builder.reshape(offset, [batch * length]), 0, 0, count), _INDEX)
    if known == (batch, length):
        flat = builder.reshape(positions, [batch * length])
        return builder.node("Gather", [flat, taken], {"axis": 0})
    if known != (1,):
        return None
    place = builder.elementwise("Mod", [taken, builder.constant(np.asarray(length))])
    return builder.elementwise("Add", [place, positions])


_TOKENS, _HEADS_FIRST = 2, [0, 2, 1, 3]
"""The axis of tokens where heads come before them."""


@enabling("rotations of all but the first tokens rewritten as rotations of all", "Concat", "whole-rotations")
def with_whole_rotation(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A Concat of the first tokens and the others, rotated, as a rotation of all.

        Split ─ RotaryEmbedding of all but the first P ─ Concat     RotaryEmbedding with P rows of 1 and 0 before its tables

    So nothing is cut off and joined again, as for the class token and the registers of a vision transformer. Where heads were
    brought to the front for that alone, the operator takes (batch, tokens, heads · channels). Equal for finite numbers.
    """
    facts, found = builder.facts, _read(node, builder.facts)
    if found is None:
        return None
    whole, prefix, rotary = found
    _, positions, *tables = rotary.inputs
    rows = [_with_rows(table, prefix, content, builder) for table, content in zip(tables, (1.0, 0.0), strict=True)]
    flat = _flat(whole, node.outputs[0], facts)
    x, result = (whole, node.outputs[0]) if flat is None else flat
    kept = attributes(rotary)
    if flat is not None:
        kept["num_heads"] = (facts.dims(whole) or (0, 0))[1]
    new = builder.node(rotary.op_type, [x, positions, *rows], kept, domain=rotary.domain, hint=rotary.name)
    frontier = (x, *(table for table in tables if table is not None))
    return EnablingChange(((result, new),), frontier)


def _read(node: ir.Node, facts: Facts) -> tuple[ir.Value, int, ir.Node] | None:
    """The value (b, n, s, h) of which a Concat has the first tokens as they are and rotates the others, how many, and by what."""
    if len(node.inputs) != 2 or attribute(node, "axis") not in {_TOKENS, _TOKENS - 4}:
        return None
    first, second = node.inputs
    rotary = None if second is None else second.producer()
    if first is None or second is None or rotary is None or not is_contrib(rotary, "RotaryEmbedding") or len(second.uses()) != 1:
        return None
    rest, positions, *tables = rotary.inputs
    starts = constant_array(positions, limit=1)
    if rest is None or len(tables) != 2 or starts is None or starts.any() or facts.rank(rest) != 4:
        return None
    if attribute(rotary, "is_packed_batching", 0) or any(table is None or facts.rank(table) != 2 for table in tables):
        return None
    if not all(isinstance((facts.dims(table) or ("",))[-1], int) for table in tables if table is not None):
        return None
    start, end = read_part(first, facts), read_part(rest, facts)
    dims = None if start is None else facts.dims(start.whole)
    if start is None or end is None or start.whole is not end.whole or dims is None or dims != facts.dims(node.outputs[0]):
        return None
    is_cut = (start.axis, start.start, start.step) == (_TOKENS, 0, 1) and (end.axis, end.step) == (_TOKENS, 1)
    prefix, is_rest = start.stop, end.start == start.stop and facts.same(end.stop, dims[_TOKENS])
    return (start.whole, prefix, rotary) if is_cut and is_rest and isinstance(prefix, int) else None


def _with_rows(table: ir.Value | None, count: int, number: float, builder: Builder) -> ir.Value:
    """A table with rows of one number in front."""
    assert table is not None
    dims, dtype = dims_of(builder, table), dtype_of(builder, table)
    assert isinstance(dims[1], int)
    rows = builder.constant(np.full((count, dims[1]), number, dtype.numpy()))
    return builder.node("Concat", [rows, table], {"axis": 0})


def _flat(whole: ir.Value, joined: ir.Value, facts: Facts) -> tuple[ir.Value, ir.Value] | None:
    """The value before heads go to the front, and that after they are back; None where they are in front for others too."""
    turning, back = whole.producer(), only_use(joined, "Transpose")
    if not is_standard(turning, "Transpose") or back is None or turning.inputs[0] is None:
        return None
    if attribute(turning, "perm") != _HEADS_FIRST or attribute(back, "perm") != _HEADS_FIRST:
        return None
    parted, again = turning.inputs[0].producer(), only_use(back.outputs[0], "Reshape")
    if not is_standard(parted, "Reshape") or again is None or parted.inputs[0] is None:
        return None
    x, result = parted.inputs[0], again.outputs[0]
    return (x, result) if facts.rank(x) == 3 and facts.dims(x) == facts.dims(result) else None


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
        rotary = None if value is None or not is_read_once(value) else value.producer()
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
        found = own_bias(moved.source, facts)
        result, bias = (moved.source, None) if found is None else found
        product = result.producer()
        if not is_standard(product, "MatMul") or not is_read_once(result) or not is_read_once(moved.source):
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
    """MultiHeadAttention of queries and keys whose pairs are adjacent.

        x @ W ─ RotaryEmbedding(num_heads = n)     x @ W[:, order] ─ RotaryEmbedding(interleaved = 1, num_heads = n / g)

    A score is a sum over channels, so that their order may be another one if it is the same for queries and keys. With halves the
    two channels of a pair are half a head apart. Side by side, their distance depends on no size of a head, so that g heads may
    be one. CUDA starts a block for each token and head, with a thread for each channel: in small heads these are few.
    """
    facts = builder.facts
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
    pairs = same_node(node, [*turned, *node.inputs[2:]], attributes(node), builder)
    frontier = [*query.frontier(), *key.frontier(), *node.inputs[2:]]
    return EnablingChange(pairs, tuple(dict.fromkeys(value for value in frontier if value is not None)))


def _repeated(table: ir.Value | None, count: int, builder: Builder) -> ir.Value:
    """A table for so many heads as one, the same for all who ask."""
    assert table is not None
    wanted = [1, count]
    for user, _ in table.uses():
        repeats = constant_array(user.inputs[1], limit=2) if is_standard(user, "Tile") else None
        if repeats is not None and repeats.tolist() == wanted:
            return user.outputs[0]
    return builder.node("Tile", [table, builder.constant(wanted)])
