"""Log lines on each attention: the chosen operator and kernel at level INFO, every refusal at level DEBUG."""

from __future__ import annotations

import logging

from onnx_attnfuse.kernels.policy import SELECTION
from onnx_attnfuse.report.model import SiteReport

_LOG = logging.getLogger(SELECTION)


def log_site(site: SiteReport) -> None:
    """Logs one attention."""
    if site.status == "not-attention":
        return
    kernel = site.kernel
    if kernel is None:
        _LOG.info("%s: selected nothing, it stays %s", site.name, site.op or "spelled out")
    else:
        when = f" if {kernel.when}" if kernel.when else ""
        _LOG.info("%s: selected %s with %s%s on %s", site.name, site.op, kernel.forecast, when, kernel.device)
        for item in kernel.refused:
            _LOG.debug("%s: %s refused, %s: %s", site.name, item.kernel, item.code, item.message)
    for reason in site.reasons:
        _LOG.debug("%s: %s: %s", site.name, reason.code, reason)
