"""ONNX Runtime's own flash attention, a Triton kernel: half precision, masks as a bias, neither dropout nor a bias's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph.build import Builder
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.training.kernels.kernel import (
    Demand,
    Gradients,
    Layout,
    Operands,
    TrainingDevice,
    dims_of,
    dtype_of,
    result_dims,
)
from onnx_attnfuse.training.kernels.refusals import (
    HALVES,
    head_sizes,
    no_bias_gradient,
    no_dropout,
    not_square,
    other_device,
    other_type,
)
from onnx_attnfuse.training.operators import TRAINING

NAME: str = "flash (Triton)"
LAYOUT: Layout = "bsnh"
SWITCH: Literal["flash", "efficient"] | None = "flash"


def refuse(demand: Demand, device: TrainingDevice, policy: Policy) -> Reason | None:
    """Why it cannot compute that here, or None."""
    del policy
    common = other_device(device, "cuda", 80) or other_type(demand, HALVES) or head_sizes(demand, 128, 1, same=True)
    found = common or no_dropout(demand) or no_bias_gradient(demand)
    if found is not None:
        return found
    if not device.triton:
        switches = "ORTMODULE_USE_TRITON=1 and ORTMODULE_USE_FLASH_ATTENTION=1"
        return Reason("triton-off", f"ONNX Runtime loads it where {switches} were set when it was imported")
    return not_square(demand)


def forward(builder: Builder, operands: Operands, hint: str) -> Mapping[str, ir.Value]:
    """Adds the forward call: `output` and `logsumexp`."""
    batch, _, heads, _ = dims_of(builder, operands.query)
    inputs = [operands.query, operands.key, operands.value, *_bias(operands)]
    output = builder.node(
        "TritonOp",
        inputs,
        _attributes("flash_attn_forward", operands),
        domain=TRAINING,
        dims=result_dims(builder, operands),
        dtype=dtype_of(builder, operands),
        hint=hint,
        outputs=2,
    )
    node = output.producer()
    assert node is not None
    node.outputs[1].dtype = ir.DataType.FLOAT
    builder.facts.record(node.outputs[1], (batch, heads, builder.facts.fresh(node.outputs[1], 2)), ir.DataType.FLOAT)
    return {"output": output, "logsumexp": node.outputs[1]}


def backward(
    builder: Builder,
    operands: Operands,
    saved: Mapping[str, ir.Value],
    gradient: ir.Value,
    hint: str,
    *,
    bias_gradient: bool = False,
) -> Gradients:
    """Adds the backward call."""
    assert not bias_gradient
    given = (operands.query, operands.key, operands.value)
    inputs = [gradient, *given, saved["output"], saved["logsumexp"], *_bias(operands)]
    attributes, dtype = _attributes("flash_attn_backward", operands), dtype_of(builder, operands)
    first = builder.node("TritonOp", inputs, attributes, domain=TRAINING, dtype=dtype, hint=hint, outputs=3)
    node = first.producer()
    assert node is not None
    for output, value in zip(node.outputs, given, strict=True):
        builder.facts.copy(value, output)
    return Gradients(*node.outputs)


def _attributes(function: str, operands: Operands) -> dict[str, object]:
    return {"func_name": function, "causal": int(operands.causal), "softmax_scale": operands.scale}


def _bias(operands: Operands) -> list[ir.Value]:
    return [] if operands.bias is None else [operands.bias]
