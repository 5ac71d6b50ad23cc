"""The verifier of a run: the checks of each level, the evidence kept, and the consequence of a difference."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import onnx_ir as ir

from onnx_attnfuse.attention.masks.classify import Meaning, distrusted
from onnx_attnfuse.attention.spec import AttentionSpec, mask_values
from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError, VerificationError
from onnx_attnfuse.graph.assumptions import AssumptionName
from onnx_attnfuse.graph.scopes import Scope
from onnx_attnfuse.kernels.device import resolve
from onnx_attnfuse.options import Options
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.runtime import INSTALL, available
from onnx_attnfuse.verify.verdict import Verified

if TYPE_CHECKING:
    import os

    import onnx

    from onnx_attnfuse.verify.decoder_feeds import Loop
    from onnx_attnfuse.verify.equivalence import EquivalenceChecker
    from onnx_attnfuse.verify.references import Operator as ReferenceOperator
    from onnx_attnfuse.verify.verdict import Verdict

_EVIDENCE = pathlib.Path("attnfuse-evidence")
_SITE = "verify"
"""The step that is taken once for each attention; fusing counts these."""
_OF_SCORES = frozenset[AssumptionName](["finite-exponentials", "kept-weights"])
"""Assumptions that large scores do not meet."""
NOT_VERIFIED = f"nothing was verified: onnxruntime is not installed; {INSTALL}"
"""The note of a run that would verify by default, and cannot."""


class Definition(Protocol):
    """An operator of another domain, with its reference in NumPy if it has one."""

    @property
    def domain(self) -> str:
        """The operator's domain."""
        ...

    @property
    def op(self) -> str:
        """The operator's type."""
        ...

    @property
    def reference(self) -> Callable[..., Any] | None:
        """Inputs as arrays, attributes by name; returns an array, or a tuple of them."""
        ...


