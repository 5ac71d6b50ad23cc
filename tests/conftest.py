"""What all tests share: Hypothesis without chance, and which cases of a large table are left to `make test-all`."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings

from tests.support.sampling import sample

settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a test that is marked `sampled` as exhaustive, all but a sample."""
    tables: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            table, _, case = item.nodeid.partition("[")
            tables[table][case] = item
    for cases in tables.values():
        marker = next(iter(cases.values())).get_closest_marker("sampled")
        kept = set(sample(list(cases), **marker.kwargs))
        for case, item in cases.items():
            if case not in kept:
                item.add_marker(pytest.mark.exhaustive)
