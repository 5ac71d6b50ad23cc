"""Parts that the references share: element types, heads, and the softmax over the scores of a row."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.schemas import table

Array: TypeAlias = npt.NDArray[Any]
Results: TypeAlias = tuple[Array, ...]
_Compute = TypeVar("_Compute", bound=Callable[..., Results])
HALVES = frozenset(["float16", "bfloat16"])


class Operator(OpRun):
    """An operator as onnx's evaluator calls it, which wants the class to be called as the operator is."""

    op_domain = CONTRIB
    op_schema: ClassVar[None] = None
    """Else the evaluator would take the defaults of the standard's operator of the same name."""
    compute: ClassVar[Callable[..., Results]]

    def _run(self, *inputs: Any, **attributes: Any) -> Results:
        return self.called(*inputs, **attributes)

    @classmethod
    def called(cls, *inputs: Any, **attributes: Any) -> Results:
        """Computes the operator.

        Raises:
            NotImplementedError: An input is given, or an attribute is not at its default, that the reference does not take.
        """
        compute, schema = cls.compute, table().get((cls.op_domain, cls.__name__))
        if schema is None:
            return compute(*inputs, **attributes)
        taken = inspect.signature(compute).parameters
        most = sum(item.kind is item.POSITIONAL_OR_KEYWORD for item in taken.values())
        names = list(schema.inputs)
        unread = [names[place] for place, value in enumerate(inputs) if place >= most and value is not None]
        for name, value in attributes.items():
            known = schema.attributes.get(name)
            if name not in taken and value is not None and (known is None or not known.is_default(value)):
                unread.append(name)
        if unread:
            raise NotImplementedError(f"the reference of {cls.__name__} does not know {', '.join(unread)}")
        return compute(*inputs[:most], **{name: value for name, value in attributes.items() if name in taken})


def in_float32(compute: _Compute) -> _Compute:
    """Computes in float32 values given in half precision, and rounds the results once, as kernels do.

    Overflows are infinite, without a warning: masks are made of such numbers.
    """

    @functools.wraps(compute)
    def computed(*inputs: Any, **options: Any) -> Results:
        dtype = inputs[0].dtype
        with np.errstate(all="ignore"):
            results = compute(*map(_wide, inputs), **{name: _wide(option) for name, option in options.items()})
            return tuple(
                result.astype(dtype) if dtype.name in HALVES and result.dtype.kind == "f" else result for result in results
            )

    return cast("_Compute", computed)


def _wide(item: Any) -> Any:
    dtype = getattr(item, "dtype", None)
    return item if dtype is None or dtype.name not in HALVES else np.asarray(item, np.float32)


def places(count: int) -> Array:
    """0, 1, ... `count` - 1."""
    return np.arange(count)


def split_heads(array: Array, heads: int) -> Array:
    """(b, s, n·h) as (b, n, s, h)."""
    batch, length, width = array.shape
    return np.transpose(np.reshape(array, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def merge_heads(array: Array) -> Array:
    """(b, n, s, h) as (b, s, n·h)."""
    batch, heads, length, size = array.shape
    return np.reshape(np.transpose(array, (0, 2, 1, 3)), (batch, length, heads * size))


def scores(query: Array, key: Array, scale: float | None) -> Array:
    """Scaled scores; no scale, or 0, is one over the root of the head size."""
    factor = np.asarray(scale or 1 / math.sqrt(query.shape[-1]), query.dtype)
    return np.matmul(query, np.swapaxes(key, -1, -2)) * factor


def softmax(logits: Array) -> Array:
    """The softmax over the last axis; -inf is not seen, and a row that sees nothing is NaN."""
    powers = np.where(np.isneginf(logits), 0, np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-math.inf)))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(logits.dtype)
