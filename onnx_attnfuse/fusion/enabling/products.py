"""Products written so that ONNX Runtime's kernels have least to do: those for CUDA, and in the last line those for a CPU.

    x @ w, then + b                        x @ w by FusedMatMul, then + b     ONNX Runtime would make Gemm of MatMul and Add
    Split(x @ (w1 | w2)) or Slices of it   x @ w1, x @ w2                     each column of a product is computed by itself
    x @ w                                  (x @ [w, 0])[..., :n]              columns up to a multiple of 64
    x @ Tile(m)                            x @ m                              MatMul broadcasts a matrix without copies

Where MatMul and Add become Gemm, BiasGelu and SkipLayerNormalization are not found, and the bias is copied into each row of the
result first. That fusion looks at matrices, and at tensors whose sizes are all numbers.

Kernels for tensor cores read and write 16 bytes at a time. Where the rows of a weight and of the result are no multiple of that,
as with the 50257 tokens of GPT-2, a slower kernel runs, so columns of zeros are added.
The sliced axis is as long as all tokens together. ONNX Runtime's Slice ends in an error of CUDA from 2^31 numbers on, where the
product itself does not; UnfoldTensor of com.microsoft cuts at any size, in three times the time of a Slice. So it is taken where
there may be so many: in a table of more than 65536 columns these are fewer than 32768 tokens.

A weight that others read too, as the table of a tied embedding, is not kept twice: the padded one would be a second copy. Only
where a product reads it turned there is a copy already, which ONNX Runtime makes when a session starts, and that one is padded.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.fusion.enabling.rule import EnablingChange, Moved, added_bias, enabling, moved_by, only_use
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.build import Builder, dims_of, dtype_of
from onnx_attnfuse.graph.constants import attribute, attributes, constant_tensor, given, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.uses import is_read_once, only_reader, producer_of
from onnx_attnfuse.targets.operand_products import weight_of

_MATRIX, _STACK = 2, 3
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
    rank, adder, columns = facts.rank(x), only_use(result, "Add"), (facts.dims(weight) or (None,))[-1:]
    if rank is None or (rank != _MATRIX and not is_fixed) or adder is None or constant_tensor(weight) is None:
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
        dims, reader = facts.dims(value), only_reader(value)
        if not dims or not isinstance(dims[-1], int):
            return None
        lead = len(dims) - 1
        if not is_standard(reader, "Reshape"):
            return _Parted(value, lead, dims[-1], 1)
        after = facts.dims(reader.outputs[0])
        if not after or len(after) <= lead or tuple(after[:lead]) != tuple(dims[:lead]):
            return None
        parts = after[lead]
        return _Parted(reader.outputs[0], lead, parts, dims[-1] // parts) if isinstance(parts, int) and parts else None


def _moved(value: ir.Value, facts: Facts) -> Moved:
    """The nodes that move the rows of a value before all else."""
    source, steps, maker = value, list[ir.Node](), producer_of(value)
    while (node := only_reader(value)) is not None:
        if node.graph is not maker.graph or moved_by(node, facts) is not value:
            break
        steps.insert(0, node)
        value = node.outputs[0]
    return Moved(source, tuple(steps))


def _with_bias(value: ir.Value, facts: Facts) -> tuple[ir.Value | None, ir.Value]:
    """The constant bias that is all that a product is read for, and the sum; None and the product where there is none."""
    adder = only_use(value, "Add")
    found = None if adder is None else added_bias(adder.outputs[0], facts)
    return (found[1], adder.outputs[0]) if adder is not None and found is not None and found[0] is value else (None, value)


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
    old, new = facts.dims(x), facts.dims(result)
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
    table, is_turned = (None if turned is None else weight_of(turned)) or (None, False)
    tensor = constant_tensor(table)
    if x is None or tensor is None or not is_turned or tensor.size < _FEWEST_ELEMENTS or len(tensor.shape) != 2:
        return None
    if table is None or len(table.uses()) < 2:
        return None
    product = builder.node("FusedMatMul", [x, table], {"transB": 1}, domain=CONTRIB, hint=f"{node.name}/FusedMatMul")
    return EnablingChange(((node.outputs[0], product),), (x,))


@enabling("matrices repeated for each entry multiplied without their copies", "MatMul", "one-matrix")
def with_one_matrix(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`x @ Tile(m)`, m turned or not, as a product with m, which MatMul broadcasts over the entries of x.

    Relative positions of DeBERTa are repeated for each entry. On a CPU the copies take longer than the products, and these read
    all copies instead of one matrix that stays in the cache: three layers of 8 x 16 tokens take 0.68 of their time.
    """
    facts, x, right = builder.facts, given(node, 0), given(node, 1)
    turning = None if right is None else right.producer()
    is_turned = is_standard(turning, "Transpose") and attribute(turning, "perm", None) == [0, 2, 1]
    tile = turning if turning is None or not is_turned or turning.inputs[0] is None else turning.inputs[0].producer()
    if x is None or tile is None or not is_standard(tile, "Tile"):
        return None
    matrix, repeats = given(tile, 0), given(tile, 1)
    times = facts.content(repeats)
    before, rows, after = (facts.dims(value) for value in (matrix, x, node.outputs[0]))
    if matrix is None or before is None or rows is None or after is None or len(before) != len(rows) or len(rows) != _STACK:
        return None
    if not isinstance(times, tuple) or not isinstance(times[0], int | sizes.Size) or times[1:] != (1, 1):
        return None
    if not facts.same(sizes.product([times[0], before[0]]), rows[0]):
        return None
    once = builder.transpose(matrix, [0, 2, 1]) if is_turned else matrix
    product = builder.node("MatMul", [builder.reshape(x, [times[0], before[0], *rows[1:]]), once], hint=f"{node.name}/once")
    frontier = (x,) if constant_tensor(matrix) is not None else (x, matrix)
    return EnablingChange(((node.outputs[0], builder.reshape(product, after)),), frontier)


