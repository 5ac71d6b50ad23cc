"""Kernels of PyTorch as tables of their arguments, called by ONNX Runtime's ATen operator, forward and backward.

The operator takes every argument of the schema in its order, keyword arguments too; other values are scalars in CPU memory,
and None and undefined tensors are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.training import kernels
from onnx_attnfuse.training.kernels import TrainingKernel, no_bias_gradient, no_dropout, only, same_head_sizes
from onnx_attnfuse.training.ortmodule.products import ATEN

Layout = Literal["bnsh", "bsnh"]
"""How operands, result and gradients lie."""
Argument: TypeAlias = "ir.Value | float | int | bool | None"
_RANDOM_STATE = frozenset(["philox_seed", "philox_offset"])
_NUMBERS = frozenset([*_RANDOM_STATE, "max_q", "max_k", "max_seqlen_batch_q", "max_seqlen_batch_k"])
"""Results that are one integer, in CPU memory whatever the device is; as tensor arguments only those of the random state are."""
_TYPES = {
    "logsumexp": ir.DataType.FLOAT,
    "cum_seq_q": ir.DataType.INT32,
    "cum_seq_k": ir.DataType.INT32,
    **dict.fromkeys(_NUMBERS, ir.DataType.INT64),
}
"""Element types of results by name; all others have that of the operands."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """An overload of PyTorch: its arguments and results by name, in the order of its schema.

    An argument `name=origin` comes from a field of `KernelOperands`, from a result of the forward part, or from one of
    `gradient`, `bias_gradient`, `mask_type` (1 if causal, counted from the top left, else 0), `True`, `False` and `None`;
    `name` alone from the value of that name.
    """

    operator: str
    arguments: str
    results: str


@dataclasses.dataclass(frozen=True)
class AtenCall:
    """A call of an overload."""

    operator: str
    arguments: Mapping[str, Argument]
    results: Mapping[str, tuple[ir.DataType, tuple[Dim, ...] | None]]
    """Element types, and shapes as far as they are known."""


@dataclasses.dataclass(frozen=True)
class KernelOperands:
    """The operands of a kernel, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None
    causal: bool
    dropout: float
    scale: float


@dataclasses.dataclass(frozen=True)
class KernelGradients:
    """The gradients that the backward part of a kernel gives, in its layout."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class BackwardCall:
    """A call of the backward part of a kernel."""

    kernel: AtenKernel
    operands: KernelOperands
    """The operands of the forward part."""
    saved: Mapping[str, ir.Value]
    """The results of the forward part by name."""
    gradient: ir.Value
    """The gradient of `output`."""
    hint: str
    """The name of the new node, made unique."""
    bias_gradient: bool = False
    """The gradient of the bias is wanted, of a kernel that does not refuse it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtenKernel(TrainingKernel):
    """A kernel of PyTorch, as ONNX Runtime calls it."""

    layout: Layout
    forward_signature: Signature
    backward_signature: Signature
    """The backward overload; its results are called as the fields of `KernelGradients`."""
    bias_block: int | None = None
    """How many keys of a bias are read at once: a bias then has every axis at full length, and keys are padded to a multiple."""

    def forward(self, builder: Builder, operands: KernelOperands, hint: str) -> Mapping[str, ir.Value]:
        """Adds the forward call; its results by name."""
        return emit_call(builder, self._call(builder, self.forward_signature, operands, {}), hint)

    def backward(self, builder: Builder, call: BackwardCall) -> KernelGradients:
        """Adds the backward call."""
        values: dict[str, Argument] = {**call.saved, "gradient": call.gradient, "bias_gradient": call.bias_gradient}
        found = emit_call(builder, self._call(builder, self.backward_signature, call.operands, values), call.hint)
        bias = found["bias"] if call.bias_gradient else None
        gradients = KernelGradients(found["query"], found["key"], found["value"], bias)
        return gradients if self.bias_block is None else trimmed(builder, gradients, call.operands)

    def _call(self, builder: Builder, signature: Signature, given: KernelOperands, values: Mapping[str, Argument]) -> AtenCall:
        """A call of a signature with operands, and with further values by the names that its table has for them."""
        operands = given if self.bias_block is None else padded(builder, given, self.bias_block)
        known: dict[str, Argument] = {"None": None, "True": True, "False": False, **vars(operands), **values}
        known["mask_type"] = int(operands.causal)
        pairs = (item.partition("=") for item in signature.arguments.split())
        arguments = {name: known[origin or name] for name, _, origin in pairs}
        dims: dict[str, tuple[Dim, ...]] = {**dict.fromkeys(_NUMBERS, ()), "output": result_dims(builder, operands)}
        dims |= {name: dims_of(builder, getattr(operands, name)) for name in ("query", "key", "value")}
        if values.get("bias_gradient") and operands.bias is not None:
            dims["bias"] = dims_of(builder, operands.bias)
        if self.layout == "bnsh":
            dims["logsumexp"] = dims["query"][:3]
        dtype = dtype_of(builder, operands)
        results = {name: (_TYPES.get(name, dtype), dims.get(name)) for name in signature.results.split()}
        return AtenCall(signature.operator, arguments, results)


