"""Which kernels may be used in training, and the environment that says so."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from onnx_attnfuse.errors import OptionError

_SWITCHES = {
    "flash": ("ATTNFUSE_USE_FLASH_ATTENTION", "ORTMODULE_USE_FLASH_ATTENTION"),
    "efficient": ("ATTNFUSE_USE_EFFICIENT_ATTENTION", "ORTMODULE_USE_EFFICIENT_ATTENTION"),
    "sdpa_fallback": ("ATTNFUSE_SDPA_FALLBACK", "ORTMODULE_ATEN_SDPA_FALLBACK"),
}
"""The variables of each field, ours before ONNX Runtime's."""
_TRUE, _FALSE = frozenset(["1", "true", "yes", "on"]), frozenset(["0", "false", "no", "off"])


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is asked for, what is forbidden, and what is left to us."""

    flash: bool | None = None
    """Flash attention: always where it can be, never, or where it is the best there is."""
    efficient: bool | None = None
    """Memory-efficient attention, likewise."""
    sdpa_fallback: bool | None = None
    """Unmasked `scaled_dot_product_attention` is kept as one call of PyTorch when the module is exported; None: no."""
    seen: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The variables that said so."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Policy:
        """What the environment asks for; it is read when this is called.

        Args:
            environment: Variables; by default those of the process.

        Raises:
            OptionError: A variable is neither true nor false.
        """
        variables = os.environ if environment is None else environment
        chosen: dict[str, bool] = {}
        seen: list[str] = []
        for field, names in _SWITCHES.items():
            name = next((name for name in names if variables.get(name, "") != ""), None)
            if name is not None:
                chosen[field] = _truth(name, variables[name])
                seen.append(f"{name}={variables[name]}")
        return cls(**chosen, seen=tuple(seen))


def _truth(name: str, value: str) -> bool:
    word = value.strip().lower()
    if word not in _TRUE | _FALSE:
        raise OptionError(f"{name} is {value!r}; set it to 1 or 0, or unset it")
    return word in _TRUE
