"""The report as frozen data; `to_dict` is the documented JSON (schema 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from onnx_attnfuse.attention.roundings import Place
from onnx_attnfuse.attention.spec import Layouts, Role
from onnx_attnfuse.containment import Failure
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.kernels.forecast import RefusedKernel, Speedup
from onnx_attnfuse.kernels.ort_settings import Session
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.mixers.candidates import MixerKind
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.report.pictures.model import SitePicture
from onnx_attnfuse.report.reason_codes import family_name
from onnx_attnfuse.serving.decoder import ServedDecoder
from onnx_attnfuse.verify.quantised.roundings import DequantisedAttention, QuantisedCache
from onnx_attnfuse.verify.verdict import Verified

Status = Literal["fused", "already-fused", "decomposed", "skipped", "not-attention"]
"""The result of a site; `decomposed`: in the unfused form that the execution provider fuses itself."""


@dataclasses.dataclass(frozen=True)
class LaterKernel:
    """A kernel that runs where the conditions of those before it do not hold."""

    kernel: str
    when: str | None
    """Its condition, in words; None: it takes the rest."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The forecast of the kernel that ONNX Runtime will run for a fused operator."""

    device: str
    """`cpu`, or `cuda:sm90`."""
    forecast: str
    when: str | None = None
    """Its condition, in words; None: it always runs."""
    otherwise: tuple[LaterKernel, ...] = ()
    """The kernels that run otherwise, in the order in which they are tried."""
    refused: tuple[RefusedKernel, ...] = ()
    gains: tuple[Speedup, ...] = ()

    @property
    def chain(self) -> tuple[LaterKernel, ...]:
        """All kernels that are forecast, in the order in which they are tried."""
        return (LaterKernel(self.forecast, self.when), *self.otherwise)


@dataclasses.dataclass(frozen=True)
class CaptureReport:
    """Whether ONNX Runtime can capture the model as it is now, so that it is replayed without the host."""

    name: str
    """The name of the record: `CUDA graph`."""
    possible: bool
    """Whether it can, once `sizes` are fixed."""
    sizes: tuple[str, ...] = ()
    """The sizes of inputs that are symbols yet, by name; one without a name is called after its input and axis."""
    blockers: tuple[Reason, ...] = ()
    """The reasons that prevent it, with the nodes."""

    def __str__(self) -> str:
        for first in self.blockers[:1]:
            others = len(self.blockers) - 1
            return f"{self.name}: no, {first}" + (f"; {others} more prevent{'s' * (others == 1)} it" if others else "")
        if self.sizes:
            return f"{self.name}: can be captured once its sizes are fixed ({', '.join(self.sizes)}); --cuda-graph does that"
        return f"{self.name}: can be captured"


@dataclasses.dataclass(frozen=True)
class PatternReport:
    """Tries, hits and time of one pattern."""

    name: str
    kind: str
    owner: str
    tries: int
    hits: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class RoundingReport:
    """A rounding that a quantiser put into an attention, or right beside it."""

    place: Place
    type: str | None
    """ONNX's name of the quantized type; None if it is not known."""
    axis: int | None
    """The axis along which scales differ; None: there is one."""
    block_size: int = 0
    """So many neighbours along the axis share a scale; 0: each place has its own."""
    nodes: tuple[str, ...] = ()
    """The names of its QuantizeLinear and DequantizeLinear."""


@dataclasses.dataclass(frozen=True)
class NodesOfRole:
    """The nodes of the source that do one thing for an attention."""

    role: Role
    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One attention, or one Softmax that is none."""

    name: str
    """Name of the Softmax or attention node in the source model."""
    graph: str
    """Path of its graph: the main graph's name, or `If_0/then_branch`, or a function's identifier."""
    status: Status
    module: str | None = None
    """Path of the torch module in the source, `encoder.layer.0.attention`, as the exporter wrote it; None if it wrote none."""
    pattern: str | None = None
    """The pattern that found it, with the alternatives it took; None where nothing but steps was needed."""
    op: str | None = None
    """Operator that computes it now, e.g. `MultiHeadAttention`; None if it is decomposed."""
    domain: str | None = None
    num_heads: int | None = None
    kv_num_heads: int | None = None
    head_size: int | None = None
    v_head_size: int | None = None
    scale: float | None = None
    """Constant factor on Q·Kᵀ; None if it is computed at run time."""
    mask: str | None = None
    """The meaning of the mask: no_mask, causal, padding, padding_causal, sliding_window, ..., joined by plus signs."""
    mask_form: str | None = None
    """How a fused operator is given it: none, unidirectional, attention_bias and its shape, ...; forms a test selects from."""
    mask_text: str | None = None
    """The meaning of the mask as a formula: which keys a row sees, and the bias."""
    kernel: Kernel | None = None
    layout: Layouts = dataclasses.field(default_factory=Layouts)
    verified: Verified | None = None
    assumptions: tuple[AssumptionName, ...] = ()
    """The assumptions made here; each can be taken back by `--assume`."""
    reasons: tuple[Reason, ...] = ()
    roundings: tuple[RoundingReport, ...] = ()
    """The roundings of a quantised model in the source, inside the attention and right beside it."""
    nodes: tuple[NodesOfRole, ...] = ()
    """The nodes of the source by what they do; those that have no name are not among them."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes of the source that belong to the attention: those that a quantiser should exclude."""
        return tuple(name for item in self.nodes for name in item.names)

    @property
    def is_rewritten(self) -> bool:
        """Whether this run has put something new in the place of the attention."""
        return self.status == "fused" or (self.status == "decomposed" and self.mask_form is not None)

    def to_dict(self) -> dict[str, Any]:
        """The site as plain JSON types."""
        nodes = {item.role: list(item.names) for item in self.nodes}
        reasons = [{**dataclasses.asdict(reason), "family": family_name(reason.code)} for reason in self.reasons]
        return {**dataclasses.asdict(self), "reasons": reasons, "nodes": nodes}


