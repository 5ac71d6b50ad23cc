"""The CPU provider of ONNX Runtime: a flash kernel without masks in float32, and a math kernel that takes everything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import FLOATS_TO_32
from onnx_attnfuse.kernels.conditions import AttentionParams, masks, not_capped, not_causal, only
from onnx_attnfuse.kernels.execution_provider import ANY_MASK, ExecutionProvider, Kernels, OpSupport, Settings, Switching
from onnx_attnfuse.reasons import Reason

_FLOAT = ir.DataType.FLOAT
_BOTH = frozenset([_FLOAT, ir.DataType.FLOAT16])
_SOURCE = (
    "kernel sources of ONNX Runtime 1.31 (docs/targets.md), times measured on one core (benchmarks/results/attention_cpu.md)"
)
_MATH: Kernels = (("MATH", ()),)
_FEW_SCORES, _FEW_TIMES = 256 * 256, 0.8
"""Up to so many queries times keys ai.onnx Attention is that much faster (benchmarks/results/attention_cpu.md)."""
_NARROW, _WORTHWHILE, _BLOCKS_COST = 256, 0.9, 1.2
"""Blocks are for windows up to this many keys where lengths are open, else from so much less time on; what they take for each
key (benchmarks/results/windows_cpu.md)."""
_FLASH_OFF = Settings(environment={"ORT_DISABLE_FLASH_ATTENTION": "1", "ORT_GQA_DISABLE_FLASH_ATTENTION": "1"})


def _always(flash: float, other: float) -> Callable[[AttentionParams, str], float]:
    """Times of the two kernels, whatever the sizes are."""
    return lambda params, kernel: flash if kernel == "FLASH_ATTENTION" else other


def _blocks_time(params: AttentionParams) -> float:
    """The time of attention in blocks: by the share of keys that is left, or by the window alone where lengths are open."""
    if params.band is None or params.dtype != _FLOAT or params.rows == 1:
        return math.inf
    if not isinstance(params.columns, int):
        return 1.0 if params.band <= _NARROW else math.inf
    share = _BLOCKS_COST * (params.band + max(64, (params.band + 1) // 2)) / params.columns
    return 1.1 * share if share < _WORTHWHILE else math.inf


def _standard_time(params: AttentionParams, kernel: str) -> float:
    del kernel
    few = isinstance(params.rows, int) and isinstance(params.columns, int) and params.rows * params.columns <= _FEW_SCORES
    return 1.1 * (_FEW_TIMES if few else 1.0)


_ANY = OpSupport(
    _SOURCE,
    _BOTH,
    _BOTH,
    _MATH,
    ANY_MASK,
    causal=True,
    keys_by_head=True,
    broadcasts_bias=True,
    rotates_inside=True,
    math_is_safe=True,
)
_OPERATORS: Mapping[str, OpSupport | Reason | None] = {
    "MultiHeadAttention": dataclasses.replace(
        _ANY,
        written=FLOATS_TO_32,
        kernels=(("FLASH_ATTENTION", (only(_FLOAT), masks("none"), not_causal)), *_MATH),
        time=_always(1.0, 1.1),
        blocks_time=_blocks_time,
        cached_times={"none": (4.4, 1.44), "bias": (4.4, 1.44)},
        ungrouped=0.45,
    ),
    "GroupQueryAttention": dataclasses.replace(
        _ANY,
        kernels=(("FLASH_ATTENTION", (only(_FLOAT), not_capped)), *_MATH),
        bias_beside_lengths=True,
        wide_heads=True,
        reads_without_new_keys_from=(1, 31),
        counts_rows_from=(1, 32),
        evicts_from=(1, 32),
        caches={"int8": (), "int4": ()},
        time=_always(1.1, 1.1),
        cached_times={"none": (1.7, 1.37), "bias": (1.6, 1.47)},
    ),
    "onnx.Attention": dataclasses.replace(
        _ANY, written=frozenset([_FLOAT]), time=_standard_time, cached_times={"none": (1.35, 1.06), "bias": (1.35, 1.06)}
    ),
    "Attention": dataclasses.replace(_ANY, by_default=False, timed_as="MultiHeadAttention"),
    "PackedMultiHeadAttention": None,
}
"""Cached times are milliseconds for one new position and for many, four heads sharing keys and values: one attention on one core
in float32, N=32 H=64, P=2048 and S=128."""
PROVIDER = ExecutionProvider(
    name="cpu",
    ort_name="CPUExecutionProvider",
    distribution="onnxruntime",
    known_from="measured with ONNX Runtime 1.28 to 1.31 (docs/decisions/0003, docs/decisions/0005, benchmarks/results)",
    operators=_OPERATORS,
    session_options=frozenset(),
    rounds_float16=False,
    keeps_nan_rows=True,
    takes_if=True,
    keeps_fused=True,
    rotates=True,
    shares_cache=True,
    pays=frozenset(
        [
            "quotients",
            "separate-norm",
            "repeated-heads",
            "packed-operands",
            "position-tables",
            "roundings-first",
            "experts",
            "single-experts",
            "packed-rows",
            "one-matrix",
        ]
    ),
    switching=Switching(
        kernels=frozenset(["FLASH_ATTENTION"]),
        settings=lambda arch, off: _FLASH_OFF,
        alone=lambda arch: {"math": Settings(environment={"ORT_DISABLE_FLASH_ATTENTION": "1"})},
        is_safe=True,
    ),
)
"""attnfuse writes no SkipLayerNormalization, which takes four to seven times as long as a sum and its normalization, and no
SkipSimplifiedLayerNormalization, up to twice (docs/decisions/0026). Few kernels take float16: ONNX Runtime computes attention
in float32 without conversions in between, so a score plus -65504 keeps the score, which a GPU rounds away."""
