"""A progress bar on stderr, where a person watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

from onnx_attnfuse.options import Progress


def _nothing(step: str, done: int, total: int) -> None:
    del step, done, total


@contextlib.contextmanager
def progress_bar(*, shown: bool) -> Generator[Progress]:
    """A callback for `Options.progress` that draws a bar; it vanishes at the end.

    Args:
        shown: Whether to draw at all; nothing is drawn either where stderr is not a terminal.

    Yields:
        The callback.
    """
    if not shown or not sys.stderr.isatty():  # rich takes FORCE_COLOR for a terminal, and logs would hold every frame
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield advance
