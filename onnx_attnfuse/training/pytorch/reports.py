"""Reports on captured graphs: kept where a caller finds them, and told once."""

from __future__ import annotations

from onnx_attnfuse.training.report import TrainingReport
from onnx_attnfuse.training.reporting import tell


class Reports(list[TrainingReport]):
    """The reports on the graphs of a module, one for each that was captured."""

    def tell(self, report: TrainingReport) -> None:
        """Keeps a report, and tells it where there is anything to tell."""
        self.append(report)
        if report.sites or report.defect is not None:
            tell(report.lines())

    def amend(self, report: TrainingReport, other: TrainingReport) -> None:
        """Puts another report into the place of one, and tells what it says of the first step."""
        self[next(place for place, item in enumerate(self) if item is report)] = other
        tell([f"attnfuse: {other.first_step}"])
