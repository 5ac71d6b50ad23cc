"""Settings of ONNX Runtime for attention kernels: which ones a policy switches off, and the options and variables that do it.

The record of each execution provider has its settings (`kernels/providers/`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_attnfuse.kernels import providers
from onnx_attnfuse.kernels.device import NOTHING_SAID, Device, Switches
from onnx_attnfuse.kernels.forecast import EFFICIENT, FLASH, TENSORRT
from onnx_attnfuse.kernels.policy import Policy


@dataclasses.dataclass(frozen=True)
class Session:
    """Settings for ONNX Runtime with which it chooses the kernels that were forecast."""

    provider: str
    """The execution provider."""
    provider_options: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Variables to set before the session is made; they count for every session of the process."""
    off: tuple[str, ...] = ()
    """The kernels that this switches off."""
    any_length: bool = False
    """Whether kernels are chosen for short sequences too, where ONNX Runtime by itself takes another one."""

    def lines(self) -> list[str]:
        """The settings for a reader, one a line; none where ONNX Runtime is left to itself."""
        words = next((item.option_words for item in providers.every() if item.ort_name == self.provider), None)
        options = [
            f"{self.provider} {name}={value}{'' if words is None else f' ({words(name, value)})'}"
            for name, value in self.provider_options.items()
        ]
        return options + [f"export {name}={value}" for name, value in self.environment.items()]


def switches_for(policy: Policy, device: Device, *, may_switch_off: bool = True) -> Switches:
    """The switches of ONNX Runtime that carry a policy out.

    Args:
        policy: Which kernels are wanted, and which are not.
        device: The device of the model.
        may_switch_off: False where the model has attention operators that may not run without a kernel.
    """
    switching = device.provider.switching
    if switching is None:
        return NOTHING_SAID
    off: frozenset[str] = frozenset()
    if policy.flash is False:
        off |= FLASH
    if policy.efficient is False:
        off |= EFFICIENT
    if switching.narrows and policy.efficient and not policy.flash:
        off |= FLASH | TENSORRT
    said = policy.flash is not None or policy.efficient is not None
    return Switches(off & switching.kernels if may_switch_off else frozenset(), any_length=switching.narrows and said)


def session_for(device: Device, *, has_if: bool = False) -> Session:
    """The settings that say what `device.switches` says, and those that a model wants.

    Args:
        device: The device of the model.
        has_if: The model has an If.
    """
    off, provider = device.switches.off, device.provider
    options = dict(provider.options_for_if) if has_if else dict[str, str]()
    if device.switches == NOTHING_SAID or provider.switching is None:
        return Session(provider.ort_name, options)
    found = provider.switching.settings(device.arch, off)
    chosen = {**found.options, **options}
    return Session(provider.ort_name, chosen, found.environment, tuple(sorted(off)), device.switches.any_length)
