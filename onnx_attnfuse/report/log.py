"""Log lines on each attention: the chosen operator and kernel at level INFO, every refusal at level DEBUG."""

from __future__ import annotations

import logging

from onnx_attnfuse.kernels.policy import SELECTION
from onnx_attnfuse.report.lines import one_line
from onnx_attnfuse.report.model import SiteReport

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