@dataclasses.dataclass(frozen=True)
class MixerReport:
    """One sequence mixer that is no softmax attention."""

    name: str
    """The node of the source that updates its state, computes its decays, or convolves."""
    graph: str
    kind: MixerKind
    reasons: tuple[Reason, ...]
    """Why it is left."""
    operator: str | None = None
    """The fused operator that it became."""


@dataclasses.dataclass(frozen=True)
class Report(JsonReport):
    """Everything a run found, did and refused."""

    _JSON_KEYS = (
        "model", "output", "device", "versions", "options", "candidates", "fused", "already_fused", "decomposed",
        "skipped", "differing", "seconds", "ops_before", "ops_after", "notes", "failures", "patterns", "policy",
        "session", "capture", "unshared", "off_target", "kv_cache", "dequantised", "sites", "mixers",
    )  # fmt: skip

    sites: tuple[SiteReport, ...]
    seconds: float
    ops_before: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Node count by `domain::op_type`, subgraphs and functions included."""
    ops_after: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    notes: tuple[str, ...] = ()
    """Things worth a line that belong to no single site."""
    differing: int = 0
    """Rewrites that verification found different and that were taken back: of whole sites, and of the nodes around them."""
    failures: tuple[Failure, ...] = ()
    """Exceptions that cost a place, a pattern or a pack; `notes` has a line on each."""
    patterns: tuple[PatternReport, ...] = ()
    """The result of each pattern that was tried."""
    policy: Policy = dataclasses.field(default_factory=Policy)
    """Which kernels were wanted."""
    session: Session | None = None
    """The settings for a session of ONNX Runtime."""
    capture: CaptureReport | None = None
    """Whether the model can be captured; None where the execution provider captures none."""
    steps: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Seconds by step; not part of the JSON."""
    pictures: tuple[SitePicture | None, ...] = dataclasses.field(default=(), repr=False)
    """One for each site if they were asked for, else none; not part of the JSON."""
    decoder: ServedDecoder | None = None
    """The interface of a decoder whose cache became a buffer (`--cache shared`); not part of the JSON."""
    unshared: str | None = None
    """Why the cache is not one buffer, where that was asked for (`--cache shared`)."""
    off_target: int = 0
    """Number of attentions that are not the operator that `--target` names; 0 where it names none."""
    kv_cache: QuantisedCache | None = None
    """The memory and error of a quantised cache (`--kv-cache`); None where it is in the type of the model."""
    dequantised: DequantisedAttention | None = None
    """The roundings left out of fused attentions, and the error; None where there are none."""

    mixers: tuple[MixerReport, ...] = ()
    """The sequence mixers that are no softmax attention."""
    model: str | None = None
    """Path of the model; None for a model in memory."""
    output: str | None = None
    """Path of the file that the command wrote; None if it wrote none."""
    device: str | None = None
    """The device that was planned for: `cpu`, or `cuda:sm90`."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """The installed packages that the run used."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """The options that were given, as plain JSON types."""

    def _repr_html_(self) -> str:
        from onnx_attnfuse.report.grouping import table

        return table(self)

    @property
    def attention_nodes(self) -> tuple[str, ...]:
        """The names of the nodes of all attentions, each once: a quantiser's list of nodes to exclude."""
        sites = (site for site in self.sites if site.status != "not-attention")
        return tuple(dict.fromkeys(name for site in sites for name in site.node_names))

    @property
    def candidates(self) -> int:
        """Number of attention sites: fused, already fused, decomposed for their provider, or skipped."""
        return sum(site.status != "not-attention" for site in self.sites)

    @property
    def fused(self) -> int:
        """Number of sites fused by this run."""
        return self._count("fused")

    @property
    def already_fused(self) -> int:
        """Number of sites that were fused operators before this run and still are."""
        return self._count("already-fused")

    @property
    def decomposed(self) -> int:
        """Number of sites that the execution provider fuses itself, decomposed into its form."""
        return self._count("decomposed")

    @property
    def skipped(self) -> int:
        """Number of attention sites left decomposed, or left to another operator than the one asked for."""
        return self._count("skipped")

    @property
    def differing_sites(self) -> int:
        """Number of the skipped sites that stay decomposed because the nodes built for them differed when verified."""
        return sum(site.status == "skipped" and any(reason.code == "differs" for reason in site.reasons) for site in self.sites)

    def _count(self, status: Status) -> int:
        return sum(site.status == status for site in self.sites)
