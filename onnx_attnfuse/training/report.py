"""Report on a module's attentions when its training graph is built: data, and a line per site."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.reasons import Reason


@dataclasses.dataclass(frozen=True)
class TrainingSiteReport:
    """Report on one attention of a training graph."""

    name: str
    """The name of its softmax."""
    kernel: str | None
    """The kernel that computes the attention now, forward and backward; None: the nodes that did before."""
    mask: str | None = None
    """The kinds of the mask, as `SiteReport.mask` has them; None where it was not read."""
    mask_text: str | None = None
    """The mask as a formula."""
    shape: str = ""
    """Heads and head size."""
    dropout: float = 0.0
    handed: str = ""
    """How the mask is passed."""
    own_call: bool = False
    """The attention is a call of PyTorch that the module makes itself, and that stays."""
    deterministic: bool = True
    """Gradients are the same bit for bit in each run, as PyTorch was switched when the graph was captured."""
    buffers: tuple[str, ...] = ()
    """Inputs whose content the attention was read with, by their names in the graph."""
    reasons: tuple[Reason, ...] = ()
    """Why the attention is not fused; nothing for one that is."""
    others: tuple[tuple[str, Reason], ...] = ()
    """Kernels that were not taken, and why not."""

    @property
    def fused(self) -> bool:
        """Whether a kernel computes the attention."""
        return self.kernel is not None

    def line(self) -> str:
        """The site in one line."""
        details = ", ".join(filter(None, [self.shape, self.mask, f"dropout {self.dropout:g}" if self.dropout else ""]))
        head = f"{self.name} ({details})" if details else self.name
        others = "; ".join(f"{name}: {reason}" for name, reason in self.others)
        if self.kernel is not None:
            also = ", not deterministic" * (not self.deterministic) + (f" (not {others})" if others else "")
            return f"{head}: {self.kernel}, forward and backward, {self.handed}{also}"
        why = "; ".join(map(str, self.reasons))
        return f"{head}: left as it is: {'; '.join(filter(None, [why, others]))}"


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """Report on all attentions of a training graph."""

    device: str
    sites: tuple[TrainingSiteReport, ...]
    policy: str = ""
    defect: Reason | None = None
    """A failure inside attnfuse, for which the whole graph was left as it was."""
    first_step: str = ""
    """The result of the first step, where it was compared with the module's own."""

    def verified(self, words: str) -> TrainingReport:
        """The report after a first step that was as it should be."""
        return dataclasses.replace(self, first_step=f"verified: {words}")

    def unverified(self, reason: Reason) -> TrainingReport:
        """The report after a first step that could not be held against anything."""
        return dataclasses.replace(self, first_step=f"not verified: {reason}")

    def taken_back(self, reason: Reason) -> TrainingReport:
        """The report after a first step that was wrong, so that nothing is fused."""
        sites = tuple(dataclasses.replace(site, kernel=None, reasons=(*site.reasons, reason)) for site in self.sites)
        words = f"wrong, so all attentions are taken back, please report it with the module: {reason}"
        return dataclasses.replace(self, sites=sites, first_step=words)

    @property
    def fused(self) -> int:
        """How many sites a kernel computes, calls of the module's own included."""
        return sum(site.fused for site in self.sites)

    @property
    def buffers(self) -> frozenset[str]:
        """Inputs whose content a fused attention was read with: with another content the graph is another."""
        return frozenset(name for site in self.sites if site.fused for name in site.buffers)

    def lines(self) -> list[str]:
        """The report as text."""
        if self.defect is not None:
            return [f"attnfuse: the graph was left as it was: {self.defect}"]
        if not self.sites:
            return [f"attnfuse: found no attention in a captured graph on {self.device}{self.policy}"]
        own = sum(site.own_call for site in self.sites)
        kept = f", {own} kept as the module's own call" if own else ""
        done = f"{self.fused - own} of {len(self.sites)} attentions fused{kept}"
        head = f"attnfuse: {done}, forward and backward, on {self.device}{self.policy}"
        last = [f"attnfuse: {self.first_step}"] if self.first_step else []
        return [head, *(f"attnfuse: {site.line()}" for site in self.sites), *last]


def shape_in_words(spec: AttentionSpec) -> str:
    """Heads and head size of an attention, for a reader."""
    heads, size = length(spec.axes.n), length(spec.axes.h)
    return f"{heads} heads of {size}" if isinstance(size, int) and isinstance(heads, int) else ""


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
