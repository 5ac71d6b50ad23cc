"""One attention at a time: understood, planned, built, verified, connected; or left as it is, with the reason.

Every form that a plan names is built beside the old nodes, each verified; faster ones are gated by tests.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.assumed import assumed_by
from onnx_attnfuse.attention.masks.classify import Meaning, understand
from onnx_attnfuse.attention.match.candidates import Candidate, anchor_of, read_candidate
from onnx_attnfuse.attention.match.steps import Readers
from onnx_attnfuse.attention.spec import AttentionSpec, with_plain_mask
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.commit import check_apart, check_lengths, commit, inner_values
from onnx_attnfuse.fusion.foreign import why_foreign
from onnx_attnfuse.fusion.plan import FASTER_FROM, Lowering, Plan, PlanContext, params_of
from onnx_attnfuse.fusion.plan_policy import preferred_plans
from onnx_attnfuse.fusion.report_site import as_wanted, assumed_of, kept, kernel_of, kernel_of_forecast, unfused
from onnx_attnfuse.fusion.runtime_dispatch import Choice, Guards
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.assumptions import named_in_order
from onnx_attnfuse.graph.edit import check_shapes
from onnx_attnfuse.graph.order import NodeOrder
from onnx_attnfuse.graph.sweep import sweep, take_back
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.kernels.conditions import LONG, AttentionParams
from onnx_attnfuse.kernels.forecast import forecast_existing
from onnx_attnfuse.kernels.op_node import params_of_node
from onnx_attnfuse.kernels.policy import Policy
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.report.model import SiteReport
from onnx_attnfuse.report.pictures.album import Album
from onnx_attnfuse.targets import UNFUSED
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding
from onnx_attnfuse.targets.layout import is_single, replaces_rotation
from onnx_attnfuse.targets.mask_encoding import at_least, read_padding
from onnx_attnfuse.targets.masked_rows import assumed_of_rows
from onnx_attnfuse.targets.unfused import is_in_place, keeps_rows
from onnx_attnfuse.transforms.rewriting import Edit, GraphContext
from onnx_attnfuse.verify.verdict import Verified, of_parts


@dataclasses.dataclass(frozen=True)
class Built:
    """A site's new nodes, judged and not connected yet."""

    emitted: Emitted
    plan: Plan
    """The plan as far as it could be carried out."""
    verified: Verified | None
    reasons: tuple[Reason, ...]
    """Why it is not faster."""


def _check_site(graph: GraphContext, spec: AttentionSpec, emitted: Emitted, given: ir.Value | None) -> Verified | None:
    """Verifies one form of a site for the batches where `given` holds; None if verification is off.

    Raises:
        Refused: The form differs, or could not be shown equal.
    """
    frontier = list(emitted.operands) or [operand[-1].indexed.value for operand in spec.operands()]
    empty = frozenset[str]()
    if emitted.presents and spec.cache is not None:
        frontier = [spec.query[-1].indexed.value, *spec.cache.frontier()]
        others = (length(axis) for axis in (spec.axes.b, spec.axes.i, spec.cache.new_axis))
        empty = frozenset(sizes.symbols(length(spec.cache.past_axis))).difference(*map(sizes.symbols, others))
    doubted = not graph.verifier.doubted.isdisjoint(spec.nodes)
    return graph.verify(emitted.results, frontier, spec.name, given, empty, doubted=doubted)


