"""The log that ONNX Runtime prints of the attention kernels it runs, read and compared with the forecast.

With ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1 it writes a line to stdout whenever an attention operator runs on CUDA, in colour:

    Operator=MultiHeadAttention Node=/encoder/Softmax/MultiHeadAttention DataType=fp16 SdpaKernel=FLASH_ATTENTION
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Literal

SWITCH = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
"""The variable that makes ONNX Runtime print it."""
_LINE = re.compile(r"Operator=(?P<op>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+) SdpaKernel=(?P<kernel>\w+)")

Outcome = Literal["as forecast", "another kernel", "did not run", "not forecast"]


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of one operator."""

    op: str
    node: str
    dtype: str
    kernel: str


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """One operator: its forecast, and the kernel that ran."""

    node: str
    op: str
    forecast: str | None
    """None where the forecast is not known."""
    ran: tuple[str, ...]
    """The kernels that ran, each once."""

    @property
    def outcome(self) -> Outcome:
        """Whether the forecast was right; an operator in a branch that was not taken did not run."""
        if not self.ran:
            return "did not run"
        if self.forecast is None:
            return "not forecast"
        return "as forecast" if set(self.ran) == {self.forecast} else "another kernel"


def read_kernel_log(text: str) -> list[Ran]:
    """The runs that a text tells of, in order; whatever else it holds is passed over."""
    return [
        Ran(found["op"], found["node"] or "", found["dtype"], found["kernel"])
        for found in map(_LINE.search, text.splitlines())
        if found is not None
    ]


def confirm(forecasts: Mapping[str, tuple[str, str | None]], runs: Sequence[Ran]) -> list[Confirmation]:
    """Holds what ran against what was forecast, operator by operator.

    Args:
        forecasts: Operator and kernel by node; None where nothing was forecast.
        runs: The kernels that ran; nodes that ONNX Runtime named itself are at the end.
    """
    ran: dict[str, dict[str, None]] = {}
    ops = {run.node: run.op for run in runs}
    for run in runs:
        ran.setdefault(run.node, {})[run.kernel] = None
    found = [Confirmation(node, op, kernel, tuple(ran.pop(node, ()))) for node, (op, kernel) in forecasts.items()]
    return found + [Confirmation(node, ops[node], None, tuple(kernels)) for node, kernels in ran.items()]
