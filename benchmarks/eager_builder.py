"""A builder that computes at once instead of adding nodes: what the training kernels build is run by PyTorch, on any device.

It has as much of `graph.build.Builder` as `onnx_attnfuse.training.ortmodule` and `fully_masked_rows` use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnx_attnfuse.training.ortmodule.kernels import AtenCall

DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.INT64: torch.int64,
}
_NAMES = {value: key for key, value in DTYPES.items()}


class EagerFacts:
    """What is known of tensors: everything."""

    def dims(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def rank(self, value: torch.Tensor | int) -> int:
        return value.ndim if isinstance(value, torch.Tensor) else 0

    def dtype(self, value: torch.Tensor) -> ir.DataType:
        return _NAMES[value.dtype]

    def fresh(self, value: torch.Tensor, axis: int) -> int:
        return value.shape[axis]

    def copy(self, *values: Any) -> None:
        """Nothing has to be noted."""

    record = copy


class EagerBuilder:
    """Computes what it is asked to build."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.facts = EagerFacts()
        self.calls: list[str] = []

    def node(self, op: str, inputs: Sequence[Any], attributes: Mapping[str, Any] | None = None, **described: Any) -> Any:
        return _OPERATORS[op](*inputs, **(attributes or {}))

    def elementwise(self, op: str, inputs: Sequence[Any], dtype: ir.DataType | None) -> Any:
        return _OPERATORS[op](*inputs)

    def cast(self, value: torch.Tensor, dtype: ir.DataType) -> torch.Tensor:
        return value.to(DTYPES[dtype])

    def scalar(self, number: float, dtype: ir.DataType | None) -> torch.Tensor:
        kind = DTYPES[dtype or ir.DataType.FLOAT]
        info = torch.finfo(kind)
        number = max(info.min, min(info.max, number)) if math.isfinite(number) else number
        return torch.tensor(number, dtype=kind, device=self.device)

    def constant(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array, None if isinstance(array, np.ndarray) else np.int64)).to(self.device)

    def shape(self, dims: Sequence[int]) -> torch.Tensor:
        return self.constant(list(dims))

    def expand(self, value: torch.Tensor, dims: Sequence[int], where: Sequence[bool]) -> torch.Tensor:
        return value.expand(*dims).contiguous()

    def slice(self, value: torch.Tensor, axis: int, start: int, end: int) -> torch.Tensor:
        return value.narrow(axis, start, end - start).contiguous()

    def reduce(self, op: str, value: torch.Tensor, axes: Sequence[int], *, keep: bool = True) -> torch.Tensor:
        assert op == "ReduceMax"
        return value.amax(tuple(axes), keepdim=keep)

    def holds_along(self, test: torch.Tensor, axes: Sequence[int], *, keep: bool = True) -> torch.Tensor:
        return test.bool().any(tuple(axes), keepdim=keep)

    def transpose(self, value: torch.Tensor, perm: Sequence[int]) -> torch.Tensor:
        return value.permute(*perm).contiguous()

    def run(self, call: AtenCall, hint: str) -> dict[str, Any]:
        """Calls PyTorch with the arguments of a call, by their places as ONNX Runtime does.

        Raises:
            LookupError: PyTorch has no such operator, or another signature.
        """
        operator = getattr(torch.ops.aten, call.operator, None)
        schema = None if operator is None else operator.default._schema
        if schema is None or len(schema.arguments) != len(call.arguments) or len(schema.returns) != len(call.results):
            raise LookupError(f"torch {torch.__version__} has another {call.operator}")
        pairs = list(zip(schema.arguments, call.arguments.values(), strict=True))
        found = operator.default(
            *[item for slot, item in pairs if not slot.kwarg_only], **{slot.name: item for slot, item in pairs if slot.kwarg_only}
        )
        self.calls.append(call.operator)
        return dict(zip(call.results, found, strict=True))


def _pad(value: torch.Tensor, pads: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    before, after = pads.tolist()[: value.ndim], pads.tolist()[value.ndim :]
    both = [size for pair in zip(reversed(before), reversed(after), strict=True) for size in pair]
    return torch.nn.functional.pad(value, both, value=number.item())


def _scattered(value: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    found = value.clone()
    found[indices[:, 0]] = updates
    return found


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Equal": torch.eq,
    "Gather": lambda value, indices, axis: value.index_select(axis, indices.to(value.device)),
    "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le,
    "Min": torch.minimum,
    "Mod": torch.remainder,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "NonZero": lambda value: value.nonzero().T.contiguous(),
    "Not": torch.logical_not,
    "Pad": _pad,
    "Reshape": lambda value, shape: value.reshape(shape.tolist()),
    "ScatterND": _scattered,
    "Shape": lambda value: torch.tensor(value.shape, device=value.device),
    "Slice": lambda value, start, end, axis: value[int(start) : int(end)],
    "Sub": torch.sub,
    "Unsqueeze": lambda value, axes: value.unsqueeze(int(axes)),
    "Where": torch.where,
}
