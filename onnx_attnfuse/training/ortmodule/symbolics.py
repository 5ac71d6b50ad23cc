"""How ORTModule exports two operators of PyTorch that are exported otherwise in a form which it cannot train.

`scaled_dot_product_attention` is decomposed by PyTorch's exporter for inference: it drops nothing where it should, has no
gradient where it drops, knows no grouped heads and with PyTorch 2.4 no scale, and leaves NaN in the gradients of rows without a
key where eager gives zeros. Here it is decomposed as eager computes it, forward and backward, and fused like any other attention.

`unflatten` has its axis computed at run time, at which ONNX Runtime's shape inference fails; `torch.nn.MultiheadAttention` uses
it.

Both are registered with ORTModule, which hands them to the exporter each time that it wraps a module, after its own. Modules in
which nothing is fused are exported as they were.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from onnx_attnfuse.kernels.policy import Policy

_REGISTRY = "onnxruntime.training.ortmodule._custom_op_symbolic_registry"
_END = 2**63 - 1


def register(opset: int, policy: Callable[[], Policy | None]) -> None:
    """Registers how both are exported from now on.

    Args:
        opset: The opset that modules are exported with.
        policy: The policy of the module that is being exported; None if nothing is fused in it.
    """
    exporter: Any = importlib.import_module("torch.onnx")
    registry: Any = importlib.import_module(_REGISTRY).CustomOpSymbolicRegistry
    for name, symbolic in (("scaled_dot_product_attention", _attention), ("unflatten", _unflatten)):
        theirs = registry._SYMBOLICS.get(f"::{name}")
        chosen = _chosen(symbolic, theirs or _pytorchs(name), policy)
        registry.register(name, "", chosen)
        exporter.register_custom_op_symbolic(f"aten::{name}", symbolic, opset)


def _chosen(ours: Callable[..., Any], before: Callable[..., Any], policy: Callable[[], Policy | None]) -> Callable[..., Any]:
    """The symbolic function that asks, each time, whose module is exported."""

    @functools.wraps(before)
    def export(graph: Any, *inputs: Any) -> Any:
        asked = policy()
        return before(graph, *inputs) if asked is None else ours(asked, before, graph, *inputs)

    return export


def _pytorchs(name: str) -> Any:
    return getattr(importlib.import_module(f"torch.onnx.symbolic_opset{14 if name.startswith('scaled') else 13}"), name)


def _helper() -> Any:
    return importlib.import_module("torch.onnx.symbolic_helper")


def _attention(
    policy: Policy,
    before: Callable[..., Any],
    graph: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout: Any = 0.0,
    causal: Any = False,
    scale: Any = None,
    grouped: Any = False,
) -> Any:
    """`scaled_dot_product_attention`; its parameters are those of the operator."""
    del policy, before
    helper = _helper()
    share = float(helper._maybe_get_const(dropout, "f"))
    is_causal = bool(helper._maybe_get_const(causal, "b"))
    masked = not helper._is_none(mask)
    if helper._maybe_get_const(grouped, "b"):
        key, value = (_repeated(graph, item, query) for item in (key, value))
    known = _as_value(graph, scale, query)
    product = _pytorchs("scaled_dot_product_attention")(graph, query, key, value, None, 0.0, is_causal, known)
    weights = next(product.node().inputs())
    if masked:
        weights = _masked(graph, next(weights.node().inputs()), mask, query)
    if share:
        symbolic: Any = importlib.import_module("torch.onnx.symbolic_opset12")
        weights = symbolic.dropout(graph, weights, share, True)
    return graph.op("MatMul", weights, value) if masked or share else product


def _as_value(graph: Any, scale: Any, query: Any) -> Any:
    """A scale that is a number as a value which the exporter of PyTorch 2.4 does not take for one: it fails on numbers."""
    number = None if scale is None else _helper()._maybe_get_const(scale, "f")
    if not isinstance(number, float):
        return scale
    torch: Any = importlib.import_module("torch")
    scalars: Any = torch.onnx.JitScalarType
    dtype = scalars.from_value(query, scalars.FLOAT).dtype()
    return graph.op("Identity", graph.op("Constant", value_t=torch.tensor(number, dtype=dtype)))


def _masked(graph: Any, scores: Any, mask: Any, query: Any) -> Any:
    """The weights of masked scores, in the type of queries; rows without a key are zeros where eager gives zeros, else NaN."""
    torch: Any = importlib.import_module("torch")
    scalars: Any = torch.onnx.JitScalarType
    is_bool = scalars.from_value(mask) == scalars.BOOL
    dtypes = [scalars.from_value(value, scalars.FLOAT).dtype() for value in (query, query if is_bool else mask)]
    zero, nothing, low = (
        graph.op("Constant", value_t=torch.tensor(number, dtype=dtype))
        for number, dtype in zip((0.0, 0.0, -torch.inf), (*dtypes, dtypes[1]), strict=True)
    )
    if not gives_zeros():
        bias = graph.op("Where", mask, nothing, low) if is_bool else mask
        return graph.op("Softmax", graph.op("Add", scores, bias), axis_i=-1)
    sees = _any(graph, mask if is_bool else graph.op("Not", graph.op("Equal", mask, low)))
    if is_bool:
        bias = graph.op("Where", graph.op("Or", mask, graph.op("Not", sees)), nothing, low)
    else:
        bias = graph.op("Where", sees, mask, nothing)
    return graph.op("Where", sees, graph.op("Softmax", graph.op("Add", scores, bias), axis_i=-1), zero)


def _any(graph: Any, values: Any) -> Any:
    """Whether a value of the last axis is true; the axis stays, of length 1."""
    torch: Any = importlib.import_module("torch")
    numbers = graph.op("Cast", values, to_i=torch.onnx.TensorProtoDataType.INT32)
    if graph.opset >= 18:
        most = graph.op("ReduceMax", numbers, graph.op("Constant", value_t=torch.tensor([-1])), keepdims_i=1)
    else:
        most = graph.op("ReduceMax", numbers, axes_i=[-1], keepdims_i=1)
    return graph.op("Cast", most, to_i=torch.onnx.TensorProtoDataType.BOOL)


@functools.cache
def gives_zeros() -> bool:
    """Whether the PyTorch that is installed gives zeros for a row without a key; before 2.5 it gives NaN."""
    torch: Any = importlib.import_module("torch")
    attend = torch.nn.functional.scaled_dot_product_attention
    ones, never = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return bool((attend(ones, ones, ones, attn_mask=never) == 0).all())


def _repeated(graph: Any, item: Any, query: Any) -> Any:
    """Keys or values with as many heads as the queries have: each is repeated in its place."""
    torch: Any = importlib.import_module("torch")
    helper = _helper()
    heads, groups = (helper._get_tensor_dim_size(value, -3) for value in (query, item))
    rank = helper._get_tensor_rank(item)
    if heads is None or groups is None or rank is None:
        return helper._unimplemented("scaled_dot_product_attention", "enable_gqa with an unknown number of heads")
    shape = graph.op("Shape", item)
    before, after = _slice(graph, shape, 0, rank - 3), _slice(graph, shape, rank - 2, _END)
    number, count, total = (graph.op("Constant", value_t=torch.tensor([size])) for size in (groups, heads // groups, heads))
    place = graph.op("Constant", value_t=torch.tensor([rank - 2]))
    spread = graph.op("Concat", before, number, count, after, axis_i=0)
    repeated = graph.op("Expand", graph.op("Unsqueeze", item, place), spread)
    return graph.op("Reshape", repeated, graph.op("Concat", before, total, after, axis_i=0))


def _unflatten(policy: Policy, before: Callable[..., Any], graph: Any, item: Any, axis: Any, sizes: Any) -> Any:
    """`unflatten`, its axis as a constant where it is one."""
    del policy
    helper = _helper()
    place, rank = helper._maybe_get_const(axis, "i"), helper._get_tensor_rank(item)
    if not isinstance(place, int) or rank is None:
        return before(graph, item, axis, sizes)
    shape, place = graph.op("Shape", item), place % rank
    parts = [_slice(graph, shape, 0, place)] if place else []
    parts.append(sizes)
    parts += [_slice(graph, shape, place + 1, _END)] if place < rank - 1 else []
    return graph.op("Reshape", item, graph.op("Concat", *parts, axis_i=0) if len(parts) > 1 else sizes)


def _slice(graph: Any, shape: Any, start: int, end: int) -> Any:
    torch: Any = importlib.import_module("torch")
    return graph.op("Slice", shape, *(graph.op("Constant", value_t=torch.tensor([place])) for place in (start, end)))
