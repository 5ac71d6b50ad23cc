"""Running a gradient graph by the standard's reference implementation, without ORTModule."""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnx_attnfuse.verify.references import operator
from tests.training import kernels_in_torch
from tests.training.kernels_in_torch import KERNELS
from tests.training.modules import CASES, Case

FOLDER = pathlib.Path(__file__).parent / "recorded"
SEED = 5
"""What all dropout follows from."""


def recorded(name: str) -> onnx.ModelProto:
    """The gradient graph of a case, as ORTModule built it; gradients of what is frozen, which it computes too, are taken out."""
    model = onnx.load_model_from_string(gzip.decompress((FOLDER / f"{name}.onnx.gz").read_bytes()))
    frozen = tuple(f"_original_module.{part}." for part in CASES[name].frozen)
    if not frozen:
        return model
    found = ir.from_proto(model)
    for value in [value for value in found.graph.outputs if (value.name or "").startswith(frozen)]:
        found.graph.outputs.remove(value)
    RemoveUnusedNodesPass()(found)
    return ir.to_proto(found)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of training: the result, and the gradients by the names of the parameters."""

    result: np.ndarray
    gradients: dict[str, np.ndarray]


def cotangent(shape: Any) -> np.ndarray:
    """The gradient of the result: the same for graph and module."""
    return np.random.default_rng(3).standard_normal(tuple(shape)).astype(np.float32)


def eager(case: Case) -> Step:
    """A step of the module itself, by PyTorch."""
    dtype = torch.float64 if case.double else torch.float32
    module = case.module().to(dtype)
    inputs = {name: item if item.dtype == torch.bool else item.to(dtype) for name, item in case.inputs().items()}
    with sdpa_kernel(SDPBackend.MATH):
        result = module(**inputs)
        result.backward(torch.from_numpy(cotangent(result.shape)).to(dtype))
    grads = {name: item.grad.numpy() for name, item in module.named_parameters() if item.grad is not None}
    return Step(result.detach().numpy(), grads)


def evaluated(model: onnx.ModelProto, case: Case) -> Step:
    """A step of a gradient graph."""
    feeds = {name: item.numpy() for name, item in case.inputs().items()}
    feeds |= {f"_original_module.{name}": item.detach().numpy() for name, item in case.module().named_parameters()}
    feeds |= buffers_of(case)
    wanted = {item.name for item in model.graph.input}
    results, found = run(model, {name: feeds[name] for name in wanted})
    named = zip((item.name for item in model.graph.output), found, strict=True)
    grads = {name.removeprefix("_original_module.").removesuffix("_grad"): array for name, array in named}
    return Step(results[0], grads)


def buffers_of(case: Case) -> dict[str, np.ndarray]:
    """What a module's buffers hold, by the names that ORTModule gives them."""
    return {f"_original_module.{name}": item.numpy() for name, item in case.module().named_buffers()}


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the forward part of a gradient graph yields, and its outputs."""
    results: list[np.ndarray] = []

    class YieldOp(OpRun):
        op_domain = "com.microsoft"

        def _run(self, *values, **attributes):
            results.extend(values)
            return tuple(cotangent(value.shape).astype(value.dtype) for value in values)

    ours = operator("FusedMatMul")
    operators: list[Any] = [YieldOp, ours, SoftmaxGrad_13, TanhGrad, DropoutGrad, ConcatTraining, Dropout, ATen]
    with np.errstate(all="ignore"):
        return results, list(ReferenceEvaluator(model, new_ops=operators).run(None, dict(feeds)))


class _Contrib(OpRun):
    op_domain = "com.microsoft"


class SoftmaxGrad_13(_Contrib):  # noqa: N801
    def _run(self, gradient, result, axis=-1):
        return (result * (gradient - (gradient * result).sum(axis=axis, keepdims=True)),)


class TanhGrad(_Contrib):
    def _run(self, gradient, result):
        return (gradient * (1 - result * result),)


class DropoutGrad(_Contrib):
    def _run(self, gradient, mask, ratio, training):
        return ((gradient * mask / (1 - ratio)).astype(gradient.dtype),)


class ConcatTraining(_Contrib):
    def _run(self, *values, axis=0):
        return np.concatenate(values, axis), np.asarray([item.shape[axis] for item in values], np.int64)


class Dropout(OpRun):
    op_domain = ""

    def _run(self, value, ratio=0.5, training=False, seed=None):
        kept = kernels_in_torch._kept(value.shape, float(ratio) if training else 0.0, SEED).numpy()
        return (value * kept).astype(value.dtype), kept > 0


class ATen(OpRun):
    op_domain = "org.pytorch.aten"

    def _run(self, *values, operator, cpu_input_args=(), cpu_output_args=()):
        return _called(operator, values)


def _called(operator: str, values, **attributes):
    """Calls a kernel by position, as the ATen operator does."""
    arguments = [None if item is None else _argument(item) for item in values]
    if operator in KERNELS:
        given = KERNELS[operator]
        code = given.__code__
        positional, named = arguments[: code.co_argcount], arguments[code.co_argcount :]
        keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        found = given(*positional, **dict(zip(keywords, named, strict=False)), **attributes)
    else:
        schema = getattr(torch.ops.aten, operator).default._schema.arguments
        positional = [item for item, slot in zip(arguments, schema, strict=True) if not slot.kwarg_only]
        named = {slot.name: item for item, slot in zip(arguments, schema, strict=True) if slot.kwarg_only}
        found = getattr(torch.ops.aten, operator)(*positional, **named)
    return tuple(np.empty(0, np.float32) if item is None else np.asarray(item) for item in found)


def _argument(array):
    """A tensor, or a plain number of what is a scalar."""
    array = np.asarray(array)
    return array.item() if array.ndim == 0 else torch.from_numpy(np.ascontiguousarray(array))
