"""The kernels of PyTorch 2.4 that have a gradient, on CUDA and on the CPU, with their schemas."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels.aten import AtenKernel, Signature
from onnx_attnfuse.training.kernels.conditions import (
    head_sizes,
    no_bias,
    no_bias_gradient,
    no_dropout,
    only,
    same_head_sizes,
    square_if_causal,
)
from onnx_attnfuse.training.kernels.kernel import Request

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
"""cuDNN's operators have the same arguments and results as flash attention's."""
_UNMASKED = (only(*HALVES), no_bias_gradient, no_bias, square_if_causal)
_CUDNN_CHANGED = (2, 5)
"""From this version of PyTorch on cuDNN's operator has another signature."""


def _large_heads_without_dropout(request: Request) -> Reason | None:
    """Heads beyond 192 channels have dropout on some GPUs only."""
    size = request.demand.head_size
    assert isinstance(size, int)
    if request.demand.dropout and size > 192 and request.device.arch not in {80, 90, 100}:
        return Reason("head-size", f"with dropout it takes heads of {size} on A100, H100 and newer only")
    return None


FLASH = AtenKernel(
    name="flash",
    layout="bnsh",
    device="cuda",
    arch=80,
    switch="flash",
    conditions=(*_UNMASKED, head_sizes(256, 8), same_head_sizes, _large_heads_without_dropout),
    forward_signature=Signature("_scaled_dot_product_flash_attention", *_FLASH),
    backward_signature=Signature("_scaled_dot_product_flash_attention_backward", *_FLASH_BACKWARD),
)
"""Flash attention on CUDA: half precision, causal or nothing masked at all, dropout."""


def _known_signature(request: Request) -> Reason | None:
    """PyTorch calls cuDNN as it is called here."""
    major, minor = request.device.torch
    if (major, minor) < _CUDNN_CHANGED:
        return None
    return Reason("other-torch", f"its call is that of PyTorch 2.4, and this is {major}.{minor}")


def _without_dropout(request: Request) -> Reason | None:
    """No weights are dropped: the kernel is not used with dropout."""
    return Reason("dropout", "it is not used with dropout") if request.demand.dropout else None


CUDNN = AtenKernel(
    name="cuDNN",
    layout="bnsh",
    device="cuda",
    arch=90,
    conditions=(*_UNMASKED, head_sizes(128, 8), same_head_sizes, _known_signature, _without_dropout),
    forward_signature=Signature("_scaled_dot_product_cudnn_attention", *_FLASH),
    backward_signature=Signature("_scaled_dot_product_cudnn_attention_backward", *_FLASH_BACKWARD),
)
"""cuDNN's attention: half precision, causal or nothing masked, where flash attention is not taken."""


def _types_of_gpu(request: Request) -> Reason | None:
    """The element type is float32 or half precision, bfloat16 from A100 on."""
    halves = HALVES if request.device.arch >= 80 else [ir.DataType.FLOAT16]
    return only(*halves, ir.DataType.FLOAT)(request)


def _aligned_heads(request: Request) -> Reason | None:
    """Heads fill pieces of 16 bytes."""
    return head_sizes(1 << 16, 4 if request.demand.dtype == ir.DataType.FLOAT else 8)(request)


EFFICIENT = AtenKernel(
    name="efficient",
    layout="bsnh",
    device="cuda",
    arch=50,
    switch="efficient",
    conditions=(_types_of_gpu, _aligned_heads),
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
"""The memory-efficient kernel: any mask as a bias, and its gradient; dropout."""
_ON_CPU = (no_dropout, no_bias_gradient, same_head_sizes)
CPU_FLASH = AtenKernel(
    name="flash (CPU)",
    layout="bnsh",
    device="cpu",
    switch="flash",
    conditions=(only(*HALVES, ir.DataType.FLOAT), *_ON_CPU),
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
"""Flash attention on the CPU: any mask as a bias, no dropout."""
CPU_FLASH_CHOSEN = dataclasses.replace(CPU_FLASH, conditions=(only(*HALVES, ir.DataType.FLOAT, ir.DataType.DOUBLE), *_ON_CPU))
"""The same where `scaled_dot_product_attention` chooses it: in float64 too, which ORTModule does not have."""
