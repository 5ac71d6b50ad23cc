"""What all tests share: Hypothesis without chance, and which cases of a large table are left to `make test-all`."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tail of each `sampled` table as exhaustive.

    What stays is every case whose id has a word that no earlier one has, which is each value of each parameter at least once, or
    every n-th case where the marker says `every=n`.
    """
    words: defaultdict[object, set[str]] = defaultdict(set)
    counts: defaultdict[object, int] = defaultdict(int)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or not isinstance(item, pytest.Function):
            continue
        found, every = set(re.findall(r"\w+", item.callspec.id)), marker.kwargs.get("every")
        is_tail = found <= words[item.function] if every is None else counts[item.function] % every > 0
        words[item.function] |= found
        counts[item.function] += 1
        if is_tail:
            item.add_marker(pytest.mark.exhaustive)
