"""What kernels ask of a problem.

Every condition is one small function that gives a `Reason`, what it needs of sizes that are not known, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim
from onnx_attnfuse.reasons import Reason

MaskForm = Literal["none", "lengths", "ranges", "bias", "raw"]
"""How a mask is handed over: not at all, as (b) lengths, as (3b+2) lengths and offsets, as an additive bias, or key by key as 0
and 1, which is never chosen but stands in models."""
LONG = 256
"""Queries or keys from which on the memory-efficient kernel takes what is not float16."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do."""

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
    cached: bool = False
    """Keys and values are appended to those of earlier positions, by the operator or before it."""
    grouped: bool = False
    """Several heads share keys and values, repeated before the operator if it does not know that."""
    op: str = "MultiHeadAttention"
    """The operator, `onnx.` before it if it is a standard one."""
    arch: int = 0
    any_length: bool = False
    """ONNX Runtime is told to choose kernels for short sequences too."""

    @property
    def scores(self) -> Dim:
        """How many scores there are, b·n·s·t."""
        return sizes.product([self.batch, self.heads, self.rows, self.columns])

    def settled(self, lengths: Mapping[str, int]) -> Problem:
        """The same with numbers for symbols, as far as all symbols of a size have one."""

        def settle(dim: Dim) -> Dim:
            return sizes.evaluate(dim, lengths) if sizes.symbols(dim) <= lengths.keys() else dim

        names = ("batch", "rows", "columns", "head_size", "v_head_size")
        return dataclasses.replace(self, **{name: settle(getattr(self, name)) for name in names})


@dataclasses.dataclass(frozen=True)
class Open:
    """What a kernel needs of a size that is not known, for a reader to put after `if`."""

    needs: str


_SHORT_HEADS, _LONG_HEADS = frozenset([32, 64]), frozenset([16, 32, 40, 64, 80, 128, 160, 256])
_TRT = {70: (_SHORT_HEADS, frozenset[int]())} | dict.fromkeys((75, 80, 86, 89), (_SHORT_HEADS, _LONG_HEADS))
"""The head sizes that TensorRT's kernels are made for on a card, up to 384 queries and beyond."""
Condition = Callable[[Problem], "Reason | Open | None"]


def half_precision(problem: Problem) -> Reason | None:
    """It is float16 or bfloat16."""
    if problem.dtype in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}:
        return None
    return Reason("not-half", f"takes float16 and bfloat16, not {problem.dtype.name.lower()}")


def only(dtype: ir.DataType) -> Condition:
    """It is of one type."""
    name = "float32" if dtype == ir.DataType.FLOAT else dtype.name.lower()

    def condition(problem: Problem) -> Reason | None:
        return None if problem.dtype == dtype else Reason(f"not-{name}", f"takes {name}, not {problem.dtype.name.lower()}")

    return condition


def from_arch(least: int) -> Condition:
    """The GPU is of an architecture or a newer one."""

    def condition(problem: Problem) -> Reason | None:
        if problem.arch >= least:
            return None
        return Reason("old-architecture", f"is chosen from sm{least} on, this is sm{problem.arch}")

    return condition


def head_sizes(multiple: int, most: int) -> Condition:
    """Both head sizes are multiples of a number, and not too large."""

    def condition(problem: Problem) -> Reason | None:
        for name, size in (("head size", problem.head_size), ("value head size", problem.v_head_size)):
            if not isinstance(size, int):
                return Reason("unknown-head-size", f"the {name} is not known")
            if size % multiple or size > most:
                return Reason("head-size", f"{name} {size} is no multiple of {multiple} up to {most}")
        return None

    return condition


def same_head_sizes(problem: Problem) -> Reason | None:
    """Values are as wide as queries and keys."""
    if problem.head_size == problem.v_head_size:
        return None
    return Reason("v-head-size", f"value head size {problem.v_head_size} differs from head size {problem.head_size}")


def masks(*allowed: MaskForm) -> Condition:
    """The mask is handed over in one of these forms."""
    words = {"none": "no mask", "lengths": "lengths", "ranges": "lengths with offsets", "bias": "a bias", "raw": "0 and 1"}

    def condition(problem: Problem) -> Reason | None:
        if problem.mask in allowed:
            return None
        return Reason("mask-form", f"takes {' or '.join(words[form] for form in allowed)}, and the mask is {words[problem.mask]}")

    return condition


def not_windowed(problem: Problem) -> Reason | None:
    """No window is left to the operator."""
    return Reason("window", "takes no window") if problem.windowed else None


def not_capped(problem: Problem) -> Reason | None:
    """No scores are capped, and there is no sink among them."""
    return Reason("softcap", "caps no scores and knows no sink") if problem.capped else None


