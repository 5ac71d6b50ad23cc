"""The outcome of sharing the cache of a decoder, for the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.attention.match.candidates import Candidate
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.decoder_feeds import Loop
from onnx_attnfuse.verify.verdict import Verified


@dataclasses.dataclass(frozen=True)
class SharedCache:
    """The outcome of sharing the cache of one graph."""

    decoder: ServedDecoder | None = None
    """The decoder; None: the cache is as it was."""
    sites: Mapping[ir.Node, SiteReport] = dataclasses.field(default_factory=dict["ir.Node", SiteReport])
    """The attentions that share the buffer, by the node that each was found at."""
    candidates: tuple[Candidate, ...] = ()
    """The attentions that share the buffer as they were found, in order."""
    reasons: Mapping[str, Reason] = dataclasses.field(default_factory=dict[str, Reason])
    """Why the caches of others were left, by the names of the attentions."""
    note: str | None = None
    """A line on the model."""
    source: ir.Model | None = None
    """The graph as it was, where there is a decoder; so is the next."""
    loop: Loop | None = None
    """How both are run."""
    check: Callable[[], Verified | None] | None = None
    """Judges the decoder as it is by then against its source; raises `Refused` where it differs."""
    tables: str | None = None
    """The name of the positions that tables of rotations have rows for; None: there are no tables."""

    def joined(self, others: Sequence[SiteReport]) -> list[SiteReport]:
        """The reports on all attentions: those that share the buffer, then `others`, with why the cache of each was left."""
        reasons = [self.reasons.get(site.name) for site in others]
        others_reported = [
            site if reason is None else dataclasses.replace(site, reasons=(*site.reasons, reason))
            for site, reason in zip(others, reasons, strict=True)
        ]
        return [*(self.sites[item.node] for item in self.candidates), *others_reported]
