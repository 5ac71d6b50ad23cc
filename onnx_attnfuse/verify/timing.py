"""How long each step of a run takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator


class StepTimer:
    """Seconds by step; the time of a step inside another counts for the inner one alone."""

    def __init__(self, begun: Callable[[str], None] = lambda _: None) -> None:
        """Begins to count.

        Args:
            begun: Called with each step that begins.
        """
        self._begun = begun
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    @contextlib.contextmanager
    def step(self, name: str) -> Generator[None]:
        """Times a block."""
        self._begun(name)
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner.pop()
            self._inner[-1] += whole