def not_causal(problem: Problem) -> Reason | None:
    """No triangle is left to the operator."""
    return Reason("causal", "takes no causal attribute") if problem.causal else None


def not_causal_with_ranges(problem: Problem) -> Reason | None:
    """There is no triangle besides lengths with offsets."""
    if problem.causal and problem.mask == "ranges":
        return Reason("causal-ranges", "with offsets it aligns the triangle to the end of each length")
    return None


def aligned_bias(problem: Problem) -> Reason | Open | None:
    """A bias comes with queries that fill whole vectors."""
    multiple = 16 if problem.dtype == ir.DataType.FLOAT else 8
    if problem.mask != "bias":
        return None
    if not isinstance(problem.rows, int):
        return Open(f"the number of queries is a multiple of {multiple}")
    if problem.rows % multiple == 0:
        return None
    return Reason("bias-alignment", f"with a bias the number of queries must be a multiple of {multiple}, it is {problem.rows}")


def aligned_mask(problem: Problem) -> Reason | Open | None:
    """A mask comes with a multiple of four keys."""
    if problem.mask != "bias":
        return None
    if not isinstance(problem.columns, int):
        return Open("the number of keys is a multiple of 4")
    if problem.columns % 4 == 0:
        return None
    return Reason("mask-alignment", f"with a mask the number of keys must be a multiple of 4, it is {problem.columns}")


def several_with_cache(problem: Problem) -> Reason | Open | None:
    """More than one new query, where there is a cache."""
    if not problem.cached:
        return None
    if not isinstance(problem.rows, int):
        return Open("there are several new queries")
    return None if problem.rows > 1 else Reason("one-query", "takes no single query on top of a cache")


def from_rows(least: int) -> Condition:
    """There are so many queries or more."""

    def condition(problem: Problem) -> Reason | Open | None:
        if not isinstance(problem.rows, int):
            return Open(f"there are {least} queries")
        return None if problem.rows >= least else Reason("short", f"is chosen from {least} queries on, there are {problem.rows}")

    return condition


def preferred_from_rows(least: int) -> Condition:
    """There are so many queries or more, or ONNX Runtime is told not to look at that."""
    least_rows = from_rows(least)

    def condition(problem: Problem) -> Reason | Open | None:
        return None if problem.any_length else least_rows(problem)

    return condition


def up_to_rows(most: int) -> Condition:
    """There are so many queries or fewer."""

    def condition(problem: Problem) -> Reason | Open | None:
        if not isinstance(problem.rows, int):
            return Open(f"there are {most} queries or fewer")
        return None if problem.rows <= most else Reason("long", f"is chosen up to {most} queries, there are {problem.rows}")

    return condition


def on_archs(*archs: int) -> Condition:
    """The GPU is of one of these architectures."""

    def condition(problem: Problem) -> Reason | None:
        return None if problem.arch in archs else Reason("architecture", f"is not there for sm{problem.arch}")

    return condition


def head_size_among(*allowed: int) -> Condition:
    """The heads are of one of these sizes."""

    def condition(problem: Problem) -> Reason | None:
        if problem.head_size in allowed:
            return None
        return Reason("head-size", f"head size {problem.head_size} is none of {', '.join(map(str, allowed))}")

    return condition


def not_brain(problem: Problem) -> Reason | None:
    """It is not bfloat16."""
    return Reason("bfloat16", "takes no bfloat16") if problem.dtype == ir.DataType.BFLOAT16 else None


def long_unless_float16(problem: Problem) -> Reason | Open | None:
    """There are many queries or keys, or it is float16, or ONNX Runtime is told not to look at that."""
    if problem.dtype == ir.DataType.FLOAT16 or problem.any_length:
        return None
    known = [size for size in (problem.rows, problem.columns) if isinstance(size, int)]
    if max(known, default=0) >= LONG:
        return None
    if len(known) < 2:
        return Open(f"there are {LONG} queries or keys")
    return Reason("short", f"in {problem.dtype.name.lower()} it is chosen from {LONG} queries or keys on")


def fused_by_trt(problem: Problem) -> Reason | Open | None:
    """TensorRT has a kernel for so many queries of such heads."""
    short, long = (problem.head_size in heads for heads in _TRT.get(problem.arch, ((), ())))
    if (short and long) or (isinstance(problem.rows, int) and (long if problem.rows > 384 else short)):
        return None
    if (short or long) and not isinstance(problem.rows, int):
        return Open(f"there are {'up to' if short else 'more than'} 384 queries")
    return Reason("no-trt-kernel", f"TensorRT has none for sm{problem.arch}, head size {problem.head_size} and so many queries")
