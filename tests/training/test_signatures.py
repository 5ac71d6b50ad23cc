"""The tables of training kernels against the schemas of the PyTorch that is installed."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from onnx_attnfuse.training.installed import torch_version
from onnx_attnfuse.training.kernels import CPU_FLASH, CUDNN, EFFICIENT, FLASH
from onnx_attnfuse.training.kernels.aten import AtenKernel, Signature
from onnx_attnfuse.training.kernels.kernel import Demand, TrainingDevice

HALF = Demand(ir.DataType.FLOAT16, 64, 64, bias=False, causal=True, square=True, dropout=0.0, bias_gradient=False)


def has_schema(signature: Signature) -> bool:
    """Whether PyTorch's operator has the arguments of a table in its order, and as many results."""
    schema = getattr(torch.ops.aten, signature.operator).default._schema
    names = [item.partition("=")[0] for item in signature.arguments.split()]
    return names == [item.name for item in schema.arguments] and len(signature.results.split()) == len(schema.returns)


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CPU_FLASH], ids=lambda kernel: kernel.name)
def test_tables_have_the_arguments_of_pytorchs_schemas_in_their_order(kernel: AtenKernel) -> None:
    assert has_schema(kernel.forward_signature)
    assert has_schema(kernel.backward_signature)


def test_cudnn_is_refused_where_pytorchs_schema_is_another() -> None:
    refusal = CUDNN.refuse(HALF, TrainingDevice("cuda", 90, torch_version()))
    same = has_schema(CUDNN.forward_signature) and has_schema(CUDNN.backward_signature)
    assert (None if refusal is None else refusal.code) == (None if same else "other-torch")
