"""Conditions that kernels of ONNX Runtime put on an attention.

Every condition is one small function that gives a `Reason`, the conditions on unknown sizes, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.dtypes import HALVES, type_name
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason

MaskForm = Literal["none", "lengths", "ranges", "bias", "raw"]
"""How a mask is passed: not at all, as (b) lengths, as (3b+2) lengths and offsets, as an additive bias, or key by key as 0
and 1, which is never chosen but exists in models."""
LONG = 256
"""Queries or keys from which on the memory-efficient kernel takes types other than float16."""
MOST_SCORES = 1 << 31
"""From this many scores on, b·n·s·t, the math kernel on CUDA reads outside of its memory and ends the process."""


@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """The parameters of one attention that decide which kernel runs it."""

    dtype: ir.DataType
    batch: Dim
    heads: int
    rows: Dim
    columns: Dim
    head_size: Dim
    v_head_size: Dim
    mask: MaskForm
    causal: bool = False
    windowed: bool = False
    """Keys too far back are left out by an attribute."""
    capped: bool = False
    """Scores are capped, or there is a sink among them."""
    has_sink: bool = False
    """There is a sink among the scores, one of its own for each head or 0."""
    cached: bool = False
    """Keys and values are appended to those of earlier positions, by the operator or before it."""
    grouped: bool = False
    """Several heads share keys and values, repeated before the operator if it does not know that."""
    op: str = "MultiHeadAttention"
    """The operator, `onnx.` before it if it is a standard one."""
    band: int | None = None
    """Rows come in blocks, each with so many more keys than rows; None: all rows and all keys at once."""
    arch: int = 0
    any_length: bool = False
    """ONNX Runtime is set to choose kernels for short sequences too."""

    @property
    def scores(self) -> Dim:
        """How many scores there are, b·n·s·t."""
        return sizes.product([self.batch, self.heads, self.rows, self.columns])

    def with_lengths(self, lengths: Mapping[str, int]) -> AttentionParams:
        """The parameters with numbers in place of symbolic sizes, wherever all symbols of a size have one."""
        names = ("batch", "rows", "columns", "head_size", "v_head_size")
        return dataclasses.replace(self, **{name: sizes.resolved(getattr(self, name), lengths) for name in names})


@dataclasses.dataclass(frozen=True)
class Open:
    """A kernel's condition on a size that is not known, in words to put after `if`."""

    needs: str


_SHORT_HEADS, _LONG_HEADS = frozenset([32, 64]), frozenset([16, 32, 40, 64, 80, 128, 160, 256])
_TRT = {70: (_SHORT_HEADS, frozenset[int]())} | dict.fromkeys((75, 80, 86, 89), (_SHORT_HEADS, _LONG_HEADS))
"""The head sizes that TensorRT's kernels are made for on a card, up to 384 queries and beyond."""
Condition = Callable[[AttentionParams], "Reason | Open | None"]


def half_precision(params: AttentionParams) -> Reason | None:
    """The kernel takes float16 and bfloat16 only."""
    if params.dtype in HALVES:
        return None
    return Reason("not-half", f"takes float16 and bfloat16, not {type_name(params.dtype)}")


def only(dtype: ir.DataType) -> Condition:
    """The kernel takes one element type only."""
    name = type_name(dtype)

    def condition(params: AttentionParams) -> Reason | None:
        return None if params.dtype == dtype else Reason(f"not-{name}", f"takes {name}, not {type_name(params.dtype)}")

    return condition


def from_arch(least: int) -> Condition:
    """The GPU is of an architecture or a newer one."""

    def condition(params: AttentionParams) -> Reason | None:
        if params.arch >= least:
            return None
        return Reason("old-architecture", f"is chosen from sm{least} on, this is sm{params.arch}")

    return condition


def head_sizes(multiple: int, most: int) -> Condition:
    """A condition on head sizes, of keys and of values: multiples of a number, and not too large."""

    def condition(params: AttentionParams) -> Reason | None:
        for name, size in (("head size", params.head_size), ("value head size", params.v_head_size)):
            if not isinstance(size, int):
                return Reason("unknown-head-size", f"the {name} is not known")
            if size % multiple or size > most:
                return Reason("head-size", f"{name} {size} is no multiple of {multiple} up to {most}")
        return None

    return condition


def same_head_sizes(params: AttentionParams) -> Reason | None:
    """Values are as wide as queries and keys."""
    if params.head_size == params.v_head_size:
        return None
    return Reason("v-head-size", f"value head size {params.v_head_size} differs from head size {params.head_size}")


def masks(*allowed: MaskForm) -> Condition:
    """The mask is passed in one of these forms."""
    words = {"none": "no mask", "lengths": "lengths", "ranges": "lengths with offsets", "bias": "a bias", "raw": "0 and 1"}

    def condition(params: AttentionParams) -> Reason | None:
        if params.mask in allowed:
            return None
        return Reason("mask-form", f"takes {' or '.join(words[form] for form in allowed)}, and the mask is {words[params.mask]}")

    return condition


