"""Report records of the kernels that a plan or a forecast names."""

from __future__ import annotations

from collections.abc import Iterator

from onnx_attnfuse.fusion.plan import FASTER_FROM, Lowering, Plan
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.forecast import Forecast
from onnx_attnfuse.report.model import Kernel, LaterKernel, RefusedKernel

_WHEN = {"right_padded": "padding is on the right", "unpadded": "there is no padding"}
_SINGLE = "one entry, one new position or no past"


def kernel_of(plan: Plan, device: Device) -> Kernel:
    """What will run, and where that depends on the batch or on sizes, what else."""
    chain = [later for item in plan.faster for later in _chain(item, tested=True)]
    chain += _chain(plan.main, tested=False)
    return Kernel(device.name, chain[0].kernel, chain[0].when, tuple(chain[1:]), _refused(plan.best.forecast), plan.gains)


def kernel_of_forecast(found: Forecast, device: Device) -> Kernel:
    """The report record of the kernel forecast for an operator that exists in the model already."""
    chain: list[LaterKernel] = []
    item: Forecast | None = found
    while item is not None:
        chain.append(LaterKernel(item.kernel, item.needs))
        item = item.otherwise
    return Kernel(device.name, chain[0].kernel, chain[0].when, tuple(chain[1:]), _refused(found))


def _refused(found: Forecast) -> tuple[RefusedKernel, ...]:
    return tuple(RefusedKernel(item.kernel, item.reason.code, item.reason.message) for item in found.refused)


def _chain(item: Lowering, *, tested: bool) -> Iterator[LaterKernel]:
    """The kernels of one way; what a test at run time makes sure of ends it."""
    when = _WHEN.get(item.encoding.when)
    single = _SINGLE if item.encoding.single else None
    least = FASTER_FROM.get(item.encoding.mask, 0) if tested else 0
    size = f"there are 2^{least.bit_length() - 1} scores or more" if least else None
    found = item.forecast
    while found is not None:
        words = [word for word in (when, single, size, found.needs) if word]
        yield LaterKernel(found.kernel, " and ".join(words) or None)
        found = None if tested else found.otherwise