def emit_call(builder: Builder, call: AtenCall, hint: str) -> dict[str, ir.Value]:
    """Adds the node of a call; its results by name.

    All have a name in the graph, also those that nobody wants: without one ONNX Runtime accepts undefined tensors only.
    """
    inputs = [_input(builder, argument) for argument in call.arguments.values()]
    attributes: dict[str, object] = {"operator": call.operator}
    on_cpu = [index for index, name in enumerate(call.arguments) if name in _RANDOM_STATE]
    given_on_cpu = [index for index, name in enumerate(call.results) if name in _NUMBERS]
    attributes |= {"cpu_input_args": on_cpu} if on_cpu else {}
    attributes |= {"cpu_output_args": given_on_cpu} if given_on_cpu else {}
    node = producer_of(builder.node("ATen", inputs, attributes, domain=ATEN, hint=hint, outputs=len(call.results)))
    for value, (dtype, dims) in zip(node.outputs, call.results.values(), strict=True):
        value.dtype = dtype
        builder.facts.record(value, dims, dtype)
        if dims is not None:
            value.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in dims])
    return dict(zip(call.results, node.outputs, strict=True))


def _input(builder: Builder, argument: Argument) -> ir.Value | None:
    match argument:
        case None | ir.Value():
            return argument
        case bool():
            return builder.constant(np.asarray(argument, np.bool_))
        case int():
            return builder.constant(np.asarray(argument, np.int64))
        case float():
            return builder.scalar(argument, ir.DataType.FLOAT)


def padded(builder: Builder, operands: KernelOperands, block: int) -> KernelOperands:
    """KernelOperands in (b, s, n, h), keys padded to a multiple of a number and the bias with every axis at full length.

    Args:
        builder: The builder.
        operands: The operands; nothing is done without a bias.
        block: The number.
    """
    if operands.bias is None:
        return operands
    batch, rows, heads, _ = dims_of(builder, operands.query)
    keys = dims_of(builder, operands.key)[1]
    wanted = (batch, heads, rows, keys)
    dims = dims_of(builder, operands.bias)
    bias = operands.bias if dims == wanted else builder.expand(operands.bias, wanted, [True] * 4)
    if isinstance(keys, int) and keys % block == 0:
        return dataclasses.replace(operands, bias=bias)
    key, value = (_extended(builder, item, 1, 0.0, block) for item in (operands.key, operands.value))
    return dataclasses.replace(operands, key=key, value=value, bias=_extended(builder, bias, 3, -math.inf, block))


def trimmed(builder: Builder, gradients: KernelGradients, operands: KernelOperands) -> KernelGradients:
    """KernelGradients in (b, s, n, h) without those of keys that `padded` added to the operands."""
    keys = dims_of(builder, operands.key)[1]
    key, value = (_cut(builder, item, 1, keys) for item in (gradients.key, gradients.value))
    bias = None if gradients.bias is None else _cut(builder, gradients.bias, 3, keys)
    return KernelGradients(gradients.query, key, value, bias)


