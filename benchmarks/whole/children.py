"""Processes that measure one variant each, the next one getting ready while one measures."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.whole.cell import MARK
from onnx_attnfuse.bench.process import ChildError, Process


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `benchmarks.whole.cell`."""

    name: str
    label: str
    arguments: tuple[str, ...]


class Child(Process):
    """A process; made, it gets ready, and measures when told."""

    def __init__(self, call: Call) -> None:
        super().__init__(["-m", "benchmarks.whole.cell", *call.arguments], {"PYTHONUNBUFFERED": "1"})
        self.call = call

    def results(self, cap: float) -> Iterator[dict[str, Any]]:
        """What it prints from now on; ends with what went wrong where it did not come to its end in so many seconds."""
        self.say("go")
        end = time.monotonic() + cap
        try:
            while (line := self.line(end, cap)) is not None:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
        except ChildError as error:
            yield {"error": str(error)}


def one_ahead(calls: list[Call]) -> Iterator[Child]:
    """The processes of the calls in order; each is started while the one before is in use."""
    following = Child(calls[0]) if calls else None
    for at in range(len(calls)):
        current = following
        assert current is not None
        following = Child(calls[at + 1]) if at + 1 < len(calls) else None
        try:
            yield current
        except GeneratorExit:
            if following is not None:
                following.stop()
            raise
        finally:
            current.stop()
