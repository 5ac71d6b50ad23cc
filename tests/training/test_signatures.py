"""The tables of training kernels against the schemas of the PyTorch that is installed."""

from __future__ import annotations

import pytest
import torch

from onnx_attnfuse.training.ortmodule.kernels import KERNELS, AtenKernel, Signature


def has_schema(signature: Signature) -> bool:
    """Whether PyTorch's operator has the arguments of a table in its order, and as many results."""
    schema = getattr(torch.ops.aten, signature.operator).default._schema
    names = [item.partition("=")[0] for item in signature.arguments.split()]
    return names == [item.name for item in schema.arguments] and len(signature.results.split()) == len(schema.returns)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_tables_have_the_arguments_of_pytorchs_schemas_in_their_order(kernel: AtenKernel) -> None:
    assert has_schema(kernel.forward_signature)
    assert has_schema(kernel.backward_signature)
