"""The CUDA provider of ONNX Runtime: kernels by operator and architecture, their times on an H200, and how they are switched off.

The conditions of kernels are those of ONNX Runtime 1.31; docs/targets.md has the measurements. The provider option
`sdpa_kernel` applies to one session, an environment variable to the whole process. So attnfuse uses the option if it can express
the choice. The option also removes minimum lengths of kernels, and with it cuDNN's kernel is no longer preferred on sm90 and
newer (docs/policy.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import onnx_ir as ir

from onnx_attnfuse.graph.dtypes import FLOATS_TO_32, HALVES
from onnx_attnfuse.kernels import gpus
from onnx_attnfuse.kernels.capture import CAPTURE
from onnx_attnfuse.kernels.conditions import (
    MOST_SCORES,
    AttentionParams,
    MaskForm,
    aligned_bias,
    aligned_mask,
    from_arch,
    from_rows,
    fused_by_trt,
    half_precision,
    head_size_among,
    head_sizes,
    long_unless_float16,
    masks,
    not_brain,
    not_capped,
    not_causal,
    not_causal_with_ranges,
    not_sunk,
    not_windowed,
    on_archs,
    only,
    preferred_from_rows,
    same_head_sizes,
    several_with_cache,
    up_to_rows,
)
from onnx_attnfuse.kernels.execution_provider import ANY_MASK, ExecutionProvider, Kernels, OpSupport, Settings, Switching
from onnx_attnfuse.reasons import Reason

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_MEASURED = "measured on an H200 with ONNX Runtime 1.31 (docs/targets.md, benchmarks/results/forms_h200.md)"
_READ = "kernel sources of ONNX Runtime 1.31, not measured"

# Kernels
_CUDNN_TAKES = (from_arch(90), half_precision, head_sizes(8, 256), masks("none", "lengths", "bias"))
_UNMASKED = (masks("none"), same_head_sizes, head_sizes(8, 256))
_EFFICIENT_TAKES = (
    masks("none", "ranges", "bias"),
    head_sizes(8, 1024),
    not_causal_with_ranges,
    aligned_bias,
    long_unless_float16,
)
_TENSORRT_TAKES = (only(_HALF), not_causal, masks("none", "lengths"), same_head_sizes)
_LONG_HEADS = head_size_among(16, 32, 40, 64, 80, 128, 160, 256)
_MULTI_HEAD: Kernels = (
    ("CUDNN_FLASH_ATTENTION", _CUDNN_TAKES),
    ("FLASH_ATTENTION", (from_arch(80), only(_HALF), *_UNMASKED)),
    ("EFFICIENT_ATTENTION", _EFFICIENT_TAKES),
    ("MATH", ()),
)
_STANDARD: Kernels = (
    ("FLASH_ATTENTION", (from_arch(80), half_precision, *_UNMASKED)),
    ("EFFICIENT_ATTENTION", (head_sizes(8, 1024), aligned_mask, several_with_cache)),
    ("MATH", ()),
)
_PROJECTED: Kernels = (
    ("CUDNN_FLASH_ATTENTION", _CUDNN_TAKES),
    ("FLASH_ATTENTION", (from_arch(80), half_precision, *_UNMASKED, preferred_from_rows(513))),
    ("TRT_FLASH_ATTENTION", (on_archs(75, 80, 86, 89), *_TENSORRT_TAKES, _LONG_HEADS, from_rows(385))),
    ("TRT_FUSED_ATTENTION", (on_archs(70, 75, 80, 86, 89), *_TENSORRT_TAKES, head_size_among(32, 64), up_to_rows(384))),
    ("EFFICIENT_ATTENTION", (not_brain, *_EFFICIENT_TAKES)),
    ("MATH", ()),
)
_GROUPED: Kernels = (
    ("CUDNN_FLASH_ATTENTION", (from_arch(90), not_windowed, not_capped, head_sizes(8, 256))),
    ("FLASH_ATTENTION", (from_arch(80), head_sizes(8, 256))),
    ("EFFICIENT_ATTENTION", (head_sizes(8, 1024),)),
    ("MATH", ()),
)
_PACKED: Kernels = (
    ("FLASH_ATTENTION", (from_arch(80), only(_HALF), *_UNMASKED)),
    ("TRT_FUSED_ATTENTION", (only(_HALF), masks("none"), same_head_sizes, fused_by_trt)),
    ("EFFICIENT_ATTENTION", (masks("none", "bias"), head_sizes(8, 1024), aligned_bias, long_unless_float16)),
    ("MATH", ()),
)

# Times
_TIMES: Mapping[tuple[bool, str], Mapping[MaskForm, float]] = {
    (True, "CUDNN_FLASH_ATTENTION"): {"none": 1.0, "lengths": 0.9, "bias": 1.85},
    (True, "FLASH_ATTENTION"): {"none": 1.55},
    (True, "EFFICIENT_ATTENTION"): {"none": 3.5, "ranges": 2.75, "bias": 4.9},
    (True, "MATH"): {"none": 16.6, "lengths": 15.5, "bias": 18.9, "raw": 18.9},
    (False, "EFFICIENT_ATTENTION"): {"none": 12.3, "ranges": 9.7, "bias": 14.4},
    (False, "MATH"): dict.fromkeys(("none", "lengths", "bias", "raw"), 17.6),
}
"""Milliseconds for twelve layers on an H200, B=8 S=T=1024 N=16 H=64, by (half precision, kernel) and form of the mask; lengths
are halfway between a batch without padding and one of which half is padding (benchmarks/results/forms_h200.md)."""
_PACKED_TIMES: Mapping[bool, Mapping[str, float]] = {
    True: {"FLASH_ATTENTION": 0.9, "TRT_FUSED_ATTENTION": 1.2, "EFFICIENT_ATTENTION": 2.2, "MATH": 9.4},
    False: {"EFFICIENT_ATTENTION": 7.5, "MATH": 10.9},
}
"""Milliseconds for PackedMultiHeadAttention, from the same kernels; measured in whole models only
(benchmarks/results/whole_forms_h200.md)."""
_CAUSAL = 0.7
"""Share of these times that is left with the causal attribute."""
_WINDOWED = 0.7
"""Share of these times that is left with a window."""
_WIDER: tuple[tuple[int, float, float], ...] = ((64, 1.0, 1.0), (128, 1.6, 1.1), (1 << 30, 3.2, 1.7))
"""Up to a head size, how much longer the memory-efficient kernel takes in float32, and the decomposed attention."""
_UNFUSED = {True: 5.1, False: 8.5}
"""Milliseconds for the same layers decomposed, by half precision; float32 is computed as TensorFloat32."""
_MASKED, _GUARDED = 1.65, 2.4
"""How much longer that takes with a mask, and with a guard against NaN besides."""
_TENSOR_FLOAT_32 = 80
_WITH_PROJECTIONS = 0.85
"""Share of the time left with the projections inside, on an H200 in half precision: 0.5 to 0.97 (benchmarks/results)."""
_STANDARD_LONGER = 2.0
"""How much longer ai.onnx Attention takes: 1.7 with a triangle, 2.5 with a mask, at B=4 S=2048 N=32 H=128."""
_CACHE_WRITTEN, _MANY = 2.4, 1 << 26
"""Additional time of GroupQueryAttention, as it writes a cache also where there is none; twice as much below so many scores."""


def _multi_head_time(params: AttentionParams, kernel: str) -> float:
    half = params.dtype != _FLOAT
    spared = _CAUSAL if params.causal and kernel != "MATH" else 1.0
    wider = 1.0 if half or kernel == "MATH" else _wider(params)[0]
    return spared * wider * _TIMES[half, kernel][params.mask]


def _standard_time(params: AttentionParams, kernel: str) -> float:
    return _multi_head_time(params, kernel) * _STANDARD_LONGER


def _packed_time(params: AttentionParams, kernel: str) -> float:
    return _PACKED_TIMES[params.dtype != _FLOAT][kernel]


def _grouped_time(params: AttentionParams, kernel: str) -> float:
    small = isinstance(params.scores, int) and params.scores < _MANY
    window = _WINDOWED if params.windowed else 1.0
    return _multi_head_time(params, kernel) * window + _CACHE_WRITTEN * (2 if small else 1)


def _share_with_projections(params: AttentionParams) -> float:
    """The share of the time that is left with the projections inside: all of it, but where less was measured."""
    return _WITH_PROJECTIONS if params.dtype != _FLOAT and params.mask != "bias" and not params.causal else 1.0


def _wider(params: AttentionParams) -> tuple[float, float]:
    size = params.head_size if isinstance(params.head_size, int) else 0
    return next((fused, unfused) for most, fused, unfused in _WIDER if size <= most)


def _unfused_time(params: AttentionParams, arch: int, guarded: bool) -> float:
    half = params.dtype != _FLOAT
    if params.cached or (not half and arch < _TENSOR_FLOAT_32):
        return math.inf
    masked = params.causal or params.mask != "none"
    return _UNFUSED[half] * _wider(params)[1] * (_GUARDED if masked and guarded else _MASKED if masked else 1.0)


def _math_fails(params: AttentionParams) -> Reason | None:
    """Why the math kernel of MultiHeadAttention and Attention cannot compute an attention, or None."""
    if isinstance(params.scores, int) and params.scores >= MOST_SCORES:
        return Reason("too-many-scores", f"the math kernel ends the process at {params.scores} scores, 2^31 or more")
    if params.mask == "ranges":
        return Reason("ranges-ignored", "the math kernel does not look at lengths with offsets")
    if params.mask == "lengths" and params.causal and not (isinstance(params.columns, int) and params.columns <= 1024):
        return Reason("causal-lengths", "the math kernel takes no lengths with the causal attribute beyond 1024 keys")
    return None


# Switches
_CUDNN, _CUDNN_PREFERRED = "CUDNN_FLASH_ATTENTION", 90
_BITS: Mapping[str, int] = {
    "FLASH_ATTENTION": 1,
    "EFFICIENT_ATTENTION": 2,
    "TRT_FUSED_ATTENTION": 4,
    _CUDNN: 8,
    "MATH": 16,
    "TRT_FLASH_ATTENTION": 32,
    "TRT_CROSS_ATTENTION": 64,
    "DECODER_ATTENTION": 512,
}
"""The summands of `sdpa_kernel`."""
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "FLASH_ATTENTION": {"ORT_DISABLE_FLASH_ATTENTION": "1"},
    "EFFICIENT_ATTENTION": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"},
    "TRT_FUSED_ATTENTION": {"ORT_DISABLE_FUSED_ATTENTION": "1", "ORT_DISABLE_FUSED_CROSS_ATTENTION": "1"},
    "TRT_FLASH_ATTENTION": {"ORT_DISABLE_TRT_FLASH_ATTENTION": "1"},
    _CUDNN: {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"},
}
"""The variables that switch a kernel off."""
_ANY_LENGTH = {"ORT_MIN_SEQ_LEN_FLASH_ATTENTION_PACKED_QKV": "0", "ORT_MIN_SEQ_LEN_EFFICIENT_ATTENTION_FP32": "0"}
_TENSORRT_ARCHS = frozenset([75, 80, 86, 89])


def _settings(arch: int, off: frozenset[str]) -> Settings:
    if arch >= _CUDNN_PREFERRED and _CUDNN not in off:
        switched = {name: value for kernel in sorted(off) for name, value in _VARIABLES[kernel].items()}
        return Settings(environment=switched | _ANY_LENGTH)
    return Settings({"sdpa_kernel": str(sum(bit for name, bit in _BITS.items() if _is_on(name, off)))})


def _is_on(kernel: str, off: frozenset[str]) -> bool:
    """Whether `sdpa_kernel` names a kernel; cuDNN's is off where it is not preferred, and would be preferred nowhere."""
    if kernel == "TRT_CROSS_ATTENTION":
        return "TRT_FUSED_ATTENTION" not in off
    return kernel not in off and kernel != _CUDNN


