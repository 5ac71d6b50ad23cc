"""Products with a constant weight, written so that ONNX Runtime's kernels for CUDA have least to do.

    x @ w, then + b                        x @ w by FusedMatMul, then + b     ONNX Runtime would make Gemm of MatMul and Add
    Split(x @ (w1 | w2)) or Slices of it   x @ w1, x @ w2                     each column of a product is computed by itself

Where MatMul and Add become Gemm, BiasGelu and SkipLayerNormalization are not found, and the bias is copied into each row of the
result first. That fusion looks at matrices, and at tensors whose sizes are all numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.helpers import Moved, added_bias, moved_by, only_use
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, constant_tensor, given, is_standard
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.uses import producer_of

_MATRIX = 2
_Piece = tuple[ir.Value, tuple[int, int]]
"""A value and the columns that it is, from and to."""


def as_fused_product(node: ir.Node, builder: Builder, *, is_fixed: bool) -> EnablingChange | None:
    """MatMul as FusedMatMul where its one reader adds a bias, and ONNX Runtime would make Gemm of both.

    Args:
        node: A MatMul.
        builder: The builder.
        is_fixed: Whether all sizes of the model's inputs are numbers, or will be.
    """
    facts, result = builder.facts, node.outputs[0]
    x, weight = given(node, 0), given(node, 1)
    if x is None or weight is None or facts.rank(weight) != _MATRIX:
        return None
    rank, readers = facts.rank(x), [user for user, _ in result.uses()]
    if rank is None or (rank != _MATRIX and not is_fixed) or len(readers) != 1 or result.is_graph_output():
        return None
    adder, columns = readers[0], (facts.dims(weight) or (None,))[-1:]
    if not is_standard(adder, "Add") or constant_tensor(weight) is None:
        return None
    addend = adder.inputs[0] if adder.inputs[1] is result else adder.inputs[1]
    if addend is None or (facts.rank(addend) or 0) not in ({1, _MATRIX} if rank == _MATRIX else {1}):
        return None
    if (facts.dims(addend) or (None,))[-1:] != columns:
        return None
    product = builder.node("FusedMatMul", [x, weight], {"alpha": 1.0}, domain=CONTRIB, hint=f"{node.name}/FusedMatMul")
    return EnablingChange(((result, product),), (x,))


@enabling("products that are cut into pieces split into one product for each", "MatMul", "split-products", with_cache=False)
def as_own_products(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """A product, or one with a bias, that is cut along its columns by all its readers, as a product for each of them."""
    facts = builder.facts
    x, weight = given(node, 0), given(node, 1)
    if x is None or weight is None or constant_tensor(weight) is None:
        return None
    bias, total = _with_bias(node.outputs[0], facts)
    moved = _moved(total, facts)
    found = _Parted.read(moved.steps[0].outputs[0] if moved.steps else total, facts)
    dims, dtype, shape = facts.dims(total), facts.dtype(total), facts.dims(weight)
    if found is None or dims is None or dtype is None or shape is None or len(shape) != _MATRIX:
        return None
    pieces = _pieces(found, facts)
    if pieces is None or len(weight.uses()) > 1:
        return None
    pairs: list[tuple[ir.Value, ir.Value]] = []
    for piece, bounds in pieces:
        start, end = (found.width * bound for bound in bounds)
        columns = builder.slice(weight, 1, start, end)
        builder.rearranged.append(columns)
        product = builder.node("MatMul", [x, columns], hint=f"{node.name}/columns")
        if bias is not None:
            part = builder.slice(bias, 0, start, end)
            builder.rearranged.append(part)
            product = builder.elementwise("Add", [product, part])
        own = facts.dims(piece)
        assert own is not None
        pairs.append((piece, builder.reshape(moved.again(product, builder), own)))
    frontier = (x, weight, bias, *moved.others())
    return EnablingChange(tuple(pairs), tuple(dict.fromkeys(value for value in frontier if value is not None)))


@dataclasses.dataclass(frozen=True)
class _Parted:
    """Columns as parts of one width along an axis."""

    whole: ir.Value
    axis: int
    parts: int
    width: int

    @staticmethod
    def read(value: ir.Value, facts: Facts) -> _Parted | None:
        """The columns of a value, each by itself, or in the parts that the one Reshape that reads them makes."""
        dims, readers = facts.dims(value), [user for user, _ in value.uses()]
        if not dims or not isinstance(dims[-1], int):
            return None
        lead = len(dims) - 1
        if len(readers) != 1 or not is_standard(readers[0], "Reshape") or value.is_graph_output():
            return _Parted(value, lead, dims[-1], 1)
        after = facts.dims(readers[0].outputs[0])
        if not after or len(after) <= lead or tuple(after[:lead]) != tuple(dims[:lead]):
            return None
        parts = after[lead]
        return _Parted(readers[0].outputs[0], lead, parts, dims[-1] // parts) if isinstance(parts, int) and parts else None


def _moved(value: ir.Value, facts: Facts) -> Moved:
    """The nodes that move the rows of a value before all else."""
    source, steps, maker = value, list[ir.Node](), producer_of(value)
    while len(value.uses()) == 1 and not value.is_graph_output():
        node = next(iter(value.uses()))[0]
        if node.graph is not maker.graph or moved_by(node, facts) is not value:
            break
        steps.insert(0, node)
        value = node.outputs[0]
    return Moved(source, tuple(steps))


def _with_bias(value: ir.Value, facts: Facts) -> tuple[ir.Value | None, ir.Value]:
    """The constant bias that is all that a product is read for, and the sum; None and the product where there is none."""
    readers = [user for user, _ in value.uses()]
    found = added_bias(readers[0].outputs[0], facts) if len(readers) == 1 and not value.is_graph_output() else None
    return (found[1], readers[0].outputs[0]) if found is not None and found[0] is value else (None, value)


def _pieces(parted: _Parted, facts: Facts) -> Sequence[_Piece] | None:
    """The pieces that readers cut along the parts of a value, each with its parts; None where one reads it otherwise."""
    whole = parted.whole
    readers, maker = [user for user, _ in whole.uses()], whole.producer()
    if maker is None or whole.is_graph_output() or any(reader.graph is not maker.graph for reader in readers):
        return None
    found: list[_Piece] = []
    for reader in readers:
        cut = _cut(reader, parted, facts) if reader.inputs[0] is whole else None
        if cut is None:
            return None
        found += [piece for piece in cut if piece[0].uses() or piece[0].is_graph_output()]
    places = sorted({place for _, place in found})
    is_apart = all(before[1] <= after[0] for before, after in itertools.pairwise(places))
    return found if is_apart and len(places) > 1 and all(start < end for start, end in places) else None


def _cut(node: ir.Node, parted: _Parted, facts: Facts) -> list[_Piece] | None:
    """The pieces that a Split or a Slice cuts along the parts; None where it is another operator, or cuts elsewhere."""
    found: list[_Piece] = []
    for piece in node.outputs:
        part = read_part(piece, facts)
        if part is None or (part.axis, part.step) != (parted.axis, 1):
            return None
        if not isinstance(part.start, int) or not isinstance(part.stop, int):
            return None
        found.append((piece, (part.start, part.stop)))
    return found


_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}


@enabling("Gemm split into MatMul and Add, so that the bias can be fused", "Gemm", "split-gemm")
def as_product(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`reshape(gemm(reshape(x), w, b))` with all axes but the last as they were, as `x @ w + b`.

    On a GPU, Gemm first writes its bias to every row and then reads it back. A sum goes into the next operator: the attention, an
    activation, or the next normalization.
    """
    facts = builder.facts
    if len(node.inputs) < 3 or any(attribute(node, name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    flat, weight, bias = node.inputs[:3]
    before = None if flat is None else flat.producer()
    after = only_use(node.outputs[0], "Reshape")
    if after is None or not is_standard(before, "Reshape") or weight is None or bias is None:
        return None
    x, result = before.inputs[0], after.outputs[0]
    old, new = None if x is None else facts.dims(x), facts.dims(result)
    width = facts.dims(bias)
    if x is None or old is None or new is None or width is None or len(width) != 1 or constant_tensor(weight) is None:
        return None
    if len(old) < 3 or old[:-1] != new[:-1] or new[-1:] != width or flat is None or (facts.dims(flat) or ())[-1:] != old[-1:]:
        return None
    builder.at(after)
    product = builder.node("MatMul", [x, weight], hint=f"{node.name}/MatMul")
    total = builder.node("Add", [product, bias], hint=f"{node.name}/bias")
    return EnablingChange(((result, total),), (x,))


_FEWEST_ELEMENTS = 1 << 20
"""Smaller tables are not worth another operator."""


@enabling("products that read the token embedding in place, without a transposed copy", "MatMul", "shared-table")
def with_one_table(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`x @ Transpose(table)` as FusedMatMul, where others read the table too.

    Exporters write `x @ Transpose(table)` with the table that tokens are looked up in. When a session starts ONNX Runtime
    computes the Transpose and keeps both: 272 MB a second time for Qwen2 of 0.5 B (benchmarks/results/whole_models_h200.md).
    FusedMatMul reads the table itself. Where nothing else reads it, there is one copy either way.
    """
    x, turned = node.inputs
    turning = None if turned is None else turned.producer()
    if x is None or turned is None or not is_standard(turning, "Transpose") or attribute(turning, "perm", [1, 0]) != [1, 0]:
        return None
    table = turning.inputs[0]
    tensor = constant_tensor(table)
    if table is None or tensor is None or tensor.size < _FEWEST_ELEMENTS or len(tensor.shape) != 2:
        return None
    if len(table.uses()) < 2 or len(turned.uses()) > 1 or turned.is_graph_output():
        return None
    product = builder.node("FusedMatMul", [x, table], {"transB": 1}, domain=CONTRIB, hint=f"{node.name}/FusedMatMul")
    return EnablingChange(((node.outputs[0], product),), (x,))
