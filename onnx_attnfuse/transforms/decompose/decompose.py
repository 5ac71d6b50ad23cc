"""One operator at a time: decomposed beside its node, verified, connected; or left as it is, with the reason."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Literal

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import new_axes
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import element, has_nan
from onnx_attnfuse.attention.masks.fully_masked import DISAGREEING, rows_disagree
from onnx_attnfuse.attention.masks.index_reader import Reader
from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.bodies.fused_node import Body, FusedNode
from onnx_attnfuse.bodies.table import body_of, has_body, rehearsals
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.containment import Failure, Subject, collecting
from onnx_attnfuse.graph.build import Builder, builder_for
from onnx_attnfuse.graph.constants import attribute, has_unknown_attribute
from onnx_attnfuse.graph.ops import CONTRIB, is_attention, is_standard
from onnx_attnfuse.graph.schemas import why_unknown
from onnx_attnfuse.graph.scopes import all_names, count_ops, scopes
from onnx_attnfuse.graph.sweep import sweep
from onnx_attnfuse.graph.tensors import bodies
from onnx_attnfuse.graph.uses import label, producer_of
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.transforms.rewriting import GraphContext
from onnx_attnfuse.verify.runtime import installed, is_old
from onnx_attnfuse.verify.verdict import Verified, of_parts
from onnx_attnfuse.verify.verifier import Verifier


@dataclasses.dataclass(frozen=True)
class UnfusedSite:
    """One fused operator."""

    name: str
    """Name of the node in the source model."""
    graph: str
    """Path of its graph, as in `SiteReport`."""
    op: str
    domain: str
    status: Literal["unfused", "kept"]
    verified: Verified | None = None
    """The error of the decomposition; None if it was not verified."""
    reason: Reason | None = None
    """Why it stays."""


@dataclasses.dataclass(frozen=True)
class UnfuseReport(JsonReport):
    """Every fused operator of a model, and what became of it."""

    _JSON_KEYS = ("unfused", "kept", "differing", "seconds", "ops_before", "ops_after", "failures", "sites")

    sites: tuple[UnfusedSite, ...]
    seconds: float
    ops_before: Mapping[str, int]
    """Node count by `domain::op_type`, subgraphs and functions included."""
    ops_after: Mapping[str, int]
    differing: int = 0
    """Operators that verification found different from their decomposition, and that stay."""
    failures: tuple[Failure, ...] = ()
    """Exceptions that cost an operator."""

    @property
    def unfused(self) -> int:
        """Number of operators that were decomposed."""
        return sum(site.status == "unfused" for site in self.sites)

    @property
    def kept(self) -> int:
        """Number of operators that stay as they were."""
        return len(self.sites) - self.unfused


_DECOMPOSING = Subject("decomposing an operator")
_SINCE = 11
"""The opset from which on Range, GatherElements and the rest are there."""


class Decomposer:
    """One pass over one model."""

    def __init__(self, model: ir.Model, options: Options, verifier: Verifier) -> None:
        self.model = model
        self.options = options
        self.verifier = verifier
        self.names = all_names(model)

    @aside()
    def go(self) -> UnfuseReport:
        """Spells out what can be, in place."""
        with collecting() as failures:
            report = self._all()
        return dataclasses.replace(report, failures=failures.all())

    def _all(self) -> UnfuseReport:
        start, before = time.perf_counter(), count_ops(self.model)
        work = [(scope, node) for scope in scopes(self.model) for node in scope.graph if is_fused(node)]
        sites: list[UnfusedSite] = []
        graphs: dict[ir.Graph, GraphContext] = {}
        for scope, node in work:
            self.options.progress("unfusing", len(sites), len(work))
            build = builder_for(scope, self.names)
            graph = graphs.setdefault(scope.graph, GraphContext(scope, self.model, build, self.verifier))
            sites.append(decompose_node(graph, node))
        self._remove_unused_import()
        seconds = time.perf_counter() - start
        return UnfuseReport(tuple(sites), seconds, before, count_ops(self.model), self.verifier.differing)

    def _remove_unused_import(self) -> None:
        """Takes out the import of com.microsoft where nothing of it is left; a model imports what its functions do."""
        users = [part for part in bodies(self.model) if any(node.domain == CONTRIB for node in part.all_nodes())]
        for part in bodies(self.model):
            if part not in users and not (users and part is self.model.graph):
                part.opset_imports.pop(CONTRIB, None)


def decompose_node(graph: GraphContext, node: ir.Node) -> UnfusedSite:
    """Decomposes one operator, or says why not; a defect of ours costs this one only."""
    found = UnfusedSite(label(node) or node.op_type, graph.scope.path, node.op_type, node.domain, "kept")
    with graph.rewrite(node, _DECOMPOSING, found.name) as edit:
        pairs, verified = _decomposed(graph, node)
        edit.connect([(node.outputs[place], new) for place, new in pairs])
        sweep(node.outputs)
        return dataclasses.replace(found, status="unfused", verified=verified)
    return dataclasses.replace(found, reason=edit.reason)


def _decomposed(graph: GraphContext, node: ir.Node) -> tuple[list[tuple[int, ir.Value]], Verified | None]:
    """The values that take the place of a fused operator's outputs, verified and not connected yet.

    Raises:
        Refused: It cannot be decomposed, or is not equal.
    """
    reason, build, scope = why_kept(node), graph.builder, graph.scope
    if reason is not None:
        raise Refused(reason.code, reason.message, reason.node)
    if has_unknown_attribute(node):
        raise Refused("function-attribute", f"an attribute of {node.op_type} is a parameter of the function", node.name)
    if build.opset < _SINCE:
        raise Refused("old-opset", f"opset {build.opset} lacks operators that are needed; raise it to {_SINCE}", node.name)
    if scope.is_function:
        scope.graph.opset_imports.setdefault("", scope.opset)
    site = FusedNode(node, build, tuple(node.inputs))
    answer = exact_body(site)
    return _pairs(node, answer), _judged(graph, site, answer)


def _judged(graph: GraphContext, site: FusedNode, answer: Body) -> Verified | None:
    """The verdict on what takes the operator's place, or on its rehearsals.

    Raises:
        Refused: It differs, or could not be shown equal.
    """
    if graph.verifier.level == "none":
        return None
    sides = [(_rehearsed(twin), body_of(twin)) for twin in rehearsals(site)] or [(site.node, answer)]
    name, verdicts, unverified = site.node.name or site.node.op_type, list[Verified | None](), list[Refused]()
    tells = not is_old(installed())  # an old runtime may have been run, and have differed
    for node, found in sides:
        pairs = _as_defined(site.build, _pairs(site.node, found), node, found)
        try:
            verdict = graph.verify(pairs, found.frontier, name)
        except Refused as refused:
            if refused.reason.code != "unverified" or not tells:
                raise
            unverified.append(refused)
        else:
            verdicts.append(verdict)
    if not any(verdicts):
        raise unverified[0]
    return of_parts(verdicts)


def _rehearsed(site: FusedNode) -> ir.Node:
    """The operator on other inputs."""
    node = site.node
    first = site.build.node(
        node.op_type,
        site.inputs,
        {name: attribute(node, name) for name in node.attributes},
        domain=node.domain,
        dtype=site.dtype(),
        hint="attnfuse/rehearsal",
        outputs=len(node.outputs),
    )
    return producer_of(first)


def _as_defined(
    build: Builder, pairs: list[tuple[int, ir.Value]], node: ir.Node, answer: Body
) -> list[tuple[ir.Value, ir.Value]]:
    """The outputs of an operator and what takes their places, with zeros where the operator leaves them open."""
    found: list[tuple[ir.Value, ir.Value]] = []
    for place, new in pairs:
        old, where = node.outputs[place], answer.defined[place] if place < len(answer.defined) else None
        found.append((old, new) if where is None else _both_where(build, where, old, new))
    return found


def _both_where(build: Builder, where: ir.Value, old: ir.Value, new: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two values with zeros where a truth value does not hold.

    The shape of the old one is stated anew: of a present ONNX Runtime infers that it is as long as the past.
    """
    dtype = build.facts.dtype(new)
    shape = build.node("Shape", [new], dtype=ir.DataType.INT64)
    stated = build.node("Reshape", [old, shape], dtype=dtype)
    zero = build.scalar(0.0, dtype)
    left, right = (build.node("Where", [where, item, zero], dtype=dtype) for item in (stated, new))
    return left, right


