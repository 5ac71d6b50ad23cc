"""ONNX Runtime's own flash attention, a Triton kernel: half precision, masks as a bias, neither dropout nor a bias's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder, dims_of
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.graph.uses import producer_of
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels import conditions
from onnx_attnfuse.training.kernels.kernel import (
    BackwardCall,
    KernelGradients,
    KernelOperands,
    Request,
    TrainingKernel,
    dtype_of,
    result_dims,
)
from onnx_attnfuse.training.operators import TRAINING


class _TritonKernel(TrainingKernel):
    """A kernel that the operator TritonOp calls by its name: tensors are inputs, a bias the last of them."""

    def forward(self, builder: Builder, operands: KernelOperands, hint: str) -> Mapping[str, ir.Value]:
        """Adds the forward call: `output`, and `logsumexp` of shape (b, n, s rounded up)."""
        inputs = [operands.query, operands.key, operands.value]
        dims = result_dims(builder, operands)
        output, logsumexp = _emit(builder, "flash_attn_forward", inputs, operands, hint, outputs=2, dims=dims)
        batch, _, heads, _ = dims_of(builder, operands.query)
        logsumexp.dtype = ir.DataType.FLOAT
        builder.facts.record(logsumexp, (batch, heads, builder.facts.fresh(logsumexp, 2)), ir.DataType.FLOAT)
        return {"output": output, "logsumexp": logsumexp}

    def backward(self, builder: Builder, call: BackwardCall) -> KernelGradients:
        """Adds the backward call."""
        given = (call.operands.query, call.operands.key, call.operands.value)
        inputs = [call.gradient, *given, call.saved["output"], call.saved["logsumexp"]]
        outputs = _emit(builder, "flash_attn_backward", inputs, call.operands, call.hint, outputs=3)
        for output, value in zip(outputs, given, strict=True):
            builder.facts.copy(value, output)
        return KernelGradients(*outputs)


def _emit(
    builder: Builder,
    function: str,
    inputs: list[ir.Value],
    operands: KernelOperands,
    hint: str,
    *,
    outputs: int,
    dims: Sequence[Dim] | None = None,
) -> Sequence[ir.Value]:
    """Adds a TritonOp; its outputs, the first one of shape `dims`."""
    attributes = {"func_name": function, "causal": int(operands.causal), "softmax_scale": operands.scale}
    given = inputs if operands.bias is None else [*inputs, operands.bias]
    dtype = dtype_of(builder, operands)
    first = builder.node("TritonOp", given, attributes, domain=TRAINING, dims=dims, dtype=dtype, hint=hint, outputs=outputs)
    node = producer_of(first)
    return node.outputs


def _loaded(request: Request) -> Reason | None:
    """ONNX Runtime has loaded the kernel."""
    if request.device.triton:
        return None
    switches = "ORTMODULE_USE_TRITON=1 and ORTMODULE_USE_FLASH_ATTENTION=1"
    return Reason("triton-off", f"ONNX Runtime loads it where {switches} were set when it was imported")


TRITON_FLASH = _TritonKernel(
    name="flash (Triton)",
    layout="bsnh",
    device="cuda",
    arch=80,
    switch="flash",
    conditions=(
        conditions.only(*HALVES),
        conditions.head_sizes(128, 1),
        conditions.same_head_sizes,
        conditions.no_dropout,
        conditions.no_bias_gradient,
        _loaded,
        conditions.square_if_causal,
    ),
)
