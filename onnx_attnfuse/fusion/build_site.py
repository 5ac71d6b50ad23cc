"""Building one site: every form that the plan names, beside the old nodes, each verified; faster ones are gated by tests."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import length
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.spec import AttentionSpec
from onnx_attnfuse.containment import Subject
from onnx_attnfuse.fusion.plan import FASTER_FROM, Lowering, Plan, params_of
from onnx_attnfuse.fusion.runtime_dispatch import Choice, Guards
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sweep import sweep, take_back
from onnx_attnfuse.kernels.conditions import LONG
from onnx_attnfuse.reasons import Reason
from onnx_attnfuse.rewriting import Edit, GraphContext
from onnx_attnfuse.targets.base import BuildContext, Emitted, MaskEncoding
from onnx_attnfuse.targets.cache import is_single
from onnx_attnfuse.targets.masked_row_predicates import assumed_of_rows
from onnx_attnfuse.targets.padding import at_least, read_padding
from onnx_attnfuse.verify.verdict import Verified


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
        return Built(emitted, plan, _together(verdicts), tuple(reasons))

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
            return _check_site(self.graph, self.spec, emitted, builder.logical("And", tests) if tests else None)
        finally:
            take_back(builder.added[before:])

    def _exact(self, encoding: MaskEncoding) -> ir.Value:
        """One truth value: the way is exact for the batch."""
        tests: list[ir.Value] = []
        if encoding.when != "always":
            tests.append(read_padding(self.spec, self.meaning, self.context).exact(encoding.when))
        if encoding.single:
            tests.append(is_single(self.context.builder, self.spec))
        return self.context.builder.logical("And", tests)

    def _size_tests(self, item: Lowering) -> list[ir.Value]:
        """Whether the sizes are such that this way is faster, and that its kernel takes it."""
        builder, axes, encoding = self.context.builder, self.spec.axes, item.encoding
        scores = params_of(self.spec, encoding, item.target).scores
        tests = [at_least(builder, scores, FASTER_FROM.get(encoding.mask, 0))]
        if encoding.mask == "ranges" and self.spec.dtype != ir.DataType.FLOAT16:
            tests.append(at_least(builder, sizes.maximum(length(axes.i), length(axes.j)), LONG))
        return [test for test in tests if test is not None]


def _together(verdicts: list[Verified | None]) -> Verified | None:
    found = [verdict for verdict in verdicts if verdict is not None]
    if not found:
        return None
    return Verified(max(item.max_abs_error for item in found), sum(item.cases for item in found))
