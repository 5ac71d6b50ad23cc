"""`ATTNFUSE_SDPA_FALLBACK`: `scaled_dot_product_attention` without a mask is exported and differentiated as one call.

A masked call, or one with dropout on the CPU, is spelled out as it would be otherwise (`spellings`), and fused like any other.
"""

from __future__ import annotations

import importlib
from typing import Any

from onnx_attnfuse.training.kernels import CPU_FLASH, EFFICIENT
from onnx_attnfuse.training.operators import ATEN

_ON_CPU, _ON_CUDA = CPU_FLASH.forward_signature.operator, "_scaled_dot_product_efficient_attention"
KEPT = {_ON_CPU: CPU_FLASH.name, _ON_CUDA: EFFICIENT.name}
"""The operators that are called, and the kernels that they run on."""
_CPU_GRADIENT = ["GO(0)", "I(0)", "I(1)", "I(2)", "O(0)", "O(1)", "I(3)", "I(4)", "I(5)", "I(6)"]
_CUDA_GRADIENT = [
    "GO(0)", *(f"I({index})" for index in range(4)), *(f"O({index})" for index in range(4)), "I(5)", "wanted", "I(6)", "I(7)",
]  # fmt: skip


def register_gradients() -> None:
    """Registers with ORTModule how both calls are differentiated."""
    registry: Any = importlib.import_module("onnxruntime.training.ortmodule._custom_gradient_registry").CustomGradientRegistry
    registry.register(ATEN, "ATen", [_ON_CPU, ""], _cpu_gradient)
    registry.register(ATEN, "ATen", [_ON_CUDA, ""], _cuda_gradient)


def _cpu_gradient() -> list[tuple[Any, ...]]:
    attributes = {"operator": {"value": f"{_ON_CPU}_backward", "dtype": "string"}}
    return [(("ATen", ATEN), _CPU_GRADIENT, ["GI(0)", "GI(1)", "GI(2)"], attributes)]


def _cuda_gradient() -> list[tuple[Any, ...]]:
    wanted = {"value": {"value": [1, 1, 1, 0], "dtype": "int", "is_tensor": True}}
    attributes = {"operator": {"value": f"{_ON_CUDA}_backward", "dtype": "string"}}
    return [
        ("Constant", [], ["wanted"], wanted),
        (("ATen", ATEN), _CUDA_GRADIENT, ["GI(0)", "GI(1)", "GI(2)", ""], attributes),
    ]


def kept_call(graph: Any, query: Any, key: Any, value: Any, share: float, causal: bool, scale: Any) -> Any:
    """The operator as one call while a module is exported, or None where PyTorch has no such call with a gradient."""
    torch: Any = importlib.import_module("torch")
    helper: Any = importlib.import_module("torch.onnx.symbolic_helper")
    number: Any = helper._maybe_get_const(scale, "f")
    on_cuda = torch.cuda.is_available()
    if share != 0.0 and not on_cuda:
        return None
    nothing = graph.op("prim::Constant")
    nothing.setType(torch._C.OptionalType.ofTensor())
    dropped = graph.op("Constant", value_t=torch.tensor(share, dtype=torch.float32))
    is_causal = graph.op("Constant", value_t=torch.tensor(causal))
    given = helper._is_none(number)
    factor = nothing if given else graph.op("Constant", value_t=torch.tensor(float(number), dtype=torch.float32))
    if not on_cuda:
        arguments, operator, outputs = (query, key, value, dropped, is_causal, nothing, factor), _ON_CPU, 2
    else:
        logsumexp = graph.op("Constant", value_t=torch.tensor(True))
        arguments = (query, key, value, nothing, logsumexp, dropped, is_causal, factor)
        operator, outputs = _ON_CUDA, 4
    return graph.op(f"{ATEN}::ATen", *arguments, operator_s=operator, outputs=outputs)[0]
