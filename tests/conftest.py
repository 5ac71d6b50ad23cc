"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")
