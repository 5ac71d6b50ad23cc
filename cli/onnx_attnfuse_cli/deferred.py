"""Packages that are imported when something of theirs is first used, though others import them at once.

onnx-ir imports SymPy, for arithmetic on symbolic sizes that the command never does: a quarter of a second, a third of a run on a
small model. The stand-in is Python's own `importlib.util.LazyLoader`: the first access gets all of SymPy, under the same
name, from the same file. Where that cannot be, as in a version of onnx-ir that is made otherwise, SymPy is imported at once,
as ever. The command does this, whose process is its own, and never the library. Once onnx-ir imports SymPy where it computes with
it, this file can go.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from onnx_attnfuse.kernels.policy import switch

VARIABLE = "ATTNFUSE_DEFER_IMPORTS"
"""An environment variable; 0 imports everything at once."""
_DEFERRED = frozenset(["sympy", "onnx_ir._symbolic_shapes"])
"""SymPy, and the module of onnx-ir that looks into it while it is imported."""


class _Deferring:
    """Finds a deferred module where it is, and runs it when it is first accessed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _DEFERRED else None
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """Defers the modules that can be, in this process from here on; modules imported already stay as they are.

    Raises:
        OptionError: `ATTNFUSE_DEFER_IMPORTS` is neither 0 nor 1.
    """
    if switch(VARIABLE, os.environ) != 0:
        sys.meta_path.insert(0, _Deferring())
