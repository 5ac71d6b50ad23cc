"""The device that a model will run on: execution provider, architecture, and the switches of its kernels."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from typing import TYPE_CHECKING

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels import providers

if TYPE_CHECKING:
    from onnx_attnfuse.kernels.execution_provider import ExecutionProvider


@dataclasses.dataclass(frozen=True)
class Switches:
    """Settings that take kernels of ONNX Runtime away or allow more; none by default."""

    off: frozenset[str] = frozenset()
    """Kernels that it must not choose."""
    any_length: bool = False
    """Kernels are chosen for short sequences too, where ONNX Runtime by itself takes another one."""


NOTHING_SAID = Switches()


@dataclasses.dataclass(frozen=True)
class Device:
    """An execution provider of ONNX Runtime, and its GPU."""

    ep: str
    """The name of the provider."""
    arch: int = 0
    """Compute capability times ten; 0 where there are no architectures."""
    switches: Switches = NOTHING_SAID

    @property
    def provider(self) -> ExecutionProvider:
        """The record of the execution provider."""
        return providers.provider(self.ep)

    @property
    def members(self) -> tuple[Device, ...]:
        """Each of several devices by itself, with the switches of all; none where it is one."""
        return tuple(Device(item.name, self.arch if item.architectures else 0, self.switches) for item in self.provider.members)

    @property
    def name(self) -> str:
        """`cpu`, or `cuda:sm90`."""
        return f"{self.ep}:sm{self.arch}" if self.provider.architectures else self.ep

    @property
    def lacks_kernels(self) -> bool:
        """Whether kernels are switched off that an operator may need."""
        switching = self.provider.switching
        return bool(self.switches.off) and not (switching is not None and switching.is_safe)


OLDEST = 1, 28
"""The oldest ONNX Runtime that models are written for; `pyproject.toml` asks for the same."""


def resolve(ep: str, arch: str | None = None) -> Device:
    """The device that the options name.

    Args:
        ep: The name of an execution provider, or `auto`: CUDA where the GPU build of onnxruntime is installed.
        arch: `sm80` and the like; None: the GPU here, or sm80 if there is none.

    Raises:
        OptionError: There is no such execution provider or architecture.
    """
    asked = None if ep == "auto" else providers.provider(ep)
    number = None if arch is None else _architecture(arch)
    chosen = asked or _chosen(number)
    if number is not None and number not in chosen.architectures:
        others = " or ".join(item.name for item in providers.every() if number in item.architectures)
        raise OptionError(f"arch {arch!r} is a GPU's; choose --ep {others} with it")
    here = None if number is not None or chosen.architecture_here is None else chosen.architecture_here()
    return Device(chosen.name, number or here or chosen.default_architecture)


def runtime_version(asked: str | None, provider: ExecutionProvider) -> tuple[int, int] | None:
    """The version of ONNX Runtime that a model will run on, major and minor; None is the newest.

    Args:
        asked: `1.30` or `1.30.0`; None: that of the provider's distribution, if it is installed here.
        provider: The provider that it will run on.

    Raises:
        OptionError: `asked` is no version, or one that nothing is known of.
    """
    if asked is None and not _is_installed(provider.distribution):
        return None
    version = importlib.metadata.version(provider.distribution) if asked is None else asked
    found = re.match(r"(\d+)\.(\d+)(\.|$)", version)
    if found is None and asked is not None:
        raise OptionError(f"onnxruntime is {asked!r}; give the version of ONNX Runtime as 1.30")
    if found is not None and asked is not None and (int(found[1]), int(found[2])) < OLDEST:
        known = ".".join(map(str, OLDEST))
        raise OptionError(f"onnxruntime is {asked!r}, and nothing is known of versions before {known}; give {known} or newer")
    return None if found is None else (int(found[1]), int(found[2]))


def _architecture(name: str) -> int:
    known = sorted({number for item in providers.every() for number in item.architectures})
    found = re.fullmatch(r"(?:sm_?)?(\d+)", name.lower())
    number = int(found[1]) if found else 0
    if number not in known:
        raise OptionError(f"arch is {name!r}; choose one of {', '.join(f'sm{item}' for item in known)}")
    return number


def _chosen(number: int | None) -> ExecutionProvider:
    """The provider that `auto` selects: one with the architecture, or one that is preferred and installed here."""
    for item in providers.every():
        if number in item.architectures or (number is None and item.is_preferred and _is_installed(item.distribution)):
            return item
    return providers.provider(providers.FALLBACK)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
