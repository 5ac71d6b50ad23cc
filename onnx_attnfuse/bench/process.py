"""Processes that hold one model each, answer in time, and are ended for good.

with Child(task) as child:
    child.ask(None, seconds)        # it has run once
    child.ask(20, seconds)["ms"]    # the times of twenty runs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_attnfuse.kernels.providers import FALLBACK, provider
from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker

_MODULE = "onnx_attnfuse.bench.worker"


ChildError = ProcessDied
"""The process did not do what it was asked to; the message says why, in a line."""


class Child(Worker):
    """A process with one model, as `onnx_attnfuse.bench.worker` has it."""

    def __init__(self, task: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """A process for a task, its `ep` the name of an execution provider; `environment` as for `Worker`."""
        super().__init__(["-m", _MODULE], environment=environment)
        self._task = {**task, "ep": _described(task["ep"])} if "ep" in task else dict(task)

    def ask(self, question: object, seconds: float | None = None) -> Any:
        """The next answer: to the task if `question` is None, else to so many runs.

        Raises:
            ChildError: It failed, or took longer than `seconds`.
        """
        answer = super().ask(self._task if question is None else question, seconds)
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer


def _described(ep: str) -> dict[str, Any]:
    """An execution provider for the worker, which imports no records, as their memory would count as the model's."""
    found = provider(ep)
    names = list(dict.fromkeys([found.ort_name, provider(FALLBACK).ort_name]))
    return {"providers": names, "memory": found.memory, "measured_with": dict(found.measured_with)}