_ALIGNED, _MULTIPLE = 8, 64
"""The multiple that tensor cores need, and that columns are padded to: faster than 8, and 128 is no faster
(docs/decisions/0021)."""
_FEWEST_ROWS, _FEWEST_COLUMNS = 256, 4096
_SLICED, _SURELY_SLICED = 1 << 31, 1 << 16
"""Numbers from which on a Slice fails on CUDA, and columns up to which it is used for an unknown number of rows."""
_MOST_FOLDED = 1 << 30
"""Bytes up to which ONNX Runtime computes a constant when a session starts; more than that it would compute in every run."""


@enabling("products padded to a multiple of 64 columns for tensor cores", "Gemm MatMul", "padded-columns")
def with_padded_columns(node: ir.Node, builder: Builder) -> EnablingChange | None:
    """`x @ w` as `(x @ [w, 0])[..., :n]`, and the same for Gemm."""
    facts = builder.facts
    result, x, operand = node.outputs[0], node.inputs[0], node.inputs[1]
    dims, dtype = facts.dims(result), facts.dtype(result)
    weight = None if operand is None else weight_of(operand)
    if x is None or weight is None or not dims or dtype is None or dtype not in HALVES or facts.dtype(weight[0]) != dtype:
        return None
    table, is_turned = weight
    shape, shared = facts.dims(table), not is_read_once(table)
    lies_across = bool(attribute(node, "transB", 0)) != is_turned
    if shape is None or len(shape) != 2:
        return None
    rows, columns = reversed(shape) if lies_across else shape
    if not isinstance(rows, int) or not isinstance(columns, int) or dims[-1] != columns:
        return None
    missing = -columns % _MULTIPLE
    if columns % _ALIGNED == 0 or rows < _FEWEST_ROWS or columns < _FEWEST_COLUMNS:
        return None
    if shared and (not is_turned or rows * (columns + missing) * dtype.itemsize > _MOST_FOLDED):
        return None
    cutting = _cutting(dims, columns, facts)
    if cutting is None:
        return None
    slices, assumes = cutting
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and not _is_paddable(bias, columns, builder):
        return None
    padded = _padded(table, 0 if lies_across else 1, missing, builder)
    if is_turned:
        padded = builder.transpose(padded, [1, 0])
    if not shared:
        builder.rearranged.append(padded)
    inputs = [x, padded, *([] if bias is None else [_padded_bias(bias, columns, missing, builder)])]
    product = builder.node(node.op_type, inputs, attributes(node), hint=f"{node.name}/padded")
    frontier = [x] if bias is None or constant_tensor(bias) is not None else [x, bias]
    cut = builder.slice(product, len(dims) - 1, 0, columns) if slices else _unfolded(product, columns, builder)
    return EnablingChange(((result, cut),), tuple(frontier), assumes)


def _cutting(dims: Dims, columns: int, facts: Facts) -> tuple[bool, tuple[AssumptionName, ...]] | None:
    """Whether Slice or UnfoldTensor cuts a product of that shape; None where it may have no row, which the latter refuses."""
    rows = [dim for dim in dims[:-1] if isinstance(dim, int)]
    if len(rows) == len(dims) - 1:
        return (math.prod(rows) * columns < _SLICED, ()) if 0 not in rows else None
    if columns <= _SURELY_SLICED and "small-results" in facts.assumed.names:
        return True, ("small-results",)
    return (False, ("nonempty-axes",)) if facts.assumed.nonempty_axes else None


def _unfolded(product: ir.Value, columns: int, builder: Builder) -> ir.Value:
    """The columns that are left, by UnfoldTensor: rows concatenated, and of each the beginning."""
    dims = dims_of(builder, product)
    rows = builder.reshape(product, [*dims[:-2], dims[-2] * dims[-1]])
    attributes = {"dim": len(dims) - 2, "size": columns, "step": dims[-1]}
    return builder.node("UnfoldTensor", [rows], attributes, domain=CONTRIB, dims=[*dims[:-1], columns])


def _padded(value: ir.Value, axis: int, missing: int, builder: Builder) -> ir.Value:
    """A constant with zeros after it along an axis."""
    dims, dtype = dims_of(builder, value), dtype_of(builder, value)
    sizes = [missing if place == axis else dim for place, dim in enumerate(dims)]
    zeros = builder.constant(np.zeros([size for size in sizes if isinstance(size, int)], dtype.numpy()))
    return builder.node("Concat", [value, zeros], {"axis": axis})


def _is_paddable(bias: ir.Value, columns: int, builder: Builder) -> bool:
    """Whether a bias is the same for all columns, or a constant with one number or more for each."""
    dims = builder.facts.dims(bias)
    if dims is None or (dims and dims[-1] not in {1, columns}):
        return False
    return not dims or dims[-1] == 1 or (constant_tensor(bias) is not None and all(isinstance(dim, int) for dim in dims))


def _padded_bias(bias: ir.Value, columns: int, missing: int, builder: Builder) -> ir.Value:
    dims = builder.facts.dims(bias)
    if not dims or dims[-1] != columns:
        return bias
    padded = _padded(bias, len(dims) - 1, missing, builder)
    builder.rearranged.append(padded)
    return padded