@dataclasses.dataclass(frozen=True)
class SiteBuilder:
    """Builds the forms that a plan names for one site, and has each verified."""

    spec: AttentionSpec
    meaning: Meaning
    plan: Plan
    graph: GraphContext
    context: BuildContext
    guards: Guards
    edit: Edit
    """The rewrite of the site, which faster forms are parts of."""

    def build(self) -> Built:
        """Builds all forms and has them judged.

        Raises:
            Refused: The main form cannot be built, or is not equal.
        """
        main, reasons = self.plan.main, list[Reason]()
        otherwise = self._emit(main)
        given = None if main.encoding.is_exact else self._exact(main.encoding)
        verdicts = [self._judged(otherwise, given)]
        sweep([given])
        choices: list[Choice] = []
        faster: list[Lowering] = []
        for item in self.plan.faster:
            with self.edit.part(Subject(f"building a faster {item.target.INFO.name}")) as part:
                emitted, exact = self._emit(item), self._exact(item.encoding)
                verdict = self._judged(emitted, exact)
                choices.append(Choice(self.guards.test(exact, self._size_tests(item)), emitted))
                faster.append(item)
                verdicts.append(verdict)
            reasons += [] if part.reason is None else [part.reason]
        plan = dataclasses.replace(self.plan, faster=tuple(faster))
        if not choices:
            return Built(otherwise, plan, verdicts[0], tuple(reasons))
        emitted = self.guards.join(choices, otherwise)
        forms = ", else ".join([*(choice.emitted.mask for choice in choices), otherwise.mask])
        emitted = dataclasses.replace(emitted, mask=forms)
        return Built(emitted, plan, of_parts(verdicts), tuple(reasons))

    def _emit(self, item: Lowering) -> Emitted:
        flat = not item.encoding.is_exact or bool(self.plan.faster)
        context = dataclasses.replace(self.context, flat=flat)
        return item.target.emit(self.spec, self.meaning, context, item.encoding)

    def _judged(self, emitted: Emitted, exact: ir.Value | None) -> Verified | None:
        """The verdict on a form that is equal where `exact` holds, under the assumptions about rows."""
        builder = self.context.builder
        before = len(builder.added)
        held = assumed_of_rows(self.spec, self.meaning, self.context)
        tests = [test for test in (exact, held) if test is not None]
        try:
            return _check_site(self.graph, self.spec, emitted, builder.chained("And", tests) if tests else None)
        finally:
            take_back(builder.added[before:])

    def _exact(self, encoding: MaskEncoding) -> ir.Value:
        """One truth value: the way is exact for the batch."""
        tests: list[ir.Value] = []
        if encoding.when != "always":
            tests.append(read_padding(self.spec, self.meaning, self.context).exact(encoding.when))
        if encoding.single:
            tests.append(is_single(self.context.builder, self.spec))
        return self.context.builder.chained("And", tests)

    def _size_tests(self, item: Lowering) -> list[ir.Value]:
        """Whether the sizes are such that this way is faster, and that its kernel takes it."""
        builder, axes, encoding = self.context.builder, self.spec.axes, item.encoding
        scores = params_of(self.spec, encoding, item.target).scores
        tests = [at_least(builder, scores, FASTER_FROM.get(encoding.mask, 0))]
        if encoding.mask == "ranges" and self.spec.dtype != ir.DataType.FLOAT16:
            tests.append(at_least(builder, sizes.maximum(length(axes.i), length(axes.j)), LONG))
        return [test for test in tests if test is not None]


_FUSING = Subject("fusing an attention")


