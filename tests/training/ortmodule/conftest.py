"""What all tests in ORTModule need: no silent way back to PyTorch, and no more of its banners than necessary."""

from __future__ import annotations

import os

os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
os.environ["ATTNFUSE_DEBUG"] = "0"
