"""What the exit status says.

  0  done
  1  done and written, but fewer sites are fused than --require-all or --min-fused asks for
  2  the command line or the model cannot be used; one line on stderr says why
  3  sites differed when verified; they were left as they were, so what was written is right; or the whole model differed
     (--verify model) or a conversion did, and nothing was written; or two models that were compared differ
  4  a defect of this program; a report file in the working directory says where
130  interrupted
"""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """Exit status of `attnfuse`."""

    DONE = 0
    TOO_FEW = 1
    BAD_INPUT = 2
    DIFFERS = 3
    DEFECT = 4
    INTERRUPTED = 130