def _alone(arch: int) -> Mapping[str, Settings]:
    tensorrt = {"tensorrt": 4 + 32 + 64} if arch in _TENSORRT_ARCHS else {}
    return {name: Settings({"sdpa_kernel": str(bits)}) for name, bits in {"flash": 1, **tensorrt, "efficient": 2}.items()}


_FOR_IF = {"use_ep_level_unified_stream": "1"}
"""Spares 77 MB for each branch that runs (docs/decisions/0018)."""


def _option_words(name: str, value: str) -> str:
    if name in _FOR_IF:
        return "the branches of If share one stream, and its memory"
    return ", ".join(kernel for kernel, bit in _BITS.items() if int(value) & bit)


def _architecture_here() -> int | None:
    """The compute capability of the first GPU."""
    found = gpus.installed()
    return found[0].arch if found else None


_ANY = OpSupport(
    _MEASURED,
    FLOATS_TO_32,
    FLOATS_TO_32,
    masks=ANY_MASK,
    causal=True,
    keys_by_head=True,
    broadcasts_bias=True,
    rotates_inside=True,
)
_OPERATORS: Mapping[str, OpSupport | Reason | None] = {
    "MultiHeadAttention": dataclasses.replace(
        _ANY,
        kernels=_MULTI_HEAD,
        packed_inputs=True,
        time=_multi_head_time,
        cached_times={"none": (1.71, 0.4), "bias": (1.71, 0.47)},
        ungrouped=0.45,
        math_fails=_math_fails,
        math_is_safe=False,
    ),
    "GroupQueryAttention": dataclasses.replace(
        _ANY,
        runs=HALVES,
        written=HALVES,
        kernels=_GROUPED,
        caches={"int8": (not_sunk,), "float8": (from_arch(89), not_sunk)},
        time=_grouped_time,
        cached_times={"none": (0.53, 0.25), "bias": (0.74, 0.99)},
    ),
    "onnx.Attention": dataclasses.replace(
        _ANY,
        kernels=_STANDARD,
        time=_standard_time,
        cached_times={"none": (0.6, 0.27), "bias": (0.82, 0.58)},
        math_is_safe=True,
    ),
    "Attention": dataclasses.replace(
        _ANY,
        known_from=f"{_READ}; shares of times measured on an H200",
        kernels=_PROJECTED,
        timed_as="MultiHeadAttention",
        share=_share_with_projections,
        math_fails=_math_fails,
        math_is_safe=False,
    ),
    "PackedMultiHeadAttention": dataclasses.replace(
        _ANY,
        known_from=_READ,
        runs=frozenset([_FLOAT, _HALF]),
        written=frozenset([_FLOAT, _HALF]),
        kernels=_PACKED,
        causal=False,
        by_default=False,
        time=_packed_time,
    ),
}
"""Cached times are milliseconds for one new position and for many, four heads sharing keys and values: one attention on an H200
in half precision, N=32 H=128, B=8 P=8192 and B=8 S=512."""
PROVIDER = ExecutionProvider(
    name="cuda",
    ort_name="CUDAExecutionProvider",
    distribution="onnxruntime-gpu",
    known_from="measured on an H200 with ONNX Runtime 1.31 (docs/decisions/0003, docs/decisions/0005, benchmarks/results)",
    operators=_OPERATORS,
    architectures=(70, 75, 80, 86, 89, 90, 100, 120),
    default_architecture=80,
    architecture_here=_architecture_here,
    is_preferred=True,
    memory="cuda",
    measured_with={"arena_extend_strategy": "kSameAsRequested"},
    rounds_float16=True,
    keeps_nan_rows=False,
    rotates_each_token=True,
    takes_if=True,
    keeps_fused=True,
    rotates=True,
    shares_cache=True,
    pages_from=(1, 30),
    options_for_if=_FOR_IF,
    option_words=_option_words,
    pays=frozenset(
        [
            "split-gemm",
            "roundings-first",
            "quotients",
            "skip-norm",
            "half-gelu",
            "projection-bias",
            "fewer-biases",
            "bias-after",
            "emptied-rotations",
            "own-products",
            "padded-columns",
            "shared-table",
            "packed-operands",
            "norms-inside",
            "merged-projections",
            "wide-norms",
            "split-gelu",
            "experts",
            "single-experts",
            "fused-products",
            "split-products",
            "any-by-sum",
            "whole-rotations",
            "paired-rotations",
            "rotated-rows",
        ]
    ),
    unfused_time=_unfused_time,
    switching=Switching(frozenset(_VARIABLES), _settings, _alone, narrows=True),
    capture=CAPTURE,
)
