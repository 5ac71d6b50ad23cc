"""Which kernels a caller wants, and what the environment says about that.

    Policy(flash=True)                      explicit
    Policy.from_environment()               ATTNFUSE_USE_FLASH_ATTENTION, else ORTModule's, else USE_FLASH_ATTENTION

Nothing is read when this is imported. docs/policy.md says what a policy means for one attention.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from onnx_attnfuse.errors import OptionError

KernelPreference = Literal["flash", "efficient", "sdpa_fallback"]
"""A kind of kernels, or what ORTModule falls back to."""
_OURS: Mapping[KernelPreference, str] = {
    "flash": "ATTNFUSE_USE_FLASH_ATTENTION",
    "efficient": "ATTNFUSE_USE_EFFICIENT_ATTENTION",
    "sdpa_fallback": "ATTNFUSE_SDPA_FALLBACK",
}
_ORTMODULE: Mapping[KernelPreference, str] = {
    "flash": "ORTMODULE_USE_FLASH_ATTENTION",
    "efficient": "ORTMODULE_USE_EFFICIENT_ATTENTION",
    "sdpa_fallback": "ORTMODULE_ATEN_SDPA_FALLBACK",
}
_PLAIN: Mapping[KernelPreference, str] = {
    "flash": "USE_FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "sdpa_fallback": "SDPA_FALLBACK",
}
"""Other programs may read these, too, so that a value that is neither 0 nor 1 is not an error here."""
_TRITON = "ORTMODULE_USE_TRITON"
"""ORTModule has its flash attention from Triton: without this it looks at no other word about it."""

SELECTION = "onnx_attnfuse.selection"
"""The log of what was chosen for each attention; the command shows it at ATTNFUSE_DEBUG=1, with every refusal at 2."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which kernels to use; True: wanted, False: switched off, None: nothing is said about them.

    Where several are wanted, they are tried in the order of the fields, attention by attention.
    """

    flash: bool | None = None
    """Fuse only attention that flash kernels run (FlashAttention-2 or cuDNN on a GPU, ONNX Runtime's on a CPU); or never
    use them."""
    efficient: bool | None = None
    """Fuse only attention that the memory-efficient kernels run; or never use them."""
    sdpa_fallback: bool | None = None
    """Fuse only attention without a mask, whichever kernel runs it."""

    @property
    def wishes(self) -> tuple[KernelPreference, ...]:
        """The wanted kinds of kernels, in the order in which they are tried."""
        wishes: tuple[KernelPreference, ...] = ("flash", "efficient", "sdpa_fallback")
        return tuple(preference for preference in wishes if getattr(self, preference))

    def __str__(self) -> str:
        """For a reader: `flash, else efficient; no sdpa-fallback`."""
        off = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is False]
        parts = [", else ".join(self.wishes), ", ".join(f"no {name}" for name in off)]
        return "; ".join(filter(None, parts)).replace("_", "-") or "the fastest kernel of each site"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Policy:
        """The policy that the environment asks for.

        Args:
            environ: Variables by name; by default those of this process, as they are now.

        Raises:
            OptionError: A variable is neither 0 nor 1.
        """
        return read_environment(environ).policy


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment's variables about kernels, and the policy that they make."""

    seen: Mapping[str, str]
    """The variables that are set, those without an effect included."""
    policy: Policy
    idle: tuple[str, ...] = ()
    """Variables that are overruled, or that do nothing as the others are."""

    def line(self, policy: Policy) -> str:
        """One line: the variables that were seen, and the policy that came of them."""
        seen = [f"{name}={value}{' (no effect)' * (name in self.idle)}" for name, value in self.seen.items()]
        return f"{', '.join(seen)} -> {policy}"


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the variables; a variable that is empty counts as one that is not set.

    Ours are 0 or 1, and count before ORTModule's. There, 0 is what it is to ORTModule: nothing is asked for. Variables without a
    prefix count last.

    Raises:
        OptionError: A variable with a prefix is neither 0 nor 1.
    """
    environ = os.environ if environ is None else environ
    names = (*_OURS.values(), _TRITON, *_ORTMODULE.values())
    given = {name: number for name in names if (number := switch(name, environ)) is not None}
    found: dict[KernelPreference, bool | None] = {}
    idle: list[str] = []
    for preference, ours in _OURS.items():
        theirs = _ORTMODULE[preference]
        asked = given.get(theirs) == 1 and (preference != "flash" or given.get(_TRITON) == 1)
        found[preference] = bool(given[ours]) if ours in given else True if asked else None
        if theirs in given and (ours in given or not asked):
            idle.append(theirs)
        plain = environ.get(_PLAIN[preference], "").strip()
        if found[preference] is None and plain in {"0", "1"}:
            found[preference] = plain == "1"
        elif plain:
            idle.append(_PLAIN[preference])
    if _TRITON in given and not (given[_TRITON] and given.get(_ORTMODULE["flash"])):
        idle.append(_TRITON)
    seen = [*given, *(name for name in _PLAIN.values() if environ.get(name, "").strip())]
    return Environment({name: environ[name].strip() for name in seen}, Policy(**found), tuple(idle))


def switch(name: str, environ: Mapping[str, str], most: int = 1) -> int | None:
    """The number from 0 to `most` in a variable; None if the variable is not set.

    Raises:
        OptionError: It is something else.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    numbers = [str(number) for number in range(most + 1)]
    if text not in numbers:
        raise OptionError(f"{name} is {text!r}; set it to {', '.join(numbers[:-1])} or {numbers[-1]}, or unset it")
    return int(text)
