"""The execution providers that are installed here, those of plugin packages among them."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.kernels import providers

_SUFFIX = "ExecutionProvider"
_PLUGINS = ("onnxruntime_",)
"""How the modules of plugin packages begin; such a module says where its library is."""
_DEFAULTS: Mapping[str, Mapping[str, str]] = {"qnn": {"backend_path": "libQnnHtp.so", "soc_model": "60"}}
"""Options without which an execution provider runs nothing, or little: the emulator is of a chip with less memory by itself."""


@dataclasses.dataclass(frozen=True)
class Installed:
    """An execution provider that sessions can be made with."""

    name: str
    """The name that a caller has for it."""
    ort_name: str
    """Its name in ONNX Runtime."""
    library: str | None = None
    """The library to register, if it is a plugin."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The packages of ONNX Runtime that are installed, and their versions."""


def find(name: str, options: Mapping[str, str] | None = None) -> Installed:
    """An execution provider by its name, as `cpu` or `openvino`.

    Args:
        name: The name.
        options: Options of the provider for each session, beside those that it cannot do without.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        OptionError: It is not installed here, or does not take one of the options.
    """
    found = {item.name: item for item in _all()}
    if name not in found:
        raise OptionError(f"ep is {name!r}, which is not installed here; choose {' or '.join(sorted(found))}, or install it")
    _check(name, options or {})
    return dataclasses.replace(found[name], options={**_DEFAULTS.get(name, {}), **(options or {})}, versions=_versions())


def _check(name: str, options: Mapping[str, str]) -> None:
    """Refuses options that a provider is known not to take: most go on without a word, or on the CPU.

    Raises:
        OptionError: It does not take one of them.
    """
    taken = providers.provider(name).session_options if name in providers.names() else None
    unknown = [] if taken is None else sorted(set(options) - taken)
    if unknown and not taken:
        raise OptionError(f"provider option {unknown[0]!r}: {name} takes none; leave it out")
    if unknown:
        raise OptionError(f"{name} takes no provider option {unknown[0]!r}; choose one of {', '.join(sorted(taken or ()))}")


def _all() -> Iterator[Installed]:
    try:
        ort: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependencyError("onnxruntime is not installed; pip install onnx-attnfuse[cpu]") from error
    for ort_name in ort.get_available_providers():
        yield Installed(_name(ort_name), ort_name)
    for module in pkgutil.iter_modules():
        if module.name.startswith(_PLUGINS) and hasattr(found := importlib.import_module(module.name), "get_library_path"):
            ort_name = found.get_ep_name()
            yield Installed(_name(ort_name), ort_name, str(found.get_library_path()))


def _name(ort_name: str) -> str:
    """The name that its record has, or the one that ONNX Runtime has for it, in small letters."""
    records = [record.name for record in providers.every() if record.ort_name == ort_name]
    return records[0] if records else ort_name.removesuffix(_SUFFIX).lower()


def _versions() -> dict[str, str]:
    names = (found.metadata["Name"] for found in importlib.metadata.distributions())
    return {name: importlib.metadata.version(name) for name in sorted(set(names)) if name and name.startswith("onnxruntime")}