@dataclasses.dataclass
class SiteFuser:
    """Fuses the attentions of one graph, one site at a time."""

    graph: GraphContext
    context: BuildContext
    guards: Guards
    options: Options
    readers: Readers
    policy: Policy
    """Which kernels are wanted."""
    album: Album
    order: NodeOrder
    replaced: dict[ir.Value, ir.Value]
    """Results that were replaced, and their replacements: those of outer graphs too, which nested ones read."""
    unsorted: bool = False
    """Whether earlier nodes may read the results of later ones."""

    def fuse(self, candidate: Candidate, plan_context: PlanContext) -> SiteReport:
        """Fuses one, or says why not; a defect of ours costs this site only, unless it is met while the graph changes."""
        scope = self.graph.scope
        if candidate.spec is not None and not self.replaced.keys().isdisjoint(candidate.spec.values()):
            candidate = read_candidate(candidate.node, candidate.softmax, scope, self.readers, self.options.keep_outputs)
        found, spec = SiteReport(label(candidate.node), scope.path, "skipped"), candidate.spec
        with self.graph.rewrite(None if spec is None else anchor_of(spec), _FUSING, found.name) as edit:
            found = unfused(candidate, scope)
            if candidate.rounded is not None:
                return self._rounded(found, candidate.rounded, plan_context)
            if spec is None:
                return self._existing(found, candidate.node, plan_context)
            spec = spec if plan_context.device.provider.rotates else spec.unrotated()
            return self._fused(candidate.node, spec, found, plan_context, edit)
        assert edit.reason is not None
        return dataclasses.replace(found, reasons=(edit.reason,))

    def _existing(self, found: SiteReport, node: ir.Node, plan_context: PlanContext) -> SiteReport:
        """The report on a candidate that cannot be read; with its kernel if it is an operator of ONNX Runtime."""
        foreign = why_foreign(node, self.graph.scope.facts, plan_context)
        if foreign is not None:
            return dataclasses.replace(found, status="skipped", reasons=(foreign, *found.reasons))
        params = params_of_node(node, self.graph.scope.facts) if found.status == "already-fused" else None
        if not isinstance(params, AttentionParams):
            return found
        params = dataclasses.replace(params, dtype=plan_context.dtype or params.dtype).with_lengths(plan_context.lengths)
        foreseen = forecast_existing(params, plan_context.device)
        return found if foreseen is None else dataclasses.replace(found, kernel=kernel_of_forecast(foreseen, plan_context.device))

    def _rounded(self, found: SiteReport, spec: AttentionSpec, plan_context: PlanContext) -> SiteReport:
        """The report on an attention that stays, as it rounds inside; its mask is reported as before rounding."""
        spec = with_plain_mask(spec)
        meaning = self.graph.check_mask(spec, understand(spec, self.context.reader))
        found = dataclasses.replace(found, mask=meaning.kind, mask_text=meaning.text or None)
        device = plan_context.device
        if device.provider.unfused_form is not None and is_in_place(spec, device.provider.unfused_form):
            return dataclasses.replace(found, status="decomposed", reasons=(as_wanted(device.ep),))
        return found

    def _fused(self, node: ir.Node, spec: AttentionSpec, found: SiteReport, plan_context: PlanContext, edit: Edit) -> SiteReport:
        """Carries out the first plan that can be, with the reasons against the others.

        Raises:
            Refused: The mask cannot be looked at, or nothing is computed.
        """
        graph, device = self.graph, plan_context.device
        check_lengths(spec)
        check_apart(spec, self.order)
        meaning = graph.check_mask(spec, understand(spec, self.context.reader))
        assumptions = assumed_by(spec, meaning, graph.scope.facts)
        found = dataclasses.replace(found, mask=meaning.kind, mask_text=meaning.text or None, assumptions=assumptions)
        self.album.mask(node, spec, meaning, graph.scope)
        foreseen = spec if plan_context.dtype is None else dataclasses.replace(spec, dtype=plan_context.dtype)
        plans, refusals = preferred_plans(foreseen, meaning, plan_context, self.policy, self.context)
        reasons: list[Reason] = []
        slower: tuple[Reason, ...] = ()
        for plan in plans:
            wanted = device.provider.unfused_form if plan.main.target is UNFUSED else None
            if wanted is not None and is_in_place(spec, wanted) and keeps_rows(spec, meaning, self.context):
                return dataclasses.replace(
                    found, status="decomposed", kernel=kernel_of(plan, device), reasons=(as_wanted(device.ep),)
                )
            if _is_in_place(found, plan, spec):
                why = refusals if len(plans) == 1 and refusals else [kept(found, plan_context.target)]
                return dataclasses.replace(found, kernel=kernel_of(plan, device), reasons=tuple(reasons or why))
            built: Built | None = None
            with edit.part(Subject(f"fusing into {plan.main.target.INFO.name}")) as part:
                cached = any(item.encoding.cached for item in (plan.main, *plan.faster))
                presents = [indexed.value for indexed in spec.cache.present] if cached and spec.cache is not None else []
                check_shapes([*inner_values(spec), *presents], graph.builder)
                site = SiteBuilder(spec, meaning, plan, graph, self.context, self.guards, part).build()
                self.order.add(edit.added, anchor_of(spec))
                built = site
            if built is not None:
                built = dataclasses.replace(built, reasons=(*slower, *built.reasons))
                return self._connected(node, spec, built, found, plan_context, edit)
            reasons += [] if part.reason is None else [part.reason]
            slower = tuple(reasons) if plan.main.encoding.band is not None else slower
        return dataclasses.replace(found, reasons=tuple(reasons or refusals))

    def _connected(
        self, node: ir.Node, spec: AttentionSpec, built: Built, found: SiteReport, plan_context: PlanContext, edit: Edit
    ) -> SiteReport:
        """Connects the new nodes, and reports.

        Raises:
            Refused: A caller says that there is no proof of it.
        """
        if not {old.name for old, _ in built.emitted.results}.isdisjoint(self.options.unproved):
            raise Refused("unproved", "no proof was found that the fused operator is equal for all sizes and masks")
        commit(spec, built.emitted, self.graph.builder, self.order, edit)
        self.replaced.update(built.emitted.results)
        self.unsorted |= bool(built.emitted.presents)
        target = built.plan.main.target
        found = dataclasses.replace(
            found,
            status="decomposed" if target is UNFUSED else "fused",
            op=None if target is UNFUSED else target.INFO.name,
            domain=None if target is UNFUSED else target.INFO.domain,
            scale=None if spec.scale_values else built.emitted.scale,
            mask_form=built.emitted.mask,
            kernel=kernel_of(built.plan, plan_context.device),
            layout=built.emitted.layouts,
            verified=built.verified,
            assumptions=named_in_order(
                *found.assumptions, *built.emitted.assumes, *assumed_of(built.plan, spec, plan_context.device)
            ),
            reasons=built.reasons,
        )
        self.album.after(node, spec, built.emitted, self.graph.scope)
        return found


def _is_in_place(found: SiteReport, plan: Plan, spec: AttentionSpec) -> bool:
    """Whether the form of the plan is there already."""
    same = (found.op, found.domain) == (plan.main.target.INFO.name, plan.main.target.INFO.domain)
    return same and not plan.faster and not plan.main.encoding.cached and not replaces_rotation(spec)
