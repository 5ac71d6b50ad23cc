"""Meanings of the exit status; of several models the largest counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Exit(enum.IntEnum):
    """Exit status of `attnfuse`."""

    DONE = 0
    TOO_FEW = 1
    BAD_INPUT = 2
    DIFFERS = 3
    DEFECT = 4
    INTERRUPTED = 130
    TERMINATED = 143


MEANINGS: Mapping[int, str] = {
    Exit.DONE: "Done.",
    Exit.TOO_FEW: "Written, but fewer sites are fused than --min-fused or --require-all asks for.",
    Exit.BAD_INPUT: "The command line or the model cannot be used, or the result not be written; one line on stderr says why.",
    Exit.DIFFERS: (
        "Rewrites differed when verified, or a pattern of yours failed; these places stay as they were, and what was written "
        "is right. "
        "Or the whole model differed (--verify model), or a conversion did, and nothing was written; "
        "or two models that were compared differ, or a certificate does not hold."
    ),
    Exit.DEFECT: (
        "A defect of attnfuse; attnfuse-error-<time>.txt says where, please report it. Where it says that the rest is done, "
        "what was written is right."
    ),
    Exit.INTERRUPTED: "Interrupted.",
    Exit.TERMINATED: "Ended by SIGTERM; what was being written is removed.",
}
"""Each of them in a sentence."""
