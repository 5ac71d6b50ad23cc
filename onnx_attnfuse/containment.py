"""Fault isolation: an unexpected exception undoes and skips one site, is reported, and the run continues.

    with collecting() as failures:                          # one run
        with contained(subject, place, undo) as attempt:    # one step of it
            ...
        if attempt.reason is not None: ...                  # refused, or failed and reported in `failures`

A refusal is an answer and is not reported. A failure is our defect, unless code of a pattern that is not built in raised it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import pathlib
import traceback
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Literal

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.reasons import Reason, Refused

_LOG = logging.getLogger(__name__)
FAILED = frozenset(["defect", "pattern-failed"])
"""Codes of reasons of failures, which are reported by themselves."""
_DEEP = "too deeply nested to be read, more than Python's recursion limit allows"


@dataclasses.dataclass(frozen=True)
class Subject:
    """The part of the work that a failure is blamed on: a step of this library, a pattern or a pack."""

    what: str
    """In words: `drawing before`, `score step 'masks.mine'`."""
    file: str | None = None
    """The Python file of a pattern that is not built in."""
    foreign: bool = False
    """Whether all its code is another library's, as that of rules of onnxscript."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that cost one place or several."""

    kind: Literal["defect", "pattern", "pack"]
    """Whose it is: ours, that of a pattern which is not built in, or that of an installed pack which cannot be loaded."""
    subject: str
    file: str | None
    line: int | None
    message: str
    """The exception in one line."""
    places: tuple[str, ...] = ()
    """The nodes at which it was raised."""
    trace: str = dataclasses.field(default="", repr=False, compare=False)
    """The first traceback; not part of the JSON."""

    def __str__(self) -> str:
        where = "" if self.file is None else f" of {self.file}" + ("" if self.line is None else f", line {self.line}")
        more = len(self.places) - 1
        at = f", at {self.places[0]}" + (f" and {more} more" if more > 0 else "") if self.places else ""
        if self.kind == "pack":
            found = f"{where.removeprefix(' of ')}: " if where else ""
            return f"{self.subject} is left out: {found}{self.message}; repair or uninstall it"
        if self.kind == "pattern":
            return f"{self.subject}{where}: {self.message}{at}; left as it was there"
        return f"{self.subject}{where}: {self.message} inside attnfuse{at}; left as it was there, please report it"

    def to_dict(self) -> dict[str, Any]:
        """The failure as plain JSON types."""
        entry = dataclasses.asdict(self)
        del entry["trace"]
        return entry


class Failures:
    """The failures of one run; alike ones in several places are one failure."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[Failure, list[str]]] = {}

    def add(self, failure: Failure) -> None:
        """Adds a failure, or its place where one like it was met before."""
        key = (failure.kind, failure.subject, failure.file, failure.line, failure.message.partition(":")[0])
        _, places = self._found.setdefault(key, (failure, []))
        places += (place for place in failure.places if place not in places)

    def tell(self) -> None:
        """Tells all failures to the block around this one, where it collects them."""
        for failure in self.all():
            tell(failure)

    def all(self) -> tuple[Failure, ...]:
        """All failures, in the order in which they were met first."""
        return tuple(dataclasses.replace(failure, places=tuple(places)) for failure, places in self._found.values())


_current: contextvars.ContextVar[Failures | None] = contextvars.ContextVar("failures", default=None)


@contextlib.contextmanager
def collecting() -> Generator[Failures]:
    """Collects the failures inside a block; an inner block keeps its own."""
    failures = Failures()
    token = _current.set(failures)
    try:
        yield failures
    finally:
        _current.reset(token)


class Attempt:
    """A step whose refusal or failure costs itself alone; a block that is entered by `with`."""

    def __init__(self, subject: Subject, place: str | None, undo: Callable[[], object] | None) -> None:
        self._subject, self._place, self._undo = subject, place, undo
        self.reason: Reason | None = None
        """Why it came to nothing; None if it did what it should."""

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, (OptionError, MissingDependencyError)):
            return False  # what the caller has to change ends the run
        self.reason = error.reason if isinstance(error, Refused) else failed(error, self._subject, self._place)
        if self._undo is not None:
            self._undo()
        return True


def contained(subject: Subject, place: str | None = None, undo: Callable[[], object] | None = None) -> Attempt:
    """A step whose refusal or failure costs itself alone.

    Args:
        subject: The subject of the failure.
        place: The node that it is at.
        undo: Puts the graph back to what it was before the step.
    """
    return Attempt(subject, place, undo)


def failed(error: Exception, subject: Subject, place: str | None = None) -> Reason:
    """Tells of a failure, and gives the reason for which its place is left."""
    failures = _current.get()
    _LOG.log(logging.ERROR if failures is None else logging.INFO, "%s failed at %s", subject.what, place, exc_info=error)
    if isinstance(error, RecursionError):
        return Reason("too-deep", _DEEP, place)
    frames = traceback.extract_tb(error.__traceback__)
    file = subject.file
    if subject.foreign and file is None:
        file = next((frame.filename for frame in reversed(frames) if not _is_library(frame.filename)), None)
    lines = [frame.lineno for frame in frames if file is not None and frame.filename == file]
    theirs = subject.foreign or bool(lines)
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    failure = Failure(
        "pattern" if theirs else "defect",
        subject.what,
        file,
        lines[-1] if lines else None,
        message,
        () if place is None else (place,),
        "".join(traceback.format_exception(error)),
    )
    if failures is not None:
        failures.add(failure)
    return Reason("pattern-failed" if theirs else "defect", str(dataclasses.replace(failure, places=())), place)


def _is_library(file: str) -> bool:
    """Whether a file is this library's or an installed one, and not what somebody wrote against them."""
    path = pathlib.Path(file)
    return path.is_relative_to(pathlib.Path(__file__).parent) or "site-packages" in path.parts


def tell(failure: Failure) -> None:
    """Tells of a failure that is known already."""
    failures = _current.get()
    if failures is not None:
        failures.add(failure)
