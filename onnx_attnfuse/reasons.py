"""Why something was not done: the currency between rooms, and a line in the report.

A `Reason` is data. Codes are stable and kebab-case, so that reports and tests can rely on them; the message is for a reader
and names the values that decided.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reason:
    """One refusal."""

    code: str
    """Stable identifier, kebab-case."""
    message: str
    """One sentence for a reader."""
    node: str | None = None
    """Name of the node that decided, if one did."""

    def __str__(self) -> str:
        return f"{self.message} [{self.node}]" if self.node else self.message


class Refused(Exception):
    """Carries a `Reason` out of a nested reading; never leaves the library."""

    def __init__(self, code: str, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.reason = Reason(code, message, node)
