"""A product with a large constant weight whose columns are no multiple of eight, with columns of zeros up to one of 64.

Kernels for tensor cores read and write 16 bytes at a time. Where the rows of a weight and of the result are no multiple of that,
as with the 50257 tokens of GPT-2, a slower kernel runs. Each column of a product is computed by itself, so those that are left
after the cut are unchanged.

The sliced axis is as long as all tokens together. ONNX Runtime's Slice ends in an error of CUDA from 2^31 numbers on, where the
product itself does not; UnfoldTensor of com.microsoft cuts at any size, in three times the time of a Slice. So it is taken where
there may be so many: in a table of more than 65536 columns these are fewer than 32768 tokens.

A weight that others read too, as the table of a tied embedding, is not kept twice: the padded one would be a second copy. Only
where a product reads it turned there is a copy already, which ONNX Runtime makes when a session starts, and that one is padded.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.assumptions import AssumptionName
from onnx_attnfuse.fusion.enabling.rule import EnablingChange, enabling
from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.graph.constants import attribute, attributes, constant_tensor, is_standard
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB

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
    weight = None if operand is None else _weight_of(operand)
    if x is None or weight is None or not dims or dtype is None or dtype not in HALVES or facts.dtype(weight[0]) != dtype:
        return None
    table, is_turned = weight
    shape, shared = facts.dims(table), _is_shared(table)
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
    dims = builder.facts.dims(product)
    assert dims is not None
    rows = builder.reshape(product, [*dims[:-2], dims[-2] * dims[-1]])
    attributes = {"dim": len(dims) - 2, "size": columns, "step": dims[-1]}
    return builder.node("UnfoldTensor", [rows], attributes, domain=CONTRIB, dims=[*dims[:-1], columns])


def _weight_of(operand: ir.Value) -> tuple[ir.Value, bool] | None:
    """The constant that a product reads, and whether its transpose is read; None if it is none."""
    node, turned = operand.producer(), False
    if is_standard(node, "Transpose") and node.inputs[0] is not None:
        if attribute(node, "perm", [1, 0]) != [1, 0] or _is_shared(operand):
            return None
        operand, turned = node.inputs[0], True
    return None if constant_tensor(operand) is None else (operand, turned)


def _is_shared(value: ir.Value) -> bool:
    return len(value.uses()) > 1 or value.is_graph_output()


def _padded(value: ir.Value, axis: int, missing: int, builder: Builder) -> ir.Value:
    """A constant with zeros after it along an axis."""
    dims, dtype = builder.facts.dims(value), builder.facts.dtype(value)
    assert dims is not None
    assert dtype is not None
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
