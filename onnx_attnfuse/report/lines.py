"""Lines for a terminal or a log, in which names of a model may hold line breaks and escape sequences."""

from __future__ import annotations

import logging
import unicodedata
from typing import TYPE_CHECKING

from onnx_attnfuse.kernels.policy import SELECTION

if TYPE_CHECKING:
    from onnx_attnfuse.report.model import SiteReport


def one_line(text: str) -> str:
    r"""A text in one line, control characters escaped as Python writes them.

    one_line("softmax\n::error::all is well")   # "softmax\\n::error::all is well"

    Line and paragraph separators and what changes the direction of writing count as control characters.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    is_control = unicodedata.category(letter) in {"Cc", "Cf", "Zl", "Zp", "Cs"}
    return letter.encode("unicode_escape").decode("ascii") if is_control else letter


_LOG = logging.getLogger(SELECTION)


def log_site(site: SiteReport) -> None:
    """Logs one attention."""
    if site.status == "not-attention":
        return
    kernel, name = site.kernel, one_line(site.name)
    if kernel is None:
        _LOG.info("%s: selected nothing, %s", name, f"it stays {site.op}" if site.op else "left unfused")
    else:
        when = f" if {kernel.when}" if kernel.when else ""
        _LOG.info("%s: selected %s with %s%s on %s", name, site.op, kernel.forecast, when, kernel.device)
        for item in kernel.refused:
            _LOG.debug("%s: %s refused, %s: %s", name, item.kernel, item.code, item.message)
    for reason in site.reasons:
        _LOG.debug("%s: %s: %s", name, reason.code, one_line(str(reason)))