def not_windowed(params: AttentionParams) -> Reason | None:
    """No window is left to the operator."""
    return Reason("window", "takes no window") if params.windowed else None


def not_capped(params: AttentionParams) -> Reason | None:
    """No scores are capped, and there is no sink among them."""
    return Reason("softcap", "takes neither a soft cap nor a sink") if params.capped else None


def not_sunk(params: AttentionParams) -> Reason | None:
    """No sink is among the scores."""
    return Reason("no-sink", "takes no sink with a quantised cache") if params.has_sink else None


def not_causal(params: AttentionParams) -> Reason | None:
    """No triangle is left to the operator."""
    return Reason("causal", "takes no causal attribute") if params.causal else None


def not_causal_with_ranges(params: AttentionParams) -> Reason | None:
    """There is no triangle besides lengths with offsets."""
    if params.causal and params.mask == "ranges":
        return Reason("causal-ranges", "with offsets it aligns the triangle to the end of each length")
    return None


def aligned_bias(params: AttentionParams) -> Reason | Open | None:
    """A bias comes with queries that fill whole vectors."""
    multiple = 16 if params.dtype == ir.DataType.FLOAT else 8
    if params.mask != "bias":
        return None
    if not isinstance(params.rows, int):
        return Open(f"the number of queries is a multiple of {multiple}")
    if params.rows % multiple == 0:
        return None
    return Reason("bias-alignment", f"with a bias the number of queries must be a multiple of {multiple}, it is {params.rows}")


def aligned_mask(params: AttentionParams) -> Reason | Open | None:
    """A mask comes with a multiple of four keys."""
    if params.mask != "bias":
        return None
    if not isinstance(params.columns, int):
        return Open("the number of keys is a multiple of 4")
    if params.columns % 4 == 0:
        return None
    return Reason("mask-alignment", f"with a mask the number of keys must be a multiple of 4, it is {params.columns}")


def several_with_cache(params: AttentionParams) -> Reason | Open | None:
    """More than one new query, where there is a cache."""
    if not params.cached:
        return None
    if not isinstance(params.rows, int):
        return Open("there are several new queries")
    return None if params.rows > 1 else Reason("one-query", "takes no single query with a cache")


def from_rows(least: int) -> Condition:
    """There are so many queries or more."""

    def condition(params: AttentionParams) -> Reason | Open | None:
        if not isinstance(params.rows, int):
            return Open(f"there are {least} queries")
        return None if params.rows >= least else Reason("short", f"is chosen from {least} queries on, there are {params.rows}")

    return condition


def preferred_from_rows(least: int) -> Condition:
    """There are so many queries or more, or ONNX Runtime is set to ignore their number."""
    least_rows = from_rows(least)

    def condition(params: AttentionParams) -> Reason | Open | None:
        return None if params.any_length else least_rows(params)

    return condition


def up_to_rows(most: int) -> Condition:
    """There are so many queries or fewer."""

    def condition(params: AttentionParams) -> Reason | Open | None:
        if not isinstance(params.rows, int):
            return Open(f"there are {most} queries or fewer")
        return None if params.rows <= most else Reason("long", f"is chosen up to {most} queries, there are {params.rows}")

    return condition


def on_archs(*archs: int) -> Condition:
    """The GPU is of one of these architectures."""

    def condition(params: AttentionParams) -> Reason | None:
        return None if params.arch in archs else Reason("architecture", f"is not there for sm{params.arch}")

    return condition


def head_size_among(*allowed: int) -> Condition:
    """The heads are of one of these sizes."""

    def condition(params: AttentionParams) -> Reason | None:
        if params.head_size in allowed:
            return None
        return Reason("head-size", f"head size {params.head_size} is not one of {', '.join(map(str, allowed))}")

    return condition


def not_brain(params: AttentionParams) -> Reason | None:
    """The kernel takes no bfloat16."""
    return Reason("bfloat16", "takes no bfloat16") if params.dtype == ir.DataType.BFLOAT16 else None


def long_unless_float16(params: AttentionParams) -> Reason | Open | None:
    """The attention has many queries or keys, or is float16, or ONNX Runtime is set to allow any length."""
    if params.dtype == ir.DataType.FLOAT16 or params.any_length:
        return None
    known = [size for size in (params.rows, params.columns) if isinstance(size, int)]
    if max(known, default=0) >= LONG:
        return None
    if len(known) < 2:
        return Open(f"there are {LONG} queries or keys")
    return Reason("short", f"in {type_name(params.dtype)} it is chosen from {LONG} queries or keys on")


def fused_by_trt(params: AttentionParams) -> Reason | Open | None:
    """TensorRT has a kernel for so many queries of such heads."""
    short, long = (params.head_size in heads for heads in _TRT.get(params.arch, ((), ())))
    if (short and long) or (isinstance(params.rows, int) and (long if params.rows > 384 else short)):
        return None
    if (short or long) and not isinstance(params.rows, int):
        return Open(f"there are {'up to' if short else 'more than'} 384 queries")
    return Reason("no-trt-kernel", f"TensorRT has none for sm{params.arch}, head size {params.head_size} and so many queries")
