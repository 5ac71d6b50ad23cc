"""Report records of the kernels that a plan or a forecast names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx_attnfuse.fusion.plan import FASTER_FROM, Lowering, Plan
from onnx_attnfuse.kernels.device import Device
from onnx_attnfuse.kernels.forecast import Forecast, Speedup
from onnx_attnfuse.report.model import Kernel, LaterKernel

_WHEN = {"right_padded": "padding is on the right", "unpadded": "there is no padding"}
_SINGLE = "one entry, one new position or no past"


def kernel_of(plan: Plan, device: Device) -> Kernel:
    """The kernel that a plan will run, with the others where that depends on the batch or on sizes."""
    chain = [next(_chain(item, tested=True)) for item in plan.faster]
    return _kernel([*chain, *_chain(plan.main, tested=False)], plan.best.forecast, device, plan.gains)


def kernel_of_forecast(found: Forecast, device: Device, when: str | None = None, usual: Kernel | None = None) -> Kernel:
    """The report record of the kernel forecast for an operator.

    Args:
        found: The forecast.
        device: The device that it is for.
        when: A condition on batches under which the operator runs.
        usual: What runs where that does not hold.
    """
    return _kernel([*_steps(found, when), *(usual.chain if usual is not None else ())], found, device)


def _kernel(chain: Sequence[LaterKernel], best: Forecast, device: Device, gains: tuple[Speedup, ...] = ()) -> Kernel:
    return Kernel(device.name, chain[0].kernel, chain[0].when, tuple(chain[1:]), best.refused, gains)


def _chain(item: Lowering, *, tested: bool) -> Iterator[LaterKernel]:
    """The kernels of one way; where a test at run time makes sure of sizes, the first of them always runs."""
    least = FASTER_FROM.get(item.encoding.mask, 0) if tested else 0
    size = f"there are 2^{least.bit_length() - 1} scores or more" if least else None
    return _steps(item.forecast, _WHEN.get(item.encoding.when), _SINGLE if item.encoding.single else None, size)


def _steps(found: Forecast | None, *conditions: str | None) -> Iterator[LaterKernel]:
    """The kernels of a forecast in the order in which they are tried, each with conditions of its operator besides its own."""
    while found is not None:
        yield LaterKernel(found.kernel, " and ".join(filter(None, (*conditions, found.needs))) or None)
        found = found.otherwise
