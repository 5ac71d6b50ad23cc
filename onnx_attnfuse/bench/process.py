"""Processes that hold one model each, answer in time, and are ended for good.

with Child(task) as child:
    child.ask(None, seconds)        # it has run once
    child.ask(20, seconds)["ms"]    # the times of twenty runs

Inputs to run any model on (`samples`) have sizes that fit together, floats that are normal, and integers that are 1, as tokens
that count are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.kernels.providers import FALLBACK, provider
from onnx_attnfuse.verify.inputs import Array, InputCase, Slot, feeds
from onnx_attnfuse.verify.shape_solver import Equalities, Profile
from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker

_MODULE = "onnx_attnfuse.bench.worker"


ChildError = ProcessDied
"""The process did not do what it was asked to; the message says why, in a line."""
_FULL = InputCase("full", "plain", 1.0)
_PROFILES = [
    Profile(1, others)
    for length in (128, 32, 8)
    for others in ((length, length, 2 * length), (length, 2 * length, length), (2 * length, length, length), (length,))
]
"""Numbers for lengths: one is twice the others, as that of a mask over a cache and new tokens; then the same throughout."""


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


@dataclasses.dataclass(frozen=True)
class Sample:
    """Inputs of a model for one measurement."""

    lengths: Mapping[str, int]
    """Numbers by symbolic size."""
    feeds: Mapping[str, Array]
    """Arrays by input."""

    @property
    def batch(self) -> int:
        """The first axis of the inputs that have several, if they agree."""
        firsts = {array.shape[0] for array in self.feeds.values() if array.ndim > 1}
        return firsts.pop() if len(firsts) == 1 else 1

    @property
    def tokens(self) -> int | None:
        """How many tokens there are: elements of the integers that have two axes, if they agree on the second."""
        shapes = {array.shape for array in self.feeds.values() if array.ndim == 2 and array.dtype.kind in "iub"}
        return None if not shapes else min(rows * columns for rows, columns in shapes)

    def save(self, path: pathlib.Path) -> dict[str, Any]:
        """Writes the arrays; returns what a child's task says of them. Those of bfloat16 are written as their bits."""
        bits = [name for name, array in self.feeds.items() if array.dtype.name == "bfloat16"]
        np.savez(path, *(array.view(np.uint16) if name in bits else array for name, array in self.feeds.items()))
        return {"arrays": str(path), "names": list(self.feeds), "bfloat16": bits}


def sample(model: ir.Model, lengths: Mapping[str, int] | None = None) -> Sample:
    """The first of `samples`; see there."""
    return next(samples(model, lengths or {}))


def samples(model: ir.Model, lengths: Mapping[str, int]) -> Iterator[Sample]:
    """Inputs for a model, the likelier sizes first: not all models take long ones, or such as differ.

    Args:
        model: The model.
        lengths: Numbers for symbolic sizes. A batch has one entry by default. Those that no input has are passed over.

    Raises:
        ModelError: The shape or type of an input is not known.
        OptionError: The sizes do not fit together.
    """
    facts = Facts(model.graph)
    inputs = [value for value in model.graph.inputs if value.const_value is None]
    for value in inputs:
        if facts.dims(value) is None or facts.dtype(value) is None:
            raise ModelError(f"the shape or the element type of input '{value.name}' is unknown; export the model with it")
    dims = [facts.dims(value) or () for value in inputs]
    names = {name for shape in dims for dim in shape for name in sizes.symbols(dim)}
    given = {name: number for name, number in facts.numbers(lengths).items() if name in names}
    equalities = Equalities([*((sizes.symbol(name), number) for name, number in given.items()), *facts.equalities])
    seen: list[dict[str, int]] = []
    batch = {name for shape in dims for dim in shape[:1] for name in sizes.symbols(dim)}
    long = [number for name, number in given.items() if name not in batch]
    sums = {one + other for one, other in itertools.combinations(long, 2)}  # as that of a mask over a cache and new tokens
    for values in equalities.assignments(dims, [*(Profile(1, (length,)) for length in sorted(sums)), *_PROFILES]):
        found = {name: given.get(name, values[name]) for name in sorted(names)}
        shapes = [tuple(sizes.evaluate(dim, found) for dim in shape) for shape in dims]
        if found in seen or any(length < 0 for shape in shapes for length in shape):
            continue
        seen.append(found)
        slots = [
            Slot(value.name or "", "activation", facts.dtype(value) or ir.DataType.FLOAT, len(shape), blank=False)
            for value, shape in zip(inputs, shapes, strict=True)
        ]
        yield Sample(found, feeds(slots, shapes, _FULL))
    if not seen:
        raise OptionError("the sizes do not fit together; give more of them by --dim NAME=N")


def fitting(path: pathlib.Path, model: ir.Model, lengths: Mapping[str, int], ep: str, seconds: float) -> Sample:
    """The first sample that a model runs on; if there is none, the first of all.

    Args:
        path: The model's file.
        model: The model.
        lengths: As for `samples`.
        ep: Execution provider.
        seconds: How long each try may take.

    Raises:
        ModelError: The shape or type of an input is not known.
        OptionError: The sizes do not fit together.
    """
    first: Sample | None = None
    for found in samples(model, lengths):
        first = first or found
        with tempfile.TemporaryDirectory() as folder:
            arrays = found.save(pathlib.Path(folder) / "inputs.npz")
            with Child({"model": str(path), "ep": ep, **arrays}) as child, contextlib.suppress(ChildError):
                child.ask(None, seconds)
                return found
    assert first is not None
    return first
