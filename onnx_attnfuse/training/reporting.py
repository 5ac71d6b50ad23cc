"""Lines for the person who trains: to the logger where that lets them through, else to stderr, from rank 0 alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

LOG = logging.getLogger("onnx_attnfuse.training")


def debug_level() -> int:
    """The level that ATTNFUSE_DEBUG sets: 0 nothing, 1 a line for each site, 2 the graphs too."""
    level = os.environ.get("ATTNFUSE_DEBUG", "1")
    return int(level) if level.isdigit() else 1


def tell(lines: Sequence[str]) -> None:
    """Logs the lines; writes them to stderr where the program's logging would swallow them."""
    if debug_level() == 0 or os.environ.get("RANK", "0") != "0":
        return
    if LOG.hasHandlers() and LOG.isEnabledFor(logging.INFO):
        for line in lines:
            LOG.info(line)
        return
    sys.stderr.write("".join(f"{line}\n" for line in lines))
