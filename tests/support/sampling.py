"""Which cases of a large table `make test` runs."""

from __future__ import annotations

import re
from collections.abc import Sequence


def sample(names: Sequence[str], every: int | None = None) -> list[str]:
    """The cases that stay, by their names.

    Args:
        names: The ids of all cases, in order.
        every: Keep the first of every so many; without it each case in whose name a word is new, which is each value of each
            parameter at least once.
    """
    if every is not None:
        return list(names[::every])
    seen: set[str] = set()
    kept: list[str] = []
    for name in names:
        words = set(re.findall(r"\w+", name))
        if not words <= seen:
            kept.append(name)
        seen |= words
    return kept
