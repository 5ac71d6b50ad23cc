"""Building what a plan asks for at one site: every form beside the old nodes, each judged, the faster ones behind their tests."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from onnx_attnfuse.axes.factors import length
from onnx_attnfuse.conditions import LONG
from onnx_attnfuse.court import Court
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.graph.sweep import sweep, sweep_unused
from onnx_attnfuse.guard import Choice, Guards
from onnx_attnfuse.masks.meaning import Meaning
from onnx_attnfuse.plan import FASTER_FROM, Plan, Planned, problem_of
from onnx_attnfuse.reasons import Reason, Refused
from onnx_attnfuse.spec import AttentionSpec
from onnx_attnfuse.targets.cache import is_single
from onnx_attnfuse.targets.emitted import Emitted, Way, Workbench
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


@dataclasses.dataclass(frozen=True)
class Building:
    """One site, and what is needed to build for it."""

    spec: AttentionSpec
    meaning: Meaning
    plan: Plan
    scope: Scope
    model: ir.Model
    bench: Workbench
    court: Court
    guards: Guards

    def build(self) -> Built:
        """Builds all forms and has them judged.

        Raises:
            Refused: The main form cannot be built, or is not equal.
        """
        main, reasons = self.plan.main, list[Reason]()
        otherwise = self._emit(main)
        verdicts = [self._judged(otherwise, main.way)]
        choices: list[Choice] = []
        faster: list[Planned] = []
        for item in self.plan.faster:
            try:
                choice, verdict = self._choice(item)
            except Refused as refused:
                reasons.append(refused.reason)
                continue
            choices.append(choice)
            faster.append(item)
            verdicts.append(verdict)
        plan = dataclasses.replace(self.plan, faster=tuple(faster))
        if not choices:
            return Built(otherwise, plan, verdicts[0], tuple(reasons))
        emitted = self.guards.join(choices, otherwise)
        forms = ", else ".join([*(choice.emitted.mask for choice in choices), otherwise.mask])
        emitted = dataclasses.replace(emitted, mask=forms)
        return Built(emitted, plan, _together(verdicts), tuple(reasons))

    def _emit(self, item: Planned) -> Emitted:
        flat = not item.way.is_exact or bool(self.plan.faster)
        return item.target.emit(self.spec, self.meaning, self.bench, item.way, flat=flat)

    def _judged(self, emitted: Emitted, way: Way) -> Verified | None:
        given = None if way.is_exact else self._exact(way)
        verdict = self.court.site(self.spec, emitted, self.scope, self.model, given)
        sweep([given])
        return verdict

    def _exact(self, way: Way) -> ir.Value:
        """One truth value: the way is exact for the batch."""
        tests: list[ir.Value] = []
        if way.when != "always":
            tests.append(read_padding(self.spec, self.meaning, self.bench).exact(way.when))
        if way.single:
            tests.append(is_single(self.bench.builder, self.spec))
        return self.bench.builder.logical("And", tests)

    def _choice(self, item: Planned) -> tuple[Choice, Verified | None]:
        """A faster form and its test.

        Raises:
            Refused: It cannot be built, or is not equal where its test holds.
        """
        builder, way = self.bench.builder, item.way
        before = len(builder.added)
        try:
            emitted = self._emit(item)
            exact = self._exact(way)
            verdict = self.court.site(self.spec, emitted, self.scope, self.model, exact)
        except Refused:
            sweep_unused(builder.added[before:])
            raise
        return Choice(self.guards.test(exact, self._size_tests(item)), emitted), verdict

    def _size_tests(self, item: Planned) -> list[ir.Value]:
        """Whether the sizes are such that this way is faster, and that its kernel takes it."""
        builder, axes, way = self.bench.builder, self.spec.axes, item.way
        scores = problem_of(self.spec, way, item.target).scores
        tests = [at_least(builder, scores, FASTER_FROM.get(way.mask, 0))]
        if way.mask == "ranges" and self.spec.dtype != ir.DataType.FLOAT16:
            tests.append(at_least(builder, sizes.maximum(length(axes.i), length(axes.j)), LONG))
        return [test for test in tests if test is not None]


def _together(verdicts: list[Verified | None]) -> Verified | None:
    found = [verdict for verdict in verdicts if verdict is not None]
    if not found:
        return None
    return Verified(max(item.max_abs_error for item in found), sum(item.cases for item in found))
