"""Running one subgraph on many cases until two results differ."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.kernels.operators import info_of
from onnx_attnfuse.verify.inputs import LARGE, Array, InputCase, Pattern, case_groups, describe, feeds
from onnx_attnfuse.verify.runtime import Operators, Reference, RuntimeRefusal, load, without_kernel
from onnx_attnfuse.verify.subgraph import Subgraph
from onnx_attnfuse.verify.submodel import Functions, Runnable, Submodel
from onnx_attnfuse.verify.verdict import LOOSE, Comparison, ErrorBounds, Evidence, Verdict, compare, undecided

FIRST_CHOICES = 3
"""Choices of sizes to run, from the first that fits on, those beyond constants of the piece not counted."""
_FAR_CASES = 2
"""Cases that are run with sizes beyond constants."""
_LAST_DIGITS, _MOST_ROUNDED = 2**-18, 1e-3
"""The error of a float32 sum of thousands of products, as a part of its addends; how far it may move a result."""
_SIGMOID = 1.2e-7
"""How far ONNX Runtime's Sigmoid of float32 is off on a CPU, whatever its result: at -15 by a sixth of it (1.32)."""
_MAX_TENSOR_ELEMENTS = 1 << 27
"""Elements of the largest tensor of a piece that is still run."""
_MAX_ELEMENTS_OVER_CASES = 1 << 22
"""Elements of the largest tensor, summed over cases, after which no further case is run."""


@dataclasses.dataclass(frozen=True)
class CaseChoice:
    """Sizes for all inputs of a piece."""

    shapes: tuple[tuple[int, ...], ...]
    largest: int
    """Elements of the largest tensor that the piece then computes."""
    values: Mapping[str, int]
    """The numbers of the symbols."""
    names: frozenset[str]
    """The symbols that the inputs' shapes are made of."""
    apart: bool = False
    """Whether running the piece with them may end the process."""
    is_far: bool = False
    """Whether they reach beyond a constant of the piece, beside the usual ones."""

    def contradicts(self, dims: Dims, actual: list[int]) -> bool:
        """Whether a value has another shape than it must have if the inputs' shapes are possible."""
        return any(
            sizes.symbols(dim) <= self.names and sizes.evaluate(dim, self.values) != length
            for dim, length in zip(dims, actual, strict=True)
        )


def is_too_large(choice: CaseChoice) -> bool:
    """Whether nothing is run with these sizes."""
    return choice.largest > _MAX_TENSOR_ELEMENTS


class _NotGiven(Exception):
    """The inputs are not of the kind that something is claimed of."""


class _NewFailed(Exception):
    """The new nodes cannot be run where the old ones can; carries the old results, if they ran."""

    def __init__(self, message: str, old: Sequence[Array] = ()) -> None:
        super().__init__(message)
        self.old = old