def _pairs(node: ir.Node, answer: Body) -> list[tuple[int, ir.Value]]:
    """The places of outputs that are used, each with what takes its place.

    Raises:
        Refused: Nothing does.
    """
    pairs: list[tuple[int, ir.Value]] = []
    for place, old in enumerate(node.outputs):
        if not old.uses() and not old.is_graph_output():
            continue
        new = answer.values[place] if place < len(answer.values) else None
        if new is None:
            raise Refused("not-decomposed", f"output {place} of {node.op_type} cannot be decomposed", node.name)
        pairs.append((place, new))
    return pairs


def is_fused(node: ir.Node) -> bool:
    """Whether the node is an operator that computes a part of attention, or removes padding for one."""
    return is_attention(node) or info_of(node) is not None


def why_kept(node: ir.Node) -> Reason | None:
    """Why a fused operator cannot be decomposed whatever its inputs are; None if it may be."""
    info, unknown = info_of(node), why_unknown(node)
    if unknown is not None:
        return Reason("unread-part", unknown, node.name)
    if has_body(node):
        return None
    if info is not None and info.packed:
        message = f"{node.op_type} works on tokens without padding, whose number no shape gives"
        return Reason("packed", message, node.name)
    return Reason("not-decomposed", f"com.microsoft.{node.op_type} cannot be decomposed", node.name)


def exact_body(fused: FusedNode) -> Body:
    """The body of an operator, which computes what all kernels do.

    Raises:
        Refused: It cannot be written, a mask has NaN in it, or kernels disagree on its rows without a key.
    """
    found, facts = body_of(fused), fused.build.facts
    for mask in found.masks:
        indexed, reader = IndexedValue(mask, new_axes(fused.dims(mask))), Reader(facts)
        if has_nan(element(indexed, reader)):
            raise Refused("nan-fill", "the mask contains NaN, which makes whole rows NaN", fused.node.name)
        if is_standard(fused.node) and rows_disagree(indexed, reader, Bounds(facts), facts.opset):
            raise Refused("kernels-disagree", DISAGREEING, fused.node.name)
    return found