def _extended(builder: Builder, value: ir.Value, axis: int, fill: float, block: int) -> ir.Value:
    """`value` with numbers appended along an axis, to a multiple of `block`."""
    dims, long = dims_of(builder, value), ir.DataType.INT64
    size = builder.shape([dims[axis]])
    more = builder.node(
        "Mod", [builder.node("Neg", [size], dims=[1], dtype=long), builder.constant([block])], dims=[1], dtype=long
    )
    before = builder.constant([0] * (len(dims) + axis))
    parts = [before, more, *([builder.constant([0] * (len(dims) - axis - 1))] if axis < len(dims) - 1 else [])]
    pads = builder.node("Concat", parts, {"axis": 0}, dims=[2 * len(dims)], dtype=long)
    number, dtype = builder.scalar(fill, builder.facts.dtype(value)), builder.facts.dtype(value)
    extended = builder.node("Pad", [value, pads, number], dtype=dtype)
    new = [builder.facts.fresh(extended, axis) if place == axis else dim for place, dim in enumerate(dims)]
    builder.facts.record(extended, new, dtype)
    return extended


def _cut(builder: Builder, value: ir.Value, axis: int, size: Dim) -> ir.Value:
    """The first `size` entries of an axis."""
    return value if dims_of(builder, value)[axis] == size else builder.slice(value, axis, 0, size)


def result_dims(builder: Builder, operands: KernelOperands) -> tuple[Dim, ...]:
    """The shape of a result: the queries', with the channels of the values."""
    return (*dims_of(builder, operands.query)[:-1], dims_of(builder, operands.value)[-1])


def dtype_of(builder: Builder, operands: KernelOperands) -> ir.DataType:
    """The element type of the operands."""
    dtype = builder.facts.dtype(operands.query)
    assert dtype is not None
    return dtype


_GRADIENTS = "query key value"
_FLASH = (
    "query key value dropout_p=dropout is_causal=causal return_debug_mask=False scale",
    "output logsumexp cum_seq_q cum_seq_k max_q max_k philox_seed philox_offset debug_attn_mask",
)
_FLASH_BACKWARD = (
    "grad_out=gradient query key value out=output logsumexp cum_seq_q=None cum_seq_k=None max_q max_k dropout_p=dropout "
    "is_causal=causal philox_seed philox_offset scale",
    _GRADIENTS,
)


def _called(kernel: TrainingKernel, **named: Any) -> AtenKernel:
    return AtenKernel(**{field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)} | named)


FLASH = _called(
    kernels.FLASH,
    layout="bnsh",
    forward_signature=Signature("_scaled_dot_product_flash_attention", *_FLASH),
    backward_signature=Signature("_scaled_dot_product_flash_attention_backward", *_FLASH_BACKWARD),
)
EFFICIENT = _called(
    kernels.EFFICIENT,
    layout="bsnh",
    forward_signature=Signature(
        "_efficient_attention_forward",
        "query key value bias cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None dropout_p=dropout "
        "custom_mask_type=mask_type compute_log_sumexp=True scale seqlen_k=None window_size=None",
        "output logsumexp philox_seed philox_offset max_seqlen_batch_q max_seqlen_batch_k",
    ),
    backward_signature=Signature(
        "_efficient_attention_backward",
        "grad_out_=gradient query key value bias out=output cu_seqlens_q=None cu_seqlens_k=None "
        "max_seqlen_q=max_seqlen_batch_q max_seqlen_k=max_seqlen_batch_k logsumexp dropout_p=dropout philox_seed philox_offset "
        "custom_mask_type=mask_type bias_requires_grad=bias_gradient scale num_splits_key=None window_size=None "
        "shared_storage_dqdkdv=False",
        f"{_GRADIENTS} bias",
    ),
    bias_block=8,
)
CPU_FLASH = _called(
    kernels.CPU_FLASH,
    conditions=(only(*HALVES, ir.DataType.FLOAT), no_dropout, no_bias_gradient, same_head_sizes),
    layout="bnsh",
    forward_signature=Signature(
        "_scaled_dot_product_flash_attention_for_cpu",
        "query key value dropout_p=dropout is_causal=causal attn_mask=bias scale",
        "output logsumexp",
    ),
    backward_signature=Signature(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "grad_out=gradient query key value out=output logsumexp dropout_p=dropout is_causal=causal attn_mask=bias scale",
        _GRADIENTS,
    ),
)
KERNELS = (FLASH, EFFICIENT, CPU_FLASH)
"""All kernels, in the order in which they are taken where several can compute an attention."""
