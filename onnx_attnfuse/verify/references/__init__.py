"""Each fused operator as its documentation says and ONNX Runtime computes it, by its body.

    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=list(OPERATORS))

They replace the kernel where there is none, as for packed attention on the CPU, and give the result that a kernel should
have computed. Half precision is computed in float32 and rounded once. Where an operator leaves something open its body
describes the choice made here. A quantised cache is divided by a scale, rounded and cut off (`quantised`), and back again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference.op_run import OpRun

from onnx_attnfuse.bodies.fused_node import FusedNode, alone
from onnx_attnfuse.bodies.group_query_attention import PRIVATE
from onnx_attnfuse.bodies.table import BODIES, RUN, body_of
from onnx_attnfuse.graph.dtypes import largest
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.schemas import table
from onnx_attnfuse.kernels.cache_formats import FORMATS, CacheFormat
from onnx_attnfuse.kernels.operators import find
from onnx_attnfuse.reasons import Refused

Array = npt.NDArray[Any]
Results: TypeAlias = tuple[Array, ...]
_OPSET = 18
_HALF_BYTE = 4
_ZERO = 8
"""The offset of int4, so that stored numbers are not negative."""
_HALVES = frozenset(["float16", "bfloat16"])
_MASK = 3
"""The place of the mask of ai.onnx Attention."""
_ROUNDS_WITHIN = frozenset(["BiasSplitGelu"])
"""Operators whose bodies say where they round."""


class Operator(OpRun):
    """An operator of that domain; the evaluator wants its class to be called as the operator is."""

    op_domain = CONTRIB
    op_schema: ClassVar[None] = None
    """Else the evaluator would take the defaults of the standard's operator of the same name."""

    def _run(self, *inputs: Any, **attributes: Any) -> Results:
        return self.called(*inputs, **attributes)

    @classmethod
    def called(cls, *inputs: Any, **attributes: Any) -> Results:
        """Computes the operator; inputs and attributes that are left out are None."""
        raise NotImplementedError(cls.__name__)


def by_body(domain: str, op: str) -> type[Operator]:
    """The operator for onnx's evaluator."""
    return cast("type[Operator]", type(op, (_Bodied,), {"op_domain": domain}))


class _Bodied(Operator):
    @classmethod
    def called(cls, *inputs: Any, **attributes: Any) -> Results:
        """Computes the operator; rows of the first output that it leaves open are 0.

        Raises:
            ValueError: Its body cannot be written for these inputs.
        """
        check(cls.op_domain, cls.__name__, inputs)
        dtype = inputs[0].dtype
        is_half = dtype.name in _HALVES and cls.__name__ not in _ROUNDS_WITHIN
        masks = {_MASK} if not cls.op_domain else set[int]()
        arrays = [_wide(item, is_mask=place in masks) if is_half else item for place, item in enumerate(inputs)]
        with np.errstate(all="ignore"):
            results = _evaluated((cls.op_domain, cls.__name__), arrays, attributes)
            return tuple(result.astype(dtype) if is_half and result.dtype.kind == "f" else result for result in results)


def _wide(array: Array | None, *, is_mask: bool) -> Array | None:
    """An array in float32, in a mask with the lowest number as the lowest."""
    if array is None or array.dtype.name not in _HALVES:
        return array
    wide = array.astype(np.float32)
    lowest = -largest(ir.DataType.from_numpy(array.dtype))
    return np.where(wide == lowest, np.finfo(np.float32).min, wide) if is_mask else wide


def node_on(
    op: tuple[str, str], arrays: Sequence[Array | None], attributes: Mapping[str, Any], outputs: int, opset: int
) -> FusedNode:
    """The operator alone in a graph, on inputs of the types and shapes of arrays."""
    dtypes = [None if array is None else ir.DataType.from_numpy(array.dtype) for array in arrays]
    fused = alone(op, dtypes, attributes, outputs, opset)
    for value, array in zip(fused.inputs, arrays, strict=True):
        if value is not None and array is not None:
            fused.build.facts.record(value, array.shape, value.dtype)
            value.shape = ir.Shape(array.shape)
    return fused


