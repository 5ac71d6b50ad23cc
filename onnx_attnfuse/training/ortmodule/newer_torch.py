"""ORTModule on versions of PyTorch that came after it.

onnxruntime-training 1.19.2 is the last one, and knows PyTorch up to 2.5. Each `Change` here is one thing that PyTorch has changed
since, and what makes up for it: in ORTModule where that is possible, so that a program's own exports stay as they are. Whether a
change is there is asked of PyTorch itself, never of its version.

`mend_before_import` has to run before ORTModule is imported, `mend_after_import` after that; `ortmodule` runs both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any
from unittest import mock

from onnx_attnfuse.errors import MissingDependencyError
from onnx_attnfuse.training.report import tell

_ORTMODULE = "onnxruntime.training.ortmodule"
INTEROP = "torch_interop_utils"
"""The C++ extension that runs custom functions of autograd."""
_HOLDS_SHARED_POINTERS = "std::shared_ptr<Node> grad_fn_;"
"""How its sources take PyTorch to hold gradient functions."""
_INTEROP = f"{_ORTMODULE}.torch_cpp_extensions.{INTEROP}"
_PUBLIC = "torch.onnx"
_MOVED_TO = "torch.onnx._internal.torchscript_exporter"
_MOVED = ("torch.onnx._internal.jit_utils", "torch.onnx._type_utils", "torch.onnx._globals")
"""The private modules of PyTorch's exporter that ORTModule imports."""
_NEEDED = "training needs onnxruntime-training 1.19.2 with torch 2.3 or newer (Python 3.8 to 3.11)"
_REMEDY = 'run pip install "onnx-attnfuse[training]" in an environment of its own, then build ORTModule\'s C++ extensions'


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of PyTorch that ORTModule does not know of."""

    name: str
    """The change in words, for the line that tells of it."""
    present: Callable[[], bool]
    """Whether the PyTorch that is installed has the change, and nothing has made up for it yet."""
    mend: Callable[[], None]
    """Makes up for the change."""


def mend_before_import() -> tuple[str, ...]:
    """Makes ORTModule importable.

    Returns:
        The names of the changes that were there.
    """
    return _mended(BEFORE_IMPORT)


def mend_after_import() -> tuple[str, ...]:
    """Makes an imported ORTModule able to train.

    Returns:
        The names of the changes that were there.
    """
    return _mended(AFTER_IMPORT)


def _mended(changes: Iterable[Change]) -> tuple[str, ...]:
    names: list[str] = []
    for change in changes:
        if change.present():
            change.mend()
            names.append(change.name)
    return tuple(names)


def _exists(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _missing_modules() -> list[str]:
    return [] if not _exists(_MOVED_TO) else [name for name in _MOVED if not _exists(name)]


def _alias_modules() -> None:
    """Enters each moved module under its old name too."""
    for old in _missing_modules():
        parent, _, name = old.rpartition(".")
        module = importlib.import_module(f"{_MOVED_TO}.{name}")
        sys.modules[old] = module
        setattr(importlib.import_module(parent), name, module)


def _symbolic_modules() -> list[tuple[ModuleType, ModuleType]]:
    """The public modules of symbolic functions, each with the one that they were moved to."""
    if not _exists(_MOVED_TO):
        return []
    home = importlib.import_module(_MOVED_TO)
    names = [found.name for found in pkgutil.iter_modules(home.__path__) if found.name.startswith("symbolic_")]
    public = [name for name in names if _exists(f"{_PUBLIC}.{name}")]
    return [(importlib.import_module(f"{_PUBLIC}.{name}"), importlib.import_module(f"{_MOVED_TO}.{name}")) for name in public]


def _hides_names() -> bool:
    return any(not vars(public).keys() >= vars(moved).keys() for public, moved in _symbolic_modules())


def _show_names() -> None:
    """Gives the public modules of symbolic functions their private names back."""
    for public, moved in _symbolic_modules():
        for name, found in vars(moved).items():
            vars(public).setdefault(name, found)


def is_built(name: str) -> bool:
    """Whether an extension is where ORTModule looks for it."""
    return any(extensions().glob(f"{name}*.so"))


def interop_can_be_built() -> bool:
    """Whether the PyTorch that is installed holds gradient functions as the sources of `torch_interop_utils` take them."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    header = pathlib.Path(spec.origin).parent / "include" / "torch" / "csrc" / "autograd" / "variable.h"
    return not header.is_file() or _HOLDS_SHARED_POINTERS in header.read_text(encoding="utf-8")


