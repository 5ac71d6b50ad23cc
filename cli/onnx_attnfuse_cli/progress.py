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
    """A callback for `Options.progress` that draws the current step and the time since the beginning; it vanishes at the end.

    Args:
        shown: Whether to draw at all; nothing is drawn either where stderr is not a terminal.

    Yields:
        The callback.
    """
    if not shown or not sys.stderr.isatty():  # rich takes FORCE_COLOR for a terminal, and logs would hold every frame
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[parts]}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None, parts="")

        def advance(step: str, done: int, total: int) -> None:
            parts = f"{done}/{total}" if total > 1 else ""
            bar.update(task, description=step, completed=done, parts=parts)
            bar.tasks[0].total = total if total > 1 else None  # update() takes None for no change

        yield advance
