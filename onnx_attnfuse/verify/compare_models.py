"""Judging whole models: before and after on the same inputs, chosen by the kind of each input, ONNX Runtime's optimisations off.

    verdict = check_models("model.onnx", "model.attnfuse.onnx")
    verification = verify_models("model.onnx", "model.attnfuse.onnx")

Slower than judging sites, and blunter: rounding adds up over layers. It also checks that the new nodes are connected.
The first stops at the first difference; the second runs all cases, tells of every output, and looks where a difference begins.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import MissingDependencyError, ModelError, OptionError
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.dtypes import HALVES
from onnx_attnfuse.graph.facts import Dims, Facts
from onnx_attnfuse.verify.float32_copy import rounded
from onnx_attnfuse.verify.input_kinds import as_its_kind, float_inputs, in_both, kinds, slot_of
from onnx_attnfuse.verify.inputs import Array, InputCase, Pattern, case_groups, describe, feeds
from onnx_attnfuse.verify.model_session import Source, check_interfaces, first_divergence, read, session
from onnx_attnfuse.verify.options import Trials
from onnx_attnfuse.verify.quantised.unrounded import Unrounded
from onnx_attnfuse.verify.runtime import INSTALL, Operators, PieceSession, Reference, RuntimeRefusal, available, is_dangerous
from onnx_attnfuse.verify.shape_solver import Equalities, Values, are_at_least
from onnx_attnfuse.verify.subgraph import reach_of
from onnx_attnfuse.verify.subprocess_runner import ProcessDied
from onnx_attnfuse.verify.verdict import (
    Comparison,
    Evidence,
    Verdict,
    Verification,
    as_typed,
    by_this_runtime,
    compare,
    finding,
    tolerance_of,
    undecided,
)

_MOVED = 1 + 2**-20
_STABLE = 1e-4
"""Inputs are multiplied by the first, which moves scores in their last digits, and results may move by this part of them."""
_MAX_LISTED_OUTPUTS = 3
_LARGEST = 1 << 30
"""Elements of the largest tensor of a model that is still run."""
_CHOICES = 8
_RANDOM = "gives other results each time that it runs on the same inputs"


def check_models(before: Source, after: Source, operators: Operators = (), *, tame: bool = False) -> Verdict:
    """Whether two models with the same inputs give the same outputs.

    Args:
        before: A file, `onnx.ModelProto` or `onnx_ir.Model`; a file if it has 2 GB of weights or more inside.
        after: The same; its outputs are called and ordered alike.
        operators: Operators of other domains in NumPy; models with such are run by ONNX's reference implementation.
        tame: Scores are to be of ordinary size, as the two are claimed to be equal for such only.

    Returns:
        The verdict; undecided if `before` does not run on anything that was tried.

    Raises:
        ModelError: A model cannot be read.
    """
    if not available():
        return undecided("onnxruntime is not installed")
    models = read(before), read(after)
    try:
        original = session(before, operators=operators)
    except RuntimeRefusal as refusal:
        return by_this_runtime(undecided(f"the original does not load: {refusal}"))
    try:
        rewritten = session(after, operators=operators)
    except RuntimeRefusal as refusal:
        return by_this_runtime(Verdict(False, 0.0, 0, f"the new model does not load: {refusal}"))
    if original.outputs() != rewritten.outputs():
        return Verdict(False, 0.0, 0, f"the outputs {original.outputs()} became {rewritten.outputs()}")
    try:
        return by_this_runtime(_Models(models, (original, rewritten), Trials(), tame=tame).verdict())
    except ProcessDied as died:
        return undecided(str(died))


def verify_models(first: Source, second: Source, trials: Trials | None = None) -> Verification:
    """Runs two models with the same inputs and outputs on hostile inputs, and compares every output.

    Inputs and outputs may be of different float types; such inputs are rounded for the second model. A second model with a
    quantised cache is run in a loop with its source, and held to the error that it states; so is one with attention fused without
    the roundings of its source.

    Args:
        first: A file, `onnx.ModelProto` or `onnx_ir.Model`; a file if it has 2 GB of weights or more inside.
        second: The same.
        trials: How many cases, which sizes, which tolerance.

    Returns:
        The result, and where a difference begins.

    Raises:
        MissingDependencyError: onnxruntime is absent.
        ModelError: A model cannot be read or run, or the two have other inputs or outputs.
        OptionError: A dimension is named that no input has, or a number is out of bounds.
    """
    if not available():
        raise MissingDependencyError(f"comparing models needs onnxruntime; {INSTALL}")
    trials = trials or Trials()
    _check_trials(trials)
    models = read(first), read(second)
    from onnx_attnfuse.verify.quantised.stated_error import verify_stated  # which compares models without roundings

    if (stated := verify_stated(*models)) is not None:
        return stated
    if trials.round_float16:
        models = first, second = rounded(models[0]), rounded(models[1])
    loaded = _loaded(first, "first"), _loaded(second, "second")
    check_interfaces(models)
    try:
        return _Models(models, loaded, trials, float_inputs(models[1])).verification((first, second))
    except ProcessDied as died:
        raise ModelError(f"a model cannot be compared: {died}; repair it first") from died


def outputs_of_both(first: Source, second: Source) -> Iterator[dict[str, tuple[Array, Array]]]:
    """The outputs of two models of one interface, by name, on the cases in which each row sees a key.

    Raises:
        ModelError: One cannot be run.
    """
    loaded = _loaded(first, "first"), _loaded(second, "second")
    models = read(first), read(second)
    for ran in _Models(models, loaded, Trials(), float_inputs(models[1])).runs():
        if ran.pattern != "empty" and not ran.refusal:
            yield dict(zip(loaded[0].outputs(), zip(ran.old, ran.new, strict=True), strict=True))


def _check_trials(trials: Trials) -> None:
    if trials.cases is not None and trials.cases < 1:
        raise OptionError(f"{trials.cases} cases show nothing; run 1 or more")
    for name in ("tolerance", "atol", "rtol"):
        bound = getattr(trials, name)
        if bound is not None and not bound >= 0:
            raise OptionError(f"{name} is {bound}; it cannot be negative")


def _loaded(source: Source, which: str) -> PieceSession | Reference:
    try:
        return session(source)
    except RuntimeRefusal as refusal:
        raise ModelError(f"the {which} model does not load in ONNX Runtime: {refusal}; repair it first") from refusal


@dataclasses.dataclass(frozen=True)
class _Ran:
    """One case on both models."""

    inputs: Mapping[str, Array]
    where: str
    old: Sequence[Array]
    new: Sequence[Array] = ()
    pattern: Pattern = "full"
    """Which positions are kept."""
    refusal: str = ""
    """Why the second does not run where the first does."""


class _Models:
    """Two models and the inputs to run them on."""

    def __init__(
        self,
        models: tuple[ir.Model, ir.Model],
        sessions: tuple[PieceSession | Reference, PieceSession | Reference],
        trials: Trials,
        dtypes: Mapping[str, ir.DataType] = MappingProxyType({}),
        *,
        tame: bool = False,
    ) -> None:
        """The models as they run; `dtypes` has the types that inputs of the second are given in, where these may be others."""
        self._models, self._dtypes, self._trials = models, dtypes, trials
        self._original, self._rewritten = sessions
        self._unrounded = Unrounded(*models)
        model = models[0]
        facts = Facts(model.graph)
        self._graphs = [(model.graph, facts), (models[1].graph, Facts(models[1].graph))]
        inputs = [value for value in model.graph.inputs if value.const_value is None]
        self._known = all(facts.dims(value) is not None and facts.dtype(value) is not None for value in inputs)
        self._dims = [facts.dims(value) or () for value in inputs]
        self._kinds = kinds(model.graph, facts)
        made = (value for node in model.graph for value in node.outputs)
        self._sizes = {sizes.product(dims) for value in (*inputs, *made) if (dims := facts.dims(value)) is not None}
        self._slots = [slot_of(value, facts, self._kinds[value.name or ""]) for value in inputs]
        self._inner = _made_of(self._dims, model.graph, facts)
        pinned = [(sizes.symbol(name), length) for name, length in facts.numbers(trials.dim).items()]
        self._reach = reach_of(model.graph.all_nodes())
        self._equalities = Equalities([*pinned, *facts.equalities])
        computed = set[ir.DataType | None]().union(*map(_computed, models))
        self._tolerance = tolerance_of(trials, computed)
        tame |= bool(computed & HALVES)
        self._takes_extremes = not tame and any(slot.role == "operand" for slot in self._slots)
        self._cases = self._flipped = 0
        self._refused = 0
        self._max_abs_error = 0.0
        self._refusal = "no sizes fit together"

    def verdict(self) -> Verdict:
        """Runs the cases; the first that differs decides."""
        if not self._known:
            return undecided("the shape or the element type of an input is unknown")
        names = self._original.outputs()
        for ran in self.runs():
            if ran.refusal:
                detail = f"the new model does not run: {ran.refusal}; {ran.where}"
                return self._verdict(detail, ran.inputs, dict(zip(names, ran.old, strict=True)), {})
            for name, left, right, result in zip(names, ran.old, ran.new, self._compared(ran, ran.new), strict=True):
                if not result.equal and self._is_random(ran):
                    return undecided(f"the original model {_RANDOM}")
                if not result.equal:
                    detail = f"output '{name}' {result.detail}; {ran.where}"
                    return self._verdict(detail, ran.inputs, {name: left}, {name: right})
                self._max_abs_error = max(self._max_abs_error, result.max_abs_error)
        if not self._cases:
            return undecided(f"the original model failed on all trial inputs: {self._refusal}")
        return Verdict(True, self._max_abs_error, self._cases, self._equal())

    def verification(self, sources: tuple[Source, Source]) -> Verification:
        """Runs all cases.

        Raises:
            ModelError: Nothing can be run.
            OptionError: A dimension is named that no input has.
        """
        self._check()
        found: dict[str, list[Comparison]] = {name: [] for name in self._original.outputs()}
        different: tuple[str, _Ran] | None = None
        for ran in self.runs():
            if ran.refusal:
                raise ModelError(f"the second model does not run where the first does: {ran.refusal}; {ran.where}")
            new = [as_typed(right, left) for left, right in zip(ran.old, ran.new, strict=True)]
            for name, result in zip(found, self._compared(ran, new), strict=True):
                found[name].append(result)
                if not result.equal and self._is_random(ran):
                    raise ModelError(f"the first model {_RANDOM}; give its random nodes a seed")
                if not result.equal and different is None:
                    different = f"output '{name}' {result.detail}; {ran.where}", ran
        if not self._cases:
            raise ModelError(f"the first model runs on nothing that was tried: {self._refusal}; give lengths with --dim NAME=N")
        kinds_used = tuple((name, kind.name) for name, kind in self._kinds.items())
        outputs = tuple(finding(name, results) for name, results in found.items())
        if different is None:
            return Verification(True, self._cases, self._refused, outputs, self._equal(), kinds_used)
        detail, ran = different
        fed = ran.inputs, self._for_second(ran.inputs)
        divergence = first_divergence(sources, self._models, fed, self._tolerance)
        return Verification(False, self._cases, self._refused, outputs, detail, kinds_used, divergence)

    def _compared(self, ran: _Ran, new: Sequence[Array]) -> list[Comparison]:
        """Every output of a case, without roundings where these make the difference."""
        found = [compare(left, right, self._tolerance) for left, right in zip(ran.old, new, strict=True)]
        if all(result.equal for result in found):
            return found
        self._unrounded.apart = self._original.apart
        without = self._unrounded.compared((ran.inputs, self._for_second(ran.inputs)), (ran.old, new), self._tolerance)
        self._flipped += without is not None
        return without or found

    def _equal(self) -> str:
        """A line on how many cases are equal."""
        flips = f", {self._flipped} of them but for roundings that fall the other way" if self._flipped else ""
        return f"equal in {self._cases} cases{flips}"

    def _check(self) -> None:
        if not self._known:
            raise ModelError("the shape or the element type of an input is unknown; export the model again")
        named = {name for dims in self._dims for dim in dims for name in sizes.symbols(dim)}
        unknown = sorted(set(self._trials.dim) - named)
        if unknown:
            raise OptionError(f"no input has a dimension called {unknown[0]}; there are {', '.join(sorted(named)) or 'none'}")

    def runs(self) -> Iterator[_Ran]:
        """Every case that the first model takes."""
        limit = self._trials.cases
        for seed in itertools.count(self._trials.seed):
            before = self._cases
            for ran in self._round(seed):
                yield ran
                if self._cases == limit:
                    return
            if limit is None or self._cases == before:
                return

    def _round(self, seed: int) -> Iterator[_Ran]:
        counting = {name for name, kind in self._kinds.items() if kind.name in {"lengths", "last"}}
        groups = case_groups([dataclasses.replace(slot, rank=2) if slot.name in counting else slot for slot in self._slots])
        fitting = 0
        for index, (shapes, values) in enumerate(self._shapes()):
            if index == _CHOICES or fitting == len(groups) or (fitting and index >= _MAX_LISTED_OUTPUTS):
                break
            before = self._cases
            for case in groups[fitting]:
                taken = case if self._takes_extremes and case.is_extreme else case.tame(1.0)
                ran = None if taken is None else self._ran(shapes, values, taken, seed)
                if ran is not None:
                    yield ran
            fitting += self._cases > before

    def _shapes(self) -> Iterable[tuple[tuple[tuple[int, ...], ...], Values]]:
        """Shapes of the inputs, with the numbers of the symbols."""
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for values in self._equalities.assignments([*self._dims, *((dim,) for dim in self._inner)], reach=self._reach):
            shapes = tuple(tuple(sizes.evaluate(dim, values) for dim in dims) for dims in self._dims)
            if shapes not in seen and are_at_least(1, self._dims, shapes):
                seen.add(shapes)
                yield shapes, values

    def _ran(self, shapes: Sequence[Sequence[int]], values: Values, case: InputCase, seed: int) -> _Ran | None:
        """One case, or None if the first model refuses it."""
        largest = max((sizes.evaluate(size, values) for size in self._sizes), default=0)
        if largest > _LARGEST:
            self._refusal = f"a tensor of {largest} elements is too large to run"
            self._refused += 1
            return None
        inputs = feeds(self._slots, shapes, case, seed)
        for slot in self._slots:
            array = as_its_kind(self._kinds[slot.name], inputs[slot.name], case, values, seed)
            inputs[slot.name] = in_both(array, self._dtypes.get(slot.name))
        try:
            self._original.apart = self._rewritten.apart = self._is_dangerous(values)
            old = self._original.run(None, inputs)
        except RuntimeRefusal as refusal:
            self._refusal = str(refusal)
            self._refused += 1
            return None
        if case.is_extreme and not self._is_stable(inputs, old):
            tame = case.tame(1.0)
            return None if tame is None else self._ran(shapes, values, tame, seed)
        self._cases += 1
        where = f"case: {case}; sizes: {describe({slot.name: shape for slot, shape in zip(self._slots, shapes, strict=True)})}"
        try:
            new = self._rewritten.run(self._original.outputs(), self._for_second(inputs))
            return _Ran(inputs, where, old, new, case.pattern)
        except RuntimeRefusal as refusal:
            return _Ran(inputs, where, old, refusal=str(refusal))

    def _is_stable(self, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> bool:
        """Whether outputs of the first model are finite, and stay much as they are when its inputs move in their last digits."""
        operands = {slot.name for slot in self._slots if slot.role == "operand"}
        moved = {name: np.asarray(array * _MOVED, array.dtype) if name in operands else array for name, array in inputs.items()}
        again = self._original.run(None, moved)
        return all(
            bool(np.isfinite(one).all()) and compare(one, other, _STABLE).equal
            for one, other in zip(outputs, again, strict=True)
            if one.dtype.kind == "f"
        )

    def _is_random(self, ran: _Ran) -> bool:
        """Whether the first model gives other results when it runs again."""
        again = self._original.run(None, ran.inputs)
        return not all(compare(old, new, self._tolerance).equal for old, new in zip(ran.old, again, strict=True))

    def _is_dangerous(self, values: Values) -> bool:
        """Whether running one of the models may end the process."""
        return any(is_dangerous(graph.all_nodes(), facts, values) for graph, facts in self._graphs)

    def _for_second(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs in the float types of the second model."""
        types = self._dtypes
        return {name: array.astype(types[name].numpy()) if name in types else array for name, array in inputs.items()}

    def _verdict(self, detail: str, inputs: Mapping[str, Array], old: Mapping[str, Array], new: Mapping[str, Array]) -> Verdict:
        return Verdict(False, self._max_abs_error, self._cases, detail, None, Evidence(None, inputs, old, new))


def _computed(model: ir.Model) -> set[ir.DataType | None]:
    """The types of the nodes' results."""
    facts = Facts(model.graph)
    return {facts.dtype(value) for node in model.graph for value in node.outputs}


def _made_of(shapes: Iterable[Dims], graph: ir.Graph, facts: Facts) -> Dims:
    """The lengths of inner values that are computed from those of the inputs, which they have to be large enough for."""
    known = {name for shape in shapes for dim in shape for name in sizes.symbols(dim)}
    found = {
        dim: None for node in graph for value in node.outputs for dim in facts.dims(value) or () if isinstance(dim, sizes.Size)
    }
    return tuple(dim for dim in found if sizes.symbols(dim) <= known)
