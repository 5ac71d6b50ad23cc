"""Execution providers of ONNX Runtime: one file for each, whose `PROVIDER` is its record. A new file is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from onnx_attnfuse.errors import OptionError

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.execution_provider import ExecutionProvider

FALLBACK = "cpu"
"""The provider that every ONNX Runtime has."""
_FILES = tuple(module.name for module in pkgutil.iter_modules(__path__))
_records: dict[str, ExecutionProvider] = {}
"""The records that were asked for, by name; they are imported no earlier, so that choices of a command cost nothing."""


def names() -> tuple[str, ...]:
    """The names of all execution providers, sorted."""
    return tuple(sorted({*_FILES, *_records}))


def provider(name: str) -> ExecutionProvider:
    """The record of an execution provider, or of several, with commas between their names.

    Raises:
        OptionError: There is none of this name, or one is named twice.
    """
    if "," in name:
        from onnx_attnfuse.kernels.support import together

        parts = [part.strip() for part in name.split(",")]
        if len(set(parts)) < len(parts):
            raise OptionError(f"ep is {name!r}; name each execution provider once")
        if "auto" in parts:
            raise OptionError(f"ep is {name!r}; auto selects one execution provider, so name all of them")
        return together(tuple(map(provider, parts)))
    if name not in _records:
        if name not in _FILES:
            *others, last = ("auto", *names())
            raise OptionError(f"ep is {name!r}; choose {', '.join(others)} or {last}")
        _records[name] = importlib.import_module(f"{__name__}.{name}").PROVIDER
    return _records[name]


def every() -> tuple[ExecutionProvider, ...]:
    """All records, sorted by name."""
    return tuple(provider(name) for name in names())
