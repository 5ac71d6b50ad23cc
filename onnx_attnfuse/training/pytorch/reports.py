"""Reports on captured graphs: kept where a caller finds them, and told once."""

from __future__ import annotations

import logging
import os
import sys

from onnx_attnfuse.training.report import TrainingReport

LOG = logging.getLogger("onnx_attnfuse.training")


class Reports(list[TrainingReport]):
    """The reports on the graphs of a module, one for each that was captured."""

    def tell(self, report: TrainingReport) -> None:
        """Keeps a report, and logs it; where the program's logging would swallow it, it goes to stderr."""
        self.append(report)
        if report.sites or report.defect is not None:
            _say(report.lines())

    def amend(self, report: TrainingReport, other: TrainingReport) -> None:
        """Puts another report into the place of one, and tells what it says of the first step."""
        self[next(place for place, item in enumerate(self) if item is report)] = other
        _say([f"attnfuse: {other.first_step}"])


def _say(lines: list[str]) -> None:
    if os.environ.get("ATTNFUSE_DEBUG", "1") == "0" or os.environ.get("RANK", "0") != "0":
        return
    if LOG.hasHandlers() and LOG.isEnabledFor(logging.INFO):
        for line in lines:
            LOG.info(line)
        return
    sys.stderr.write("".join(f"{line}\n" for line in lines))