class _Sides:
    """Runs the old and the new results, in one session where that is possible."""

    def __init__(
        self,
        subgraph: Subgraph,
        pairs: int,
        opsets: Mapping[str, int],
        functions: Functions,
        *,
        operators: Operators,
        widened: bool,
        rounded: bool,
    ) -> None:
        self._pairs, self._rounded, self._piece = pairs, rounded, subgraph
        self._load = functools.partial(load, operators=operators)
        self._reference = functools.partial(Reference, operators=operators)
        self._make = functools.partial(Submodel, opsets=opsets, functions=functions, widened=widened)
        self.has_sigmoid = any(node.op_type == "Sigmoid" for node in subgraph.nodes)
        self._has_reference = any(_has_more_forms(node) for node in subgraph.nodes)
        self.model = self._make(subgraph)
        self.by_reference = False
        self.without_kernel = without_kernel(self.model.proto)
        self.apart = False
        """Whether to run in another process."""
        self._both: Runnable | None = None
        with contextlib.suppress(RuntimeRefusal):
            both = Runnable(self.model, self._load)
            self._both = both if not rounded and both.session else None

    @property
    def old(self) -> list[str]:
        """The names of the old results in the model."""
        return self.model.results[: self._pairs]

    @property
    def new(self) -> list[str]:
        """Names of the new results in the submodel."""
        return self.model.results[self._pairs : 2 * self._pairs]

    def run(self, inputs: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
        """The old and the new results.

        Raises:
            RuntimeRefusal: The original cannot be run on these inputs.
            _NewFailed: The original can, the new nodes cannot.
            _NotGiven: Nothing is claimed of these inputs.
        """
        if self._both is not None:
            with contextlib.suppress(RuntimeRefusal):
                results = self._both.run(inputs, apart=self.apart)
                return results[: self._pairs], self._claimed(results[self._pairs :])
        old = self._old_alone(inputs)
        try:
            return old, self._claimed(self._new.run(inputs, apart=self.apart))
        except RuntimeRefusal as refusal:
            if not self._is_given(inputs):
                raise _NotGiven from refusal
            raise _NewFailed(str(refusal), old) from refusal

    def _claimed(self, results: list[Array]) -> list[Array]:
        """The new results, if the assumed equalities hold."""
        if not all(bool(given) for given in results[self._pairs :]):
            raise _NotGiven
        return results[: self._pairs]

    def _is_given(self, inputs: Mapping[str, Array]) -> bool:
        """Whether something is claimed of these inputs; asked where the new nodes do not run."""
        if len(self._piece.results) == 2 * self._pairs:
            return True
        return all(bool(given) for given in self._given.run(inputs, apart=self.apart))

    def _old_alone(self, inputs: Mapping[str, Array]) -> list[Array]:
        if self._rounded:
            return self._old_by_reference.run(inputs, apart=False)
        try:
            return self._old.run(inputs, apart=self.apart)
        except RuntimeRefusal as refusal:
            if not self._has_reference:
                raise
            try:
                old = self._old_by_reference.run(inputs, apart=False)
            except RuntimeRefusal:
                raise refusal from None
        self.by_reference = True
        return old

    def unfit(self, found: Verdict, choice: CaseChoice, facts: Facts) -> str | None:
        """Why a finding is void: the original has other shapes than are known, or does not run; such inputs cannot occur."""
        assert found.evidence is not None
        nodes = dict.fromkeys((*self._piece.only(*self._piece.results[: self._pairs]).nodes, *self._piece.apart()))
        values = [value for node in nodes for value in node.outputs if value.name and facts.dims(value) is not None]
        part = Runnable(self._make(self._piece.only(*values), shapes=True), self._load)
        try:
            arrays = part.run(found.evidence.inputs, apart=self.apart)
        except RuntimeRefusal as refusal:
            return str(refusal)
        for value, array in zip(values, arrays, strict=True):
            dims, actual = facts.dims(value) or (), array.tolist()
            if choice.contradicts(dims, actual):
                return f"sizes that fit together were not found: '{value.name}' was {actual} instead of {list(dims)}"
        return None

    @functools.cached_property
    def _old(self) -> Runnable:
        return Runnable(self._make(self._piece.only(*self._piece.results[: self._pairs])), self._load)

    @functools.cached_property
    def _old_by_reference(self) -> Runnable:
        return Runnable(self._old.model, self._reference)

    @functools.cached_property
    def _new(self) -> Runnable:
        part = Runnable(self._make(self._piece.only(*self._piece.results[self._pairs :])), self._load)
        if self._rounded:
            with contextlib.suppress(RuntimeRefusal):  # operators around attention have no reference
                part.session = self._reference(part.model.proto)
        return part

    @functools.cached_property
    def _given(self) -> Runnable:
        return Runnable(self._make(self._piece.only(*self._piece.results[2 * self._pairs :])), self._load)


def _has_more_forms(node: ir.Node) -> bool:
    """Whether the reference may run the node where ONNX Runtime refuses it: masks and tables that broadcast, packed operands."""
    info = info_of(node)
    return info is not None and info.on_cpu == "some forms"


class Trial:
    """One piece, judged in one precision."""

    def __init__(
        self,
        subgraph: Subgraph,
        pairs: int,
        facts: Facts,
        opsets: Mapping[str, int],
        functions: Functions,
        *,
        tolerance: float,
        operators: Operators = (),
        widened: bool = False,
        rounded: bool = False,
    ) -> None:
        """Sets the trial up.

        Args:
            subgraph: The old results, the new ones, then the assumed equalities.
            pairs: How many old results there are.
            facts: Shapes and types of its graph.
            opsets: Opset imports of its graph.
            functions: The model's own functions.
            tolerance: The largest difference, relative to the magnitude of the result.
            operators: Operators of other domains.
            widened: Compute in float32 values in float16 or bfloat16.
            rounded: Let the reference implementation compute the original, which rounds every float16 result as a GPU does.
        """
        self._facts = facts
        self._sides = _Sides(subgraph, pairs, opsets, functions, operators=operators, widened=widened, rounded=rounded)
        self._tolerance = tolerance
        self._cases = 0
        self._max_abs_error = 0.0
        self._relative = 0.0
        self._telling = False
        self._void = 0
        self.fitting: list[CaseChoice] = []
        """The sizes that the original runs with."""
        self._refusal = "no sizes fit together"
        self._work = 0

    def verdict(self, choices: Iterable[CaseChoice], *, without: Collection[Pattern] = ()) -> Verdict:
        """Runs the cases; the first that differs decides.

        Args:
            choices: Sizes, best first.
            without: Patterns of padding to leave out.
        """
        groups = case_groups(self._sides.model.slots)
        left = FIRST_CHOICES
        for choice in choices:
            usual = sum(not item.is_far for item in self.fitting)
            if usual == len(groups) or not left:
                break
            if is_too_large(choice):
                self._refusal = f"a tensor of {choice.largest} elements is too large to run"
                continue
            found = self._tried(choice, groups[1][:_FAR_CASES] if choice.is_far else groups[usual], without=without)
            if found is not None:
                return found
            left -= not choice.is_far and len(self.fitting) > self._void
        return self._summary()

    def _tried(self, choice: CaseChoice, cases: Iterable[InputCase], *, without: Collection[Pattern]) -> Verdict | None:
        """Runs cases with one choice of sizes; the verdict if one differs."""
        before = self._cases
        for case in cases if self._tolerance != LOOSE else filter(None, (case.tame() for case in cases)):
            if self._cases and self._work + choice.largest > _MAX_ELEMENTS_OVER_CASES:
                break
            found = self._differing(choice, case) if case.pattern not in without else None
            if found is None:
                continue
            unfit = self._sides.unfit(found, choice, self._facts)
            if unfit is None:
                return found
            self._refusal, self._cases = unfit, before
            self._void += 1
            return None
        if self._cases > before:
            self.fitting.append(choice)
        return None

    def _differing(self, choice: CaseChoice, case: InputCase) -> Verdict | None:
        """Runs one case; the verdict if the results differ.

        An integer without axes may be a length: where the original refuses a number, it gets each length of the other inputs.
        """
        slots = self._sides.model.slots
        self._sides.apart = choice.apart
        for count in (None, *(dict.fromkeys(itertools.chain(*choice.shapes)) if any(slot.is_count for slot in slots) else ())):
            inputs = feeds(slots, choice.shapes, case, count=count)
            try:
                old, new = self._sides.run(inputs)
                break
            except RuntimeRefusal as refusal:
                self._refusal = str(refusal)
            except _NotGiven:
                self._refusal = "none meets the assumptions"
            except _NewFailed as failed:
                return self._failed(f"the new nodes do not run: {failed}", choice, case, inputs, failed.old)
        else:
            return None
        self._work += choice.largest
        results = [compare(left, right, self._tolerance) for left, right in zip(old, new, strict=True)]
        different = next((result for result in results if not result.equal), None)
        if different is not None and case.factor == LARGE and self._is_rounding(inputs, old, new):
            return None
        if different is not None and self._is_by_sigmoid(inputs, old, new):
            return None
        if different is not None:
            return self._failed(different.detail, choice, case, inputs, old, new)
        self._note(results)
        return None

    def _is_rounding(self, inputs: Mapping[str, Array], old: Sequence[Array], new: Sequence[Array]) -> bool:
        """Whether the last digits of the operands move the original as far, as where large scores sum thousands of products.

        A mask that erases scores by rounding erases moved ones, too, so rows without a key are judged as ever.
        """
        slots = [slot for slot in self._sides.model.slots if slot.role == "operand" and slot.dtype.is_floating_point()]
        random = np.random.default_rng(len(inputs))
        moved = dict(inputs)
        for slot in slots:
            array = inputs[slot.name]
            moved[slot.name] = (array * (1 + random.choice([-_LAST_DIGITS, _LAST_DIGITS], array.shape))).astype(array.dtype)
        try:
            shifted, _ = self._sides.run(moved)
        except (RuntimeRefusal, _NotGiven, _NewFailed):
            return False
        for left, right, other in zip(old, new, shifted, strict=True):
            by_rounding = compare(left, other, 0.0).relative
            if not compare(left, right, min(_MOST_ROUNDED, by_rounding)).equal:
                return False
        return True

    def _is_by_sigmoid(self, inputs: Mapping[str, Array], old: Sequence[Array], new: Sequence[Array]) -> bool:
        """Whether results are as close to 0 as ONNX Runtime's Sigmoid is wrong there, times the largest operand."""
        if not self._sides.has_sigmoid:
            return False
        operands = [inputs[slot.name] for slot in self._sides.model.slots if slot.role == "operand" and not slot.addend]
        most = max((float(np.abs(array).max(initial=0.0)) for array in operands if array.dtype.kind == "f"), default=0.0)
        bounds = ErrorBounds(_SIGMOID * most, self._tolerance)
        return all(compare(left, right, bounds).equal for left, right in zip(old, new, strict=True))

    def _note(self, results: Sequence[Comparison]) -> None:
        self._cases += 1
        self._max_abs_error = max(self._max_abs_error, *(result.max_abs_error for result in results))
        self._relative = max(self._relative, *(result.relative for result in results))
        self._telling |= results[0].telling

    def _failed(
        self,
        what: str,
        choice: CaseChoice,
        case: InputCase,
        inputs: Mapping[str, Array],
        old: Sequence[Array],
        new: Sequence[Array] = (),
    ) -> Verdict:
        model = self._sides.model
        shapes = describe(dict(zip((slot.name for slot in model.slots), choice.shapes, strict=True)))
        evidence = Evidence(
            model.proto,
            dict(inputs),
            dict(zip(self._sides.old, old, strict=False)),
            dict(zip(self._sides.new, new, strict=False)),
        )
        detail = f"{what}; case: {case}; sizes: {shapes}{self._by_reference()}"
        return Verdict(False, self._max_abs_error, self._cases + 1, detail, None, evidence)

    def _summary(self) -> Verdict:
        if not self._cases:
            return undecided(f"the original model failed on all trial inputs: {self._refusal}")
        if self._void >= len(self.fitting):
            return undecided(self._refusal)
        if not self._telling:
            return undecided("every result of the original is NaN")
        detail = f"equal in {self._cases} cases, error {self._relative:.1e} of the magnitude{self._by_reference()}"
        if self._sides.by_reference:
            detail += "; the original by ONNX's reference, as ONNX Runtime refuses it"
        return Verdict(True, self._max_abs_error, self._cases, detail)

    def _by_reference(self) -> str:
        """A note for the verdict's detail where operators were run by NumPy references; empty elsewhere."""
        names = ", ".join(self._sides.without_kernel)
        return f"; by NumPy references, as ONNX Runtime has no kernel on the CPU for {names}" if names else ""