def _evaluated(op: tuple[str, str], arrays: Sequence[Array | None], attributes: dict[str, Any]) -> list[Array]:
    from onnx.reference import ReferenceEvaluator

    given = {name: np.asarray(value).tolist() for name, value in attributes.items() if value is not None}
    fused = node_on(op, arrays, given, len(table()[op].outputs), _OPSET)
    feeds = {str(value.name): array for value, array in zip(fused.inputs, arrays, strict=True) if value is not None}
    try:
        model = _model(fused)
    except Refused as refused:
        raise ValueError(refused.reason.message) from refused
    return cast("list[Array]", ReferenceEvaluator(ir.to_proto(model), new_ops=CACHE_OPERATORS).run(None, feeds))


def _model(fused: FusedNode) -> ir.Model:
    """The body as a model.

    Raises:
        Refused: It cannot be written.
    """
    body, build = body_of(dataclasses.replace(fused, quantises=True)), fused.build
    outputs = [value for value in itertools.takewhile(lambda value: value is not None, body.values) if value is not None]
    if body.defined and body.defined[0] is not None:
        dtype = build.facts.dtype(outputs[0])
        outputs[0] = build.node("Where", [body.defined[0], outputs[0], build.scalar(0.0, dtype)], dtype=dtype)
    graph = build.graph
    graph.outputs[:] = [build.node("Identity", [value], dtype=build.facts.dtype(value), hint="output") for value in outputs]
    for value in graph.outputs:
        value.shape = None
    graph.remove(fused.node)
    graph.opset_imports[PRIVATE] = 1
    return ir.Model(graph, ir_version=9)


def check(domain: str, op: str, inputs: Sequence[Array | None]) -> None:
    """Ends where lengths, positions or places do not fit the other inputs.

    Raises:
        ValueError: They do not.
    """
    info = find(domain, op)
    roles = {} if info is None else dict(zip(info.inputs.values(), inputs, strict=False))
    query = inputs[0]
    rows = 0 if query is None or query.ndim < 2 else query.shape[-2]
    positions, table = roles.get("positions"), roles.get("cos")
    if positions is not None and table is not None and positions.size:
        last = positions.max() + (rows - 1 if positions.size == 1 and positions.ndim < 2 else 0)
        if not 0 <= positions.min() <= last < len(table):
            raise ValueError(f"positions {positions.min()} to {last}, the caches have {len(table)}")
    last, total = roles.get("last"), roles.get("total")
    if last is not None and total is not None:
        ends, longest = last.reshape(-1) + 1, int(total.reshape(-1)[0])
        counts = roles.get("rows")
        starts = ends - counts if counts is not None else 0 * ends if rows == longest else ends - rows
        fits = counts is None or 0 <= counts.min() <= counts.max() <= rows
        if starts.min() < 0 or ends.min() < 1 or ends.max() > longest or not fits:
            raise ValueError(f"lengths of {ends.tolist()}, the longest {longest}, do not fit {rows} queries")
    if info is not None and info.packed:
        _check_places({name: array for name, array in zip(info.inputs, inputs, strict=False) if array is not None}, inputs[0])


def _check_places(given: Mapping[str, Array], tokens: Array | None) -> None:
    """Ends where entries have more tokens than there are, or start elsewhere than after the one before.

    Raises:
        ValueError: They do.
    """
    assert tokens is not None
    counts = given.get("sequence_token_count")
    if counts is not None and counts.size and not 0 <= counts.min() <= counts.max() <= tokens.shape[1]:
        raise ValueError(f"{counts.tolist()} tokens do not fit {tokens.shape[1]} places")
    starts, entries = given.get("cumulative_sequence_length"), len(given.get("token_offset", ()))
    if starts is None:
        return
    if starts[0] != 0 or starts[-1] > len(tokens) or (np.diff(starts) < 0).any() or len(starts) != entries + 1:
        raise ValueError(f"{entries} entries that start at {starts.tolist()} are not of {len(tokens)} tokens")


