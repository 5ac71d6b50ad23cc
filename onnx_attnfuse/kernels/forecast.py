"""Which kernel ONNX Runtime will run for a fused attention, why not the faster ones before it, and how long it takes.

A kernel is a name and its conditions; an operator on an execution provider is an ordered list of kernels, which the provider's
record has (`kernels/providers/`), with their times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from onnx_attnfuse.kernels.conditions import AttentionParams, Open
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.execution_provider import Kernels, OpSupport
from onnx_attnfuse.kernels.support import support, supported
from onnx_attnfuse.reasons import Reason

FLASH = frozenset(["CUDNN_FLASH_ATTENTION", "FLASH_ATTENTION"])
EFFICIENT = frozenset(["EFFICIENT_ATTENTION"])
TENSORRT = frozenset(["TRT_FLASH_ATTENTION", "TRT_FUSED_ATTENTION"])


@dataclasses.dataclass(frozen=True)
class RefusedKernel:
    """A kernel that would have been faster, and why it is not chosen."""

    kernel: str
    code: str
    message: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The kernel that ONNX Runtime will run for an attention, and those that it passes over."""

    kernel: str
    refused: tuple[RefusedKernel, ...]
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
    def first_failure(self) -> Reason | None:
        """Why the first of the kernels that may run and fail does."""
        return self.fails or (self.otherwise.first_failure if self.otherwise is not None else None)

    @property
    def chain(self) -> tuple[str, ...]:
        """The forecast kernel, then the kernels that run where its conditions do not hold."""
        return (self.kernel, *(self.otherwise.chain if self.otherwise else ()))


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Expected speed-up of an attention if the caller changes an option or the dtype."""

    change: str
    kernel: str
    times: float
    """How many times as fast the attention would be, by what was measured on an H200."""


def forecast(params: AttentionParams, device: Device) -> Forecast:
    """The first kernel of the device whose conditions an attention meets, with its time.

    Raises:
        Refused: The operator is not used on the device.
    """
    found = untimed(params, device)
    if device.members:
        return found
    return dataclasses.replace(found, time=math.inf if found.fails is not None else _time(params, found.kernel, device))


def untimed(params: AttentionParams, device: Device) -> Forecast:
    """The first kernel of the device whose conditions an attention meets, for a mask of any form; without its time.

    Raises:
        Refused: The operator is not used on the device.
    """
    if device.members:
        return _forecast_for_all(params, device.members)
    switched = dataclasses.replace(params, arch=device.arch, any_length=device.switches.any_length)
    known = supported(params.op, device.provider)
    return _first(switched, known.kernels, (), device.switches.off, known)


def _forecast_for_all(params: AttentionParams, devices: Sequence[Device]) -> Forecast:
    """The forecast for several devices, with the worst of their times; it fails where it may on any of them.

    Times of different devices are compared by how many times as long they are as that of MultiHeadAttention without a mask. A
    device that does not fuse decomposed attention runs it as it is.
    """
    devices = [device for device in devices if not isinstance(support(params.op, device.provider), Reason)]
    found = [forecast(params, device) for device in devices]
    kernels = dict.fromkeys(item.kernel for item in found)
    fails = next((item.first_failure for item in found if not item.never_fails), None)
    usual = dataclasses.replace(params, op="MultiHeadAttention", mask="none", causal=False)
    times = [item.time / _usual_time(usual, device) for item, device in zip(found, devices, strict=True)]
    known = [time for time in times if math.isfinite(time)]
    return Forecast(", ".join(kernels), (), fails=fails, time=max(known) if known and fails is None else math.inf)


def _usual_time(params: AttentionParams, device: Device) -> float:
    """The time that others are compared with; 1 where it is not known."""
    known = support(params.op, device.provider)
    time = math.inf if isinstance(known, Reason) else forecast(params, device).time
    return time if math.isfinite(time) and time else 1.0


def forecast_existing(params: AttentionParams, device: Device) -> Forecast | None:
    """The forecast, without time, for an operator that exists in a model; None where the device has no kernel for it."""
    known = support(params.op, device.provider)
    return None if isinstance(known, Reason) or params.dtype not in known.runs else untimed(params, device)


def has_kernel(op: str, device: Device, kinds: frozenset[str]) -> bool:
    """Whether an operator has any of some kernels on the device at all."""
    known = support(op, device.provider)
    return not isinstance(known, Reason) and any(kernel in kinds for kernel, _ in known.kernels)


def _first(
    params: AttentionParams, kernels: Kernels, refused: tuple[RefusedKernel, ...], off: frozenset[str], known: OpSupport
) -> Forecast:
    (kernel, conditions), *rest = kernels
    answers = [answer for condition in conditions if (answer := condition(params)) is not None]
    reason = next((answer for answer in answers if isinstance(answer, Reason)), None)
    if reason is None and kernel in off:
        reason = Reason("switched-off", "is switched off")
    if reason is not None:
        return _first(params, tuple(rest), (*refused, RefusedKernel(kernel, reason.code, reason.message)), off, known)
    needs = " and ".join(answer.needs for answer in answers if isinstance(answer, Open)) or None
    otherwise = None if needs is None else _first(params, tuple(rest), (), off, known)
    fails = known.math_fails(params) if kernel == "MATH" and known.math_fails is not None else None
    return Forecast(kernel, refused, needs, otherwise, fails)


def _time(params: AttentionParams, kernel: str, device: Device) -> float:
    """How long a kernel takes; infinite where that is not known."""
    known = supported(params.op, device.provider)
    if known.timed_as is not None:
        other = forecast(dataclasses.replace(params, op=known.timed_as), device).time
        return other * (1.0 if known.share is None else known.share(params))
    if params.band is not None:
        return math.inf if known.blocks_time is None else known.blocks_time(params)
    if params.cached or (params.grouped and params.rows != params.columns):
        return _cached_time(params, known)
    return math.inf if known.time is None else known.time(params, kernel)


def _cached_time(params: AttentionParams, known: OpSupport) -> float:
    """How long a kernel takes where there is a cache; both one new position and many, where that is not known."""
    forms = known.cached_times
    measured = None if forms is None else forms.get(params.mask, forms.get("bias"))
    if measured is None:
        return math.inf
    few, many = measured
    few *= 1.0 if params.grouped else known.ungrouped
    return few + many if not isinstance(params.rows, int) else few if params.rows == 1 else many


def unfused_time(params: AttentionParams, device: Device, *, guarded: bool = False) -> float:
    """The time of the decomposed attention; infinite where it was not measured, or is no faster anywhere.

    Args:
        params: The attention.
        device: The device it runs on.
        guarded: Its weights are guarded against NaN.
    """
    measured = device.provider.unfused_time
    return math.inf if measured is None else measured(params, device.arch, guarded)
