"""Reports on captured graphs: written once, and kept by each module that runs the graph."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from onnx_attnfuse.training.report import TrainingReport, tell

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(eq=False)
class Captured:
    """A captured graph, as far as reports go: its report, which verification may replace."""

    report: TrainingReport


class Reports(Sequence[TrainingReport]):
    """The reports on the graphs that a module ran, one for each; modules of one class share graphs, and a copy has none."""

    def __init__(self) -> None:
        self._graphs: dict[Captured, None] = {}

    @overload
    def __getitem__(self, index: int) -> TrainingReport: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingReport]: ...
    def __getitem__(self, index: int | slice) -> TrainingReport | list[TrainingReport]:
        return [graph.report for graph in self._graphs][index]

    def __len__(self) -> int:
        return len(self._graphs)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Reports, ()  # PyTorch leaves the compiled call out of a copy

    def add(self, graph: Captured) -> None:
        """Keeps a graph's report, however often the graph runs."""
        self._graphs[graph] = None

    def around(self, call: Callable[_P, _R]) -> Callable[_P, _R]:
        """A call whose graphs are reported here."""

        @functools.wraps(call)
        def reported(*arguments: _P.args, **named: _P.kwargs) -> _R:
            mark = _CALLER.set(self)
            try:
                return call(*arguments, **named)
            finally:
                _CALLER.reset(mark)

        return reported


REPORTS = Reports()
"""The reports on graphs of modules that keep none."""
_CALLER: contextvars.ContextVar[Reports] = contextvars.ContextVar("_CALLER", default=REPORTS)


def keep(graph: Captured) -> None:
    """Keeps a graph's report for the module that runs it."""
    _CALLER.get().add(graph)


def announce(graph: Captured) -> None:
    """Logs the report of a graph that was captured; of graphs without attention only the first one of a module."""
    report = graph.report
    if report.sites or report.defect is not None or not _CALLER.get():
        tell(report.lines())
    keep(graph)
