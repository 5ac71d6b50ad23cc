"""Which kernel ONNX Runtime will run for a fused attention, why not the faster ones before it, and how long it takes.

A kernel is a name and its conditions; a device is an ordered list of kernels. The conditions are those of ONNX Runtime 1.31
(docs/targets.md says how each was measured).
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnx_attnfuse.kernels.conditions import (
    AttentionParams,
    Condition,
    MaskForm,
    Open,
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
    not_windowed,
    on_archs,
    only,
    preferred_from_rows,
    same_head_sizes,
    several_with_cache,
    up_to_rows,
)
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.reasons import Reason

FLASH = frozenset(["CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION"])
EFFICIENT = frozenset(["EFFICIENT_ATTENTION"])
TENSORRT = frozenset(["TRT_FLASH_ATTENTION", "TRT_FUSED_ATTENTION"])
MOST_SCORES = 1 << 31
"""From this many scores on, b·n·s·t, the math kernel on CUDA reads outside of its memory and ends the process."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a kernel is not chosen."""

    kernel: str
    reason: Reason


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The kernel that ONNX Runtime will run for an attention, and those that it passes over."""

    kernel: str
    refused: tuple[Refusal, ...]
    """The kernels that would have come before it."""
    needs: str | None = None
    """The condition on unknown sizes under which this kernel runs; None: it always does."""
    otherwise: Forecast | None = None
    """The forecast if the size condition in `needs` does not hold."""
    fails: Reason | None = None
    """The reason why the kernel ends with an error or ends the process; None: it does not."""
    time: float = math.inf
    """Time of the attention, only to compare encodings of a mask; infinite where the kernel fails."""

    @property
    def never_fails(self) -> bool:
        """Whether nothing that may run fails, whatever the sizes are."""
        return self.fails is None and (self.otherwise is None or self.otherwise.never_fails)

    @property
    def chain(self) -> tuple[str, ...]:
        """This kernel, and those that run where its conditions do not hold."""
        return (self.kernel, *(self.otherwise.chain if self.otherwise else ()))


@dataclasses.dataclass(frozen=True)
class Gain:
    """Expected speed-up of an attention if the caller changes an option or the dtype."""

    change: str
    kernel: str
    times: float
    """How many times as fast the attention would be, by what was measured on an H200."""


def forecast(params: AttentionParams, device: Device) -> Forecast:
    """The first kernel of the device whose conditions an attention meets, with its time."""
    found = untimed(params, device)
    return dataclasses.replace(found, time=math.inf if found.fails is not None else _forecast_time(params, found, device))


def _forecast_time(params: AttentionParams, found: Forecast, device: Device) -> float:
    """The forecast time of a kernel; with the projections inside as long as without, but where less was measured."""
    if params.op == "Attention":
        outside = forecast(dataclasses.replace(params, op="MultiHeadAttention"), device).time
        spares = device.ep == "cuda" and params.dtype != ir.DataType.FLOAT and params.mask != "bias" and not params.causal
        return outside * (_PROJECTED if spares else 1.0)
    return _time(params, found.kernel, device)


def untimed(params: AttentionParams, device: Device) -> Forecast:
    """The first kernel of the device whose conditions an attention meets, for a mask of any form; without its time."""
    switched = dataclasses.replace(params, arch=device.arch, any_length=device.switches.any_length)
    return _first(switched, _KERNELS[device.ep, params.op], (), device.switches.off)


def forecast_existing(params: AttentionParams, device: Device) -> Forecast | None:
    """The forecast, without time, for an operator that exists in a model; None where the device has no kernel for it."""
    absent = _ABSENT.get((device.ep, params.op), frozenset())
    if (device.ep, params.op) not in _KERNELS or params.dtype not in _FLOATS or params.dtype in absent:
        return None
    return untimed(params, device)


def has_kernel(op: str, device: Device, kinds: frozenset[str]) -> bool:
    """Whether an operator has a kernel of these on the device at all."""
    return any(kernel in kinds for kernel, _ in _KERNELS.get((device.ep, op), ()))


def _first(params: AttentionParams, kernels: _Kernels, refused: tuple[Refusal, ...], off: frozenset[str]) -> Forecast:
    (kernel, conditions), *rest = kernels
    answers = [answer for condition in conditions if (answer := condition(params)) is not None]
    reason = next((answer for answer in answers if isinstance(answer, Reason)), None)
    if reason is None and kernel in off:
        reason = Reason("switched-off", "is switched off")
    if reason is not None:
        return _first(params, tuple(rest), (*refused, Refusal(kernel, reason)), off)
    needs = " and ".join(answer.needs for answer in answers if isinstance(answer, Open)) or None
    otherwise = None if needs is None else _first(params, tuple(rest), (), off)
    return Forecast(kernel, refused, needs, otherwise, _failing(params) if kernel == "MATH" else None)


def _failing(params: AttentionParams) -> Reason | None:
    """What the math kernel on CUDA cannot do; it is the last one, so what it cannot do fails."""
    if params.arch == 0 or params.op not in {"MultiHeadAttention", "Attention"}:
        return None
    if isinstance(params.scores, int) and params.scores >= MOST_SCORES:
        return Reason("too-many-scores", f"the math kernel ends the process at {params.scores} scores, 2^31 or more")
    if params.mask == "ranges":
        return Reason("ranges-ignored", "the math kernel does not look at lengths with offsets")
    if params.mask == "lengths" and params.causal and not (isinstance(params.columns, int) and params.columns <= 1024):
        return Reason("causal-lengths", "the math kernel takes no lengths with the causal attribute beyond 1024 keys")
    return None


_Kernels = tuple[tuple[str, tuple[Condition, ...]], ...]
_CUDA: _Kernels = (
    ("CUDNN_FLASH_ATTENTION", (from_arch(90), half_precision, head_sizes(8, 256), masks("none", "lengths", "bias"))),
    ("FLASH_ATTENTION", (from_arch(80), only(ir.DataType.FLOAT16), masks("none"), same_head_sizes, head_sizes(8, 256))),
    (
        "EFFICIENT_ATTENTION",
        (masks("none", "ranges", "bias"), head_sizes(8, 1024), not_causal_with_ranges, aligned_bias, long_unless_float16),
    ),
    ("MATH", ()),
)
_CPU: _Kernels = (
    ("FLASH_ATTENTION", (only(ir.DataType.FLOAT), masks("none"), not_causal)),
    ("MATH", ()),
)
_CUDA_ATTENTION: _Kernels = (
    ("FLASH_ATTENTION", (from_arch(80), half_precision, masks("none"), same_head_sizes, head_sizes(8, 256))),
    ("EFFICIENT_ATTENTION", (head_sizes(8, 1024), aligned_mask, several_with_cache)),
    ("MATH", ()),
)
_TENSORRT = (only(ir.DataType.FLOAT16), not_causal, masks("none", "lengths"), same_head_sizes)
_CUDA_PROJECTED: _Kernels = (
    ("CUDNN_FLASH_ATTENTION", (from_arch(90), half_precision, head_sizes(8, 256), masks("none", "lengths", "bias"))),
    (
        "FLASH_ATTENTION",
        (from_arch(80), half_precision, masks("none"), same_head_sizes, head_sizes(8, 256), preferred_from_rows(513)),
    ),
    (
        "TRT_FLASH_ATTENTION",
        (on_archs(75, 80, 86, 89), *_TENSORRT, head_size_among(16, 32, 40, 64, 80, 128, 160, 256), from_rows(385)),
    ),
    ("TRT_FUSED_ATTENTION", (on_archs(70, 75, 80, 86, 89), *_TENSORRT, head_size_among(32, 64), up_to_rows(384))),
    (
        "EFFICIENT_ATTENTION",
        (
            not_brain,
            masks("none", "ranges", "bias"),
            head_sizes(8, 1024),
            not_causal_with_ranges,
            aligned_bias,
            long_unless_float16,
        ),
    ),
    ("MATH", ()),
)
"""Kernels of com.microsoft's Attention on CUDA, as read in the source; none of it is measured yet."""
_CPU_ATTENTION: _Kernels = (("MATH", ()),)
_CPU_GROUPED: _Kernels = (
    ("FLASH_ATTENTION", (only(ir.DataType.FLOAT), not_capped)),
    ("MATH", ()),
)
_CUDA_GROUPED: _Kernels = (
    ("CUDNN_FLASH_ATTENTION", (from_arch(90), not_windowed, not_capped, head_sizes(8, 256))),
    ("FLASH_ATTENTION", (from_arch(80), head_sizes(8, 256))),
    ("EFFICIENT_ATTENTION", (head_sizes(8, 1024),)),
    ("MATH", ()),
)
_CUDA_PACKED: _Kernels = (
    ("FLASH_ATTENTION", (from_arch(80), only(ir.DataType.FLOAT16), masks("none"), same_head_sizes, head_sizes(8, 256))),
    ("TRT_FUSED_ATTENTION", (only(ir.DataType.FLOAT16), masks("none"), same_head_sizes, fused_by_trt)),
    ("EFFICIENT_ATTENTION", (masks("none", "bias"), head_sizes(8, 1024), aligned_bias, long_unless_float16)),
    ("MATH", ()),
)
_KERNELS = {
    ("cpu", "MultiHeadAttention"): _CPU,
    ("cuda", "MultiHeadAttention"): _CUDA,
    ("cpu", "Attention"): _CPU_ATTENTION,
    ("cuda", "Attention"): _CUDA_PROJECTED,
    ("cpu", "onnx.Attention"): _CPU_ATTENTION,
    ("cuda", "onnx.Attention"): _CUDA_ATTENTION,
    ("cpu", "GroupQueryAttention"): _CPU_GROUPED,
    ("cuda", "GroupQueryAttention"): _CUDA_GROUPED,
    ("cuda", "PackedMultiHeadAttention"): _CUDA_PACKED,
}
"""The kernels of an execution provider for an operator, in the order in which they are tried."""

