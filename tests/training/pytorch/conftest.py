"""What tests of training on PyTorch share: policy and reports are those of an environment without variables of ours."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks, which other tests import, set some for their process."""
    for name in os.environ:
        if name.startswith(("ATTNFUSE_", "ORTMODULE_")) or name == "RANK":
            monkeypatch.delenv(name)