def foreign(domain: str, op: str, reference: Callable[..., Any]) -> type[Operator]:
    """An operator for onnx's evaluator.

    Args:
        domain: Its domain.
        op: Its name.
        reference: Gives the output, or a tuple of them, from inputs as arrays (None where left out) and attributes by name.
    """

    def called(*inputs: Any, **attributes: Any) -> Results:
        found = reference(*inputs, **{name: value for name, value in attributes.items() if value is not None})
        outputs = cast("tuple[Any, ...]", found if isinstance(found, tuple) else (found,))
        dtype = next((item.dtype for item in inputs if item is not None), None)
        return tuple(_typed(np.asarray(output), dtype) for output in outputs)

    return type(op, (Operator,), {"op_domain": domain, "called": staticmethod(called)})


def _typed(output: Any, dtype: Any) -> Any:
    """Floats in the type of the first input: NumPy computes more than it is given in float64."""
    return output.astype(dtype) if dtype is not None and output.dtype.kind == "f" and dtype.kind in "fV" else output


OPERATORS: tuple[type[Operator], ...] = tuple(by_body(*key) for key in (*BODIES, *RUN))
"""The operators that have a body, for onnx's evaluator."""


def operator(op: str, domain: str = CONTRIB) -> type[Operator]:
    """The reference of one operator."""
    return next(item for item in OPERATORS if (item.op_domain, item.__name__) == (domain, op))


def quantised(array: Array, scale: Array, form: CacheFormat) -> Array:
    """Keys or values (b, m, t, h) as they are stored, (b, m, t, stored).

    Args:
        array: Keys or values.
        scale: One number, or one for each channel, (1, m, 1, h).
        form: The format.
    """
    with np.errstate(all="ignore"):
        scaled = np.clip(np.asarray(array, np.float32) / scale, form.lowest, form.largest)
    if form.dtype == ir.DataType.FLOAT8E4M3FN:
        return scaled.astype(form.dtype.numpy())
    whole = np.rint(scaled).astype(np.int8)
    return whole if form.bits != _HALF_BYTE else _packed(whole)


def restored(stored: Array, scale: Array, form: CacheFormat, head_size: int) -> Array:
    """A cache dequantised, (b, m, t, h) float32."""
    numbers = stored if form.bits != _HALF_BYTE else _unpacked(stored)[..., :head_size]
    return numbers.astype(np.float32) * scale


def step(array: Array, scale: Array, form: CacheFormat) -> Array:
    """How far a number is from what it is stored as, at most, where it is within the range."""
    if form.dtype != ir.DataType.FLOAT8E4M3FN:
        return np.broadcast_to(scale / 2, array.shape)
    return np.maximum(np.abs(array) * 2.0**-4, scale * 2.0**-10)


def _packed(whole: Array) -> Array:
    """Two numbers in each byte, the first in its lower half."""
    raised = (whole + _ZERO).astype(np.uint8)
    if raised.shape[-1] % 2:
        raised = np.concatenate([raised, np.full_like(raised[..., :1], _ZERO)], axis=-1)
    return raised[..., ::2] | (raised[..., 1::2] << _HALF_BYTE)


def _unpacked(stored: Array) -> Array:
    pair = np.stack([stored & 0xF, stored >> _HALF_BYTE], axis=-1)
    return pair.reshape(*stored.shape[:-1], 2 * stored.shape[-1]).astype(np.int8) - _ZERO


class QuantiseCache(OpRun):
    """Keys or values as a cache of so many bits holds them, for the body of GroupQueryAttention."""

    op_domain = PRIVATE

    def _run(self, array: Array, scale: Array, *, bits: int, to: int) -> tuple[Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (quantised(array, scale, _form(bits, to)),)


class DequantiseCache(OpRun):
    """Keys or values as they are read from such a cache."""

    op_domain = PRIVATE

    def _run(self, stored: Array, scale: Array, *, bits: int, to: int, size: int) -> tuple[Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (restored(stored, scale, _form(bits, to), size),)


CACHE_OPERATORS: list[type[OpRun]] = [QuantiseCache, DequantiseCache]


def _form(bits: int, to: int) -> CacheFormat:
    """The format of a cache.

    Raises:
        ValueError: There is none like it.
    """
    for form in FORMATS.values():
        if form.bits == bits and int(form.dtype) == to:
            return form
    raise ValueError(f"there is no quantised cache of {bits} bits in {ir.DataType(to)}")