def extensions() -> pathlib.Path:
    """The folder of ORTModule's C++ extensions."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    return pathlib.Path(spec.origin).parent / "training" / "ortmodule" / "torch_cpp_extensions"


def _lacks_interop() -> bool:
    return _INTEROP not in sys.modules and not is_built(INTEROP) and not interop_can_be_built()


def _do_without_interop() -> None:
    """Imports ORTModule without custom functions of autograd: a module that has some is refused when it is exported."""
    replacement: Any = ModuleType(_INTEROP)
    replacement.clear_all_grad_fns = _nothing
    sys.modules[_INTEROP] = replacement
    with mock.patch.dict(os.environ, {"ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "0"}):
        importlib.import_module(f"{_ORTMODULE}._custom_autograd_function")
    manager = _transition_manager()
    original = manager._get_exported_model

    @functools.wraps(original)
    def export(**named: Any) -> Any:
        return original(**{**named, "enable_custom_autograd_function": True})  # else only their forward part is taken

    manager._get_exported_model = staticmethod(export)
    exporter: Any = importlib.import_module(_PUBLIC)
    exporter.register_custom_op_symbolic("prim::PythonOp", _refuse_function, 1)


def _refuse_function(graph: Any, *_: Any, **named: Any) -> None:
    """The symbolic function of custom functions of autograd.

    Raises:
        MissingDependencyError: Always; PyTorch would go on without the function's own backward part.
    """
    name = named.get("name", "a function")
    raise MissingDependencyError(
        f"the module has a torch.autograd.Function ({name}), which ORTModule cannot train with this version of torch; "
        "train it with torch 2.5 or older, or without ORTModule"
    )


def _transition_manager() -> Any:
    return importlib.import_module(f"{_ORTMODULE}._graph_transition_manager").GraphTransitionManager


def _exports_by_dynamo() -> bool:
    exporter: Any = importlib.import_module(_PUBLIC)
    dynamo = inspect.signature(exporter.export).parameters.get("dynamo")
    return dynamo is not None and dynamo.default is True and not hasattr(_transition_manager().__init__, "__wrapped__")


def _export_by_torchscript() -> None:
    """Lets ORTModule, and nobody else, ask for the exporter that it was written for."""
    manager = _transition_manager()
    original = manager.__init__

    @functools.wraps(original)
    def initialize(self: Any, *inputs: Any, **named: Any) -> None:
        original(self, *inputs, **named)
        self._export_extra_kwargs = {**self._export_extra_kwargs, "dynamo": False}

    manager.__init__ = initialize


def _profiling() -> Any:
    return importlib.import_module("onnxruntime.training.utils.torch_profile_utils")


def _has_no_nvtx() -> bool:
    torch: Any = importlib.import_module("torch")
    if _profiling().torch_nvtx_range_push is _nothing:
        return False
    try:
        torch.cuda.nvtx.range_push("attnfuse")
        torch.cuda.nvtx.range_pop()
    except (AttributeError, RuntimeError):
        return True
    return False


def _nothing(*_: Any) -> None:
    """The value of arguments that are left out."""


def _leave_ranges_out() -> None:
    """Takes the profiler's ranges out of ORTModule's steps."""
    profiling = _profiling()
    profiling.torch_nvtx_range_push = profiling.torch_nvtx_range_pop = _nothing


EXPORTER_MOVED = Change("its ONNX exporter was moved", lambda: bool(_missing_modules()), _alias_modules)
NAMES_HIDDEN = Change("the exporter's private names are hidden", _hides_names, _show_names)
DYNAMO_BY_DEFAULT = Change("export is by dynamo unless asked otherwise", _exports_by_dynamo, _export_by_torchscript)
NO_PROFILER = Change("there is no NVTX in this build", _has_no_nvtx, _leave_ranges_out)
NO_CUSTOM_FUNCTIONS = Change(
    "custom functions of autograd are refused, as they are held another way", _lacks_interop, _do_without_interop
)
BEFORE_IMPORT = (EXPORTER_MOVED, NAMES_HIDDEN, NO_CUSTOM_FUNCTIONS)
AFTER_IMPORT = (DYNAMO_BY_DEFAULT, NO_PROFILER)


def ortmodule() -> ModuleType:
    """`onnxruntime.training.ortmodule`, imported now, and able to train with the PyTorch that is installed.

    Raises:
        MissingDependencyError: onnxruntime-training is not installed, or cannot be imported with this version of PyTorch.
    """
    if importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxruntime.training") is None:
        raise MissingDependencyError(f"{_NEEDED}, which is not installed; {_REMEDY}")
    try:
        mended = mend_before_import()
        module = importlib.import_module("onnxruntime.training.ortmodule")
        _ = module.ORTModule
        _ = module.register_graph_optimizer
        mended += mend_after_import()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{_NEEDED}, and the installed package cannot be used ({_first_line(error)}); {_REMEDY}"
        ) from error
    if mended:
        tell([f"attnfuse: ORTModule was made to run on torch {importlib.metadata.version('torch')}: {'; '.join(mended)}"])
    return module


def torch_version() -> tuple[int, int]:
    """The installed version of PyTorch."""
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