_FLOATS = frozenset([ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
_ABSENT = {
    ("cuda", "GroupQueryAttention"): frozenset([ir.DataType.FLOAT]),
    ("cuda", "PackedMultiHeadAttention"): frozenset([ir.DataType.BFLOAT16]),
    ("cpu", "MultiHeadAttention"): frozenset([ir.DataType.BFLOAT16]),
    ("cpu", "Attention"): frozenset([ir.DataType.BFLOAT16]),
    ("cpu", "GroupQueryAttention"): frozenset([ir.DataType.BFLOAT16]),
    ("cpu", "onnx.Attention"): frozenset([ir.DataType.BFLOAT16]),
}
"""The element types that an operator has no kernel for."""

_TIMES: dict[tuple[bool, str], dict[MaskForm, float]] = {
    (True, "CUDNN_FLASH_ATTENTION"): {"none": 1.0, "lengths": 0.9, "bias": 1.85},
    (True, "FLASH_ATTENTION"): {"none": 1.55},
    (True, "EFFICIENT_ATTENTION"): {"none": 3.5, "ranges": 2.75, "bias": 4.9},
    (True, "MATH"): {"none": 16.6, "lengths": 15.5, "bias": 18.9, "raw": 18.9},
    (False, "EFFICIENT_ATTENTION"): {"none": 12.3, "ranges": 9.7, "bias": 14.4},
    (False, "MATH"): dict.fromkeys(("none", "lengths", "bias", "raw"), 17.6),
}
"""Milliseconds for twelve layers on an H200, B=8 S=T=1024 N=16 H=64, by (half precision, kernel) and form of the mask; lengths
are halfway between a batch without padding and one of which half is padding (benchmarks/results/forms_h200.md)."""
_PACKED: dict[bool, dict[str, float]] = {
    True: {"FLASH_ATTENTION": 0.9, "TRT_FUSED_ATTENTION": 1.2, "EFFICIENT_ATTENTION": 2.2, "MATH": 9.4},
    False: {"EFFICIENT_ATTENTION": 7.5, "MATH": 10.9},
}
"""Milliseconds for PackedMultiHeadAttention, from the same kernels; not measured yet (benchmarks/packing_on_gpu.py)."""
_CAUSAL = 0.7
"""Share of these times that is left with the causal attribute."""
_WINDOWED = 0.7
"""Share of these times that is left with a window."""
_WIDER: tuple[tuple[int, float, float], ...] = ((64, 1.0, 1.0), (128, 1.6, 1.1), (1 << 30, 3.2, 1.7))
"""Up to a head size, how much longer the memory-efficient kernel takes in float32, and what is spelled out."""
_UNFUSED = {True: 5.1, False: 8.5}
"""Milliseconds for the same layers spelled out, by half precision; float32 is computed as TensorFloat32."""
_MASKED, _GUARDED = 1.65, 2.4
"""How much longer that takes with a mask, and with a guard against NaN besides."""
_TENSOR_FLOAT_32 = 80
_PROJECTED = 0.85
"""Share of the time left with the projections inside, on an H200 in half precision: 0.5 to 0.97 (benchmarks/results)."""
_STANDARD = 2.0
"""How much longer ai.onnx Attention takes on CUDA: 1.7 with a triangle, 2.5 with a mask, at B=4 S=2048 N=32 H=128."""
_CACHE_WRITTEN, _MANY = 2.4, 1 << 26
"""What GroupQueryAttention takes besides, as it writes a cache also where there is none; twice as much below so many scores."""
_CPU_TIMES = {
    ("MultiHeadAttention", "FLASH_ATTENTION"): 1.0,
    ("MultiHeadAttention", "MATH"): 1.1,
    ("onnx.Attention", "MATH"): 1.1,
    ("GroupQueryAttention", "FLASH_ATTENTION"): 1.1,
    ("GroupQueryAttention", "MATH"): 1.1,
}
_CACHED: dict[tuple[str, str], dict[MaskForm, tuple[float, float]]] = {
    ("cuda", "GroupQueryAttention"): {"none": (0.53, 0.25), "bias": (0.74, 0.99)},
    ("cuda", "onnx.Attention"): {"none": (0.6, 0.27), "bias": (0.82, 0.58)},
    ("cuda", "MultiHeadAttention"): {"none": (1.71, 0.4), "bias": (1.71, 0.47)},
    ("cpu", "GroupQueryAttention"): {"none": (1.7, 1.37), "bias": (1.6, 1.47)},
    ("cpu", "onnx.Attention"): {"none": (1.35, 1.06), "bias": (1.35, 1.06)},
    ("cpu", "MultiHeadAttention"): {"none": (4.4, 1.44), "bias": (4.4, 1.44)},
}
"""Milliseconds for one new position and for many where there is a cache, four heads sharing keys and values: one attention on an
H200 in half precision, N=32 H=128, B=8 P=8192 and B=8 S=512; on one core of a CPU in float32, N=32 H=64, P=2048 and S=128."""
_UNGROUPED = 0.45
"""Share of the cached time left for MultiHeadAttention where no keys and values are to be repeated."""
_FEW_SCORES, _FEW_TIMES = 256 * 256, 0.8
"""Up to so many queries times keys ai.onnx Attention is that much faster (benchmarks/results/attention_cpu.md)."""


def _time(params: AttentionParams, kernel: str, device: Device) -> float:
    """How long a kernel takes."""
    if params.cached or (params.grouped and params.rows != params.columns):
        return _cached_time(params, device)
    if device.ep == "cpu":
        few = isinstance(params.rows, int) and isinstance(params.columns, int) and params.rows * params.columns <= _FEW_SCORES
        return _CPU_TIMES[params.op, kernel] * (_FEW_TIMES if few and params.op == "onnx.Attention" else 1.0)
    half = params.dtype != ir.DataType.FLOAT
    if params.op == "PackedMultiHeadAttention":
        return _PACKED[half][kernel]
    spared = _CAUSAL if params.causal and kernel != "MATH" else 1.0
    wider = 1.0 if half or kernel == "MATH" else _wider(params)[0]
    times = spared * wider * _TIMES[half, kernel][params.mask]
    if params.op == "GroupQueryAttention":
        small = isinstance(params.scores, int) and params.scores < _MANY
        return times * (_WINDOWED if params.windowed else 1.0) + _CACHE_WRITTEN * (2 if small else 1)
    return times * (_STANDARD if params.op == "onnx.Attention" else 1.0)


def _cached_time(params: AttentionParams, device: Device) -> float:
    """How long it takes where there is a cache; both one new position and many, where that is not known."""
    forms = _CACHED[device.ep, params.op]
    few, many = forms.get(params.mask, forms["bias"])
    if params.op == "MultiHeadAttention" and not params.grouped:
        few *= _UNGROUPED
    return few + many if not isinstance(params.rows, int) else few if params.rows == 1 else many


def _wider(params: AttentionParams) -> tuple[float, float]:
    size = params.head_size if isinstance(params.head_size, int) else 0
    return next((fused, unfused) for most, fused, unfused in _WIDER if size <= most)


def unfused_time(params: AttentionParams, device: Device, *, guarded: bool = False) -> float:
    """How long the attention takes that is spelled out; infinite where it was not measured, or is no faster anywhere.

    Args:
        params: The attention.
        device: What it runs on.
        guarded: Its weights are guarded against NaN.
    """
    half = params.dtype != ir.DataType.FLOAT
    if device.ep == "cpu" or params.cached or (not half and device.arch < _TENSOR_FLOAT_32):
        return math.inf
    masked = params.causal or params.mask != "none"
    return _UNFUSED[half] * _wider(params)[1] * (_GUARDED if masked and guarded else _MASKED if masked else 1.0)