class Verifier:
    """Verifies the rewrites of one run."""

    def __init__(
        self, options: Options, definitions: Iterable[Definition] = (), *, keep_evidence: bool = True, doubts: bool = True
    ) -> None:
        """Sets up the judge that `options` ask for.

        Args:
            options: The options.
            definitions: Operators of other domains, which are run by their references.
            keep_evidence: Write down differences.
            doubts: Verify rewrites of patterns that are not built in, whatever the options say.

        Raises:
            MissingDependencyError: Judging was asked for and onnxruntime is absent.
            OptionError: The choice does not exist, or evidence is to go to a file.
        """
        if options.evidence is not None and pathlib.Path(options.evidence).is_file():
            raise OptionError(f"evidence is {options.evidence}, a file; choose a folder")
        self.level = verification_level(options)
        self.differing = 0
        """How many rewrites were found different."""
        self.timer = StepTimer(lambda step: None if step == _SITE else options.progress(step, 0, 1))
        """How long judging took, and whatever else the run times."""
        self.doubted: set[ir.Node] = set()
        """Nodes that patterns which are not built in have read: rewrites of these are verified at every level."""
        self.doubts = self.level != "none" or (doubts and available())
        """Whether rewrites of such patterns are verified."""
        self.believed: list[str] = []
        """Places of such patterns that could not be judged, at level none, and why."""
        self._refuted: dict[tuple[object, ...], str | None] = {}
        self._definitions = list(definitions)
        self._lengths = options.dim
        self._evidence = pathlib.Path(options.evidence or _EVIDENCE) if keep_evidence else None
        self._rounds_float16 = self.doubts and bool(resolve(options.ep, options.arch).provider.rounds_float16)

    @functools.cached_property
    def _operators(self) -> list[type[ReferenceOperator]]:
        return references(self._definitions)

    @functools.cached_property
    def _checker(self) -> EquivalenceChecker:
        """The judge, made when the first rewrite comes before it: a run that judges nothing need not import it."""
        from onnx_attnfuse.verify.equivalence import EquivalenceChecker

        return EquivalenceChecker(rounds_float16=self._rounds_float16, operators=self._operators, lengths=self._lengths)

    def check(
        self,
        results: Sequence[tuple[ir.Value, ir.Value]],
        frontier: Sequence[ir.Value],
        name: str,
        scope: Scope,
        model: ir.Model,
        given: ir.Value | None = None,
        empty: frozenset[str] = frozenset(),
        *,
        doubted: bool = False,
    ) -> Verified | None:
        """Judges new values against old ones, computed from `frontier`; at every level if `doubted`.

        Args:
            results: Old values, each with its new one.
            frontier: Where the computation is cut off: the common operands.
            name: Of the site, for the evidence.
            scope: The graph.
            model: The model, for its functions.
            given: A truth value; only batches where it holds are compared.
            empty: Symbolic sizes that may be 0.
            doubted: Whether a pattern that is not built in had a part in it.

        Raises:
            Refused: A value differs, or could not be shown equal.
        """
        if not self.doubts or (self.level == "none" and not doubted):
            return None
        opsets = scope.graph.opset_imports or model.opset_imports
        with self.timer.step(_SITE):
            verdict = self._checker.check(results, frontier, scope.facts, opsets, model.functions, given, empty)
        if verdict.undecided is not None and self.level == "none":
            self.believed.append(f"'{name}': {verdict.undecided}")
            return None
        return self._accepted(verdict, name)

    def check_mask(self, spec: AttentionSpec, meaning: Meaning, scope: Scope, model: ir.Model) -> Meaning:
        """The meaning of a mask, or `arbitrary` where the mask turns out to be something else; each mask is looked at once."""
        if self.level == "none" or not spec.mask:
            return meaning
        from onnx_attnfuse.verify.mask_check import refute

        key = (meaning.text, *mask_values(spec.mask))
        if key not in self._refuted:
            opsets = scope.graph.opset_imports or model.opset_imports
            with self.timer.step(_SITE):
                self._refuted[key] = refute(spec, meaning, scope.facts, opsets, model.functions)
        refutation = self._refuted[key]
        return meaning if refutation is None else distrusted(meaning, refutation)

    def check_loop(self, before: ir.Model, after: ir.Model, loop: Loop) -> Verified | None:
        """Judges a decoder whose cache became a buffer, run in a loop; None where nothing is judged.

        Raises:
            Refused: It differs, or could not be shown equal.
        """
        from onnx_attnfuse.verify.decoder_loop import check_decoder

        return self.judge_loop(lambda: check_decoder(before, after, loop, self._operators))

    def judge_loop(self, judge: Callable[[], Verdict]) -> Verified | None:
        """Judges a decoder in a way of its own; None where nothing is judged.

        Raises:
            Refused: It differs, or could not be shown equal.
        """
        if self.level == "none":
            return None
        with self.timer.step("verify the decoder"):
            return self._accepted(judge())

    def _accepted(self, verdict: Verdict, name: str | None = None) -> Verified:
        """A verdict that the values are equal; a rewrite that differs is counted, with its evidence under a name.

        Raises:
            Refused: They differ, or could not be shown equal.
        """
        if verdict.undecided is not None:
            raise Refused("unverified", f"it could not be verified: {verdict.undecided}")
        if not verdict.equal:
            self.differing += 1
            if name is not None:
                self._keep(verdict, name)
            raise Refused("differs", verdict.detail)
        return Verified(verdict.max_abs_error, verdict.cases)

    def check_model(
        self,
        before: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
        after: ir.Model,
        patterns: Iterable[str] = (),
        assumes: Collection[str] = (),
    ) -> str | None:
        """Judges whole models, if asked for; returns a line for the report.

        Args:
            before: The source.
            after: The result.
            patterns: The patterns that are not built in and had a part in it.
            assumes: The assumptions that the result relies on.

        Raises:
            VerificationError: They differ.
        """
        if self.level != "model":
            return None
        if any(node.op_type == "RestorePadding" for node in after.graph.all_nodes()):
            return "the whole model was not verified: rows of padding differ, and packed attention has no kernel on the CPU"
        from onnx_attnfuse.verify.compare_models import check_models
        from onnx_attnfuse.verify.float32_copy import has_float16, rounded
        from onnx_attnfuse.verify.model_session import read

        try:
            with self.timer.step("verify the whole model"):
                if self._rounds_float16 and has_float16(source := read(before)):
                    before, after = rounded(source), rounded(after)
                about = sorted(_OF_SCORES.intersection(assumes))
                verdict = check_models(before, after, self._operators, tame=bool(about))
        except ModelError as error:
            return f"the whole model could not be verified: {error}"
        if verdict.undecided is not None:
            return f"the whole model could not be verified: {verdict.undecided}"
        if not verdict.equal:
            self._keep(verdict, "model")
            names = ", ".join(f"'{name}'" for name in patterns)
            advice = f"look into the patterns that had a part in it, {names}" if names else "report it"
            if about:
                advice = f"this case may not meet {' and '.join(about)}, which it relies on; {advice}"
            raise VerificationError(f"the fused model differs: {verdict.detail}; {advice}, with the evidence in {self._evidence}")
        return f"whole model verified on {verdict.cases} inputs, largest error {verdict.max_abs_error:.1e}"

    def _keep(self, verdict: Verdict, name: str) -> None:
        if self._evidence is None:
            return
        from onnx_attnfuse.verify.verdict import save

        save(verdict, self._evidence, name)


def references(definitions: Iterable[Definition]) -> list[type[ReferenceOperator]]:
    """Operators of other domains as the judge runs them, those that have a reference."""
    from onnx_attnfuse.verify.references import foreign

    return [foreign(item.domain, item.op, item.reference) for item in definitions if item.reference is not None]


def verification_level(options: Options) -> str:
    """How rewrites are judged under `options`.

    Raises:
        MissingDependencyError: Judging was asked for and onnxruntime is absent.
        OptionError: The choice does not exist.
    """
    if options.verify is None:
        return "sites" if available() else "none"
    if options.verify not in {"none", "sites", "model"}:
        raise OptionError(f"verify is {options.verify!r}; choose none, sites or model")
    if options.verify != "none" and not available():
        raise MissingDependencyError(f"verification needs onnxruntime; {INSTALL}, or pass --verify none")
    return options.verify


class StepTimer:
    """Seconds by step; the time of a step inside another counts for the inner one alone."""

    def __init__(self, begun: Callable[[str], None] = lambda _: None) -> None:
        """Begins to count.

        Args:
            begun: Called with each step that begins.
        """
        self._begun = begun
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    @contextlib.contextmanager
    def step(self, name: str) -> Generator[None]:
        """Times a block."""
        self._begun(name)
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner.pop()
            self._inner[-1] += whole
