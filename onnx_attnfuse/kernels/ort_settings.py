"""Settings of ONNX Runtime for attention kernels: which ones a policy switches off, and the options and variables that do it.

The provider option `sdpa_kernel` belongs to one session; a variable of the environment counts for the whole process. So the
option is taken wherever it can say it. It lifts the least lengths of kernels too, and where it is given, cuDNN's kernel is no
longer preferred on sm90 and newer. All of it was read in ONNX Runtime 1.31 (docs/policy.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from onnx_attnfuse.kernels.device import NOTHING_SAID, Device, Switches
from onnx_attnfuse.kernels.forecast import EFFICIENT, FLASH, TENSORRT
from onnx_attnfuse.kernels.policy import Policy

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_CUDNN = "CUDNN_FLASH_ATTENTION"
_CUDNN_PREFERRED = 90
_BITS: Mapping[str, int] = {
    "FLASH_ATTENTION": 1,
    "EFFICIENT_ATTENTION": 2,
    "TRT_FUSED_ATTENTION": 4,
    _CUDNN: 8,
    "MATH": 16,
    "TRT_FLASH_ATTENTION": 32,
    "TRT_CROSS_ATTENTION": 64,
    "DECODER_ATTENTION": 512,
}
"""What `sdpa_kernel` is the sum of."""
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "FLASH_ATTENTION": {"ORT_DISABLE_FLASH_ATTENTION": "1"},
    "EFFICIENT_ATTENTION": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"},
    "TRT_FUSED_ATTENTION": {"ORT_DISABLE_FUSED_ATTENTION": "1", "ORT_DISABLE_FUSED_CROSS_ATTENTION": "1"},
    "TRT_FLASH_ATTENTION": {"ORT_DISABLE_TRT_FLASH_ATTENTION": "1"},
    _CUDNN: {"ORT_ENABLE_CUDNN_FLASH_ATTENTION": "0"},
}
"""The variables that switch a kernel off on CUDA."""
_ANY_LENGTH = {"ORT_MIN_SEQ_LEN_FLASH_ATTENTION_PACKED_QKV": "0", "ORT_MIN_SEQ_LEN_EFFICIENT_ATTENTION_FP32": "0"}
_CPU_FLASH_OFF = {"ORT_DISABLE_FLASH_ATTENTION": "1", "ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}


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
        options = [f"{self.provider} {name}={value} ({_named(value)})" for name, value in self.provider_options.items()]
        return options + [f"export {name}={value}" for name, value in self.environment.items()]


def _named(sdpa_kernel: str) -> str:
    return ", ".join(name for name, bit in _BITS.items() if int(sdpa_kernel) & bit)


def switches_for(policy: Policy, device: Device, *, may_switch_off: bool = True) -> Switches:
    """The switches of ONNX Runtime that carry a policy out.

    Args:
        policy: Which kernels are wanted, and which are not.
        device: What the model will run on.
        may_switch_off: False where the model has attention operators that may not run without a kernel.
    """
    off: set[str] = set()
    if policy.flash is False or (policy.efficient and not policy.flash):
        off |= FLASH
    if policy.efficient is False:
        off |= EFFICIENT
    if policy.efficient and not policy.flash:
        off |= TENSORRT
    said = policy.flash is not None or policy.efficient is not None
    if device.ep == "cpu":
        return Switches(frozenset(off & {"FLASH_ATTENTION"} if may_switch_off and policy.flash is False else ()))
    return Switches(frozenset(off if may_switch_off else ()), any_length=said)


def session_for(device: Device) -> Session:
    """The settings that say what `device.switches` says."""
    off, provider = device.switches.off, _PROVIDERS[device.ep]
    if device.switches == NOTHING_SAID:
        return Session(provider)
    options, variables = dict[str, str](), dict[str, str]()
    if device.ep == "cpu":
        variables = _CPU_FLASH_OFF
    elif device.arch >= _CUDNN_PREFERRED and _CUDNN not in off:
        variables = {name: value for kernel in sorted(off) for name, value in _VARIABLES[kernel].items()} | _ANY_LENGTH
    else:
        options = {"sdpa_kernel": str(sum(bit for name, bit in _BITS.items() if _is_on(name, off)))}
    return Session(provider, options, variables, tuple(sorted(off)), device.switches.any_length)


def _is_on(kernel: str, off: frozenset[str]) -> bool:
    """Whether `sdpa_kernel` names it; cuDNN's is by itself off where it is not preferred, and would be preferred nowhere."""
    if kernel == "TRT_CROSS_ATTENTION":
        return "TRT_FUSED_ATTENTION" not in off
    return kernel not in off and kernel != _CUDNN
