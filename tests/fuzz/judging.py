"""Whether a model still computes what it computed, and what to call it where it does not.

The truth is the original in ONNX Runtime on the CPU with nothing optimised; for a model that was planned for a GPU in float16,
whose results are rounded at every node there, it is ONNX's reference implementation. Where the result differs, the original is
asked for its other `opinions`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import re
import traceback
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnxruntime

from benchmarks.harness import quietly
from onnx_attnfuse.errors import ModelError, OptionError, VerificationError
from onnx_attnfuse.verify.runtime import Reference, RuntimeRefusal, one_line
from tests.fuzz import journeys
from tests.fuzz.feeds import feeds, is_small, sizes_of
from tests.fuzz.gradients import Impossible, Runs, differentiated
from tests.fuzz.model import Written, write
from tests.fuzz.opinions import Opinions, Runner, apart, narrowed, tolerance, widened
from tests.fuzz.recipe import Recipe
from tests.fuzz.writer import Sizes
from tests.support.bundled import Array

FAILURES = ("wrong", "invalid", "fails", "traceback", "again", "crash", "hang", "broken")
"""What must not be: other numbers; a model that is none; one that ends in an error where the original ran; an exception of ours;
a second run that finds what the first left; a process that ended; one that does not end; an exception of the fuzzer itself."""
CLASSES = ("fused", "refused", "differs", "declined", "unrunnable", "runtime", *FAILURES)
"""Other outcomes: refused by the judge alone; a model or an option that is refused as a whole; an original that ONNX Runtime does
not run; one that it runs wrongly when it optimises, as it does the result."""


_LEVEL = 2.5
"""How large scores are at most that `level-rows` is said of in float16; biases come on top."""
_ORDINARY = 1e3
"""How large scores are at most."""
_LEVEL_SINGLE = 30.0
"""How large scores are at most of which -1e9 leaves nothing in float32."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one graph."""

    kind: str
    detail: str = ""
    fused: int = 0
    codes: tuple[str, ...] = ()
    feeds: Mapping[str, Array] | None = None
    """The inputs on which it fails."""

    @property
    def bad(self) -> bool:
        """Whether it must not be."""
        return self.kind in FAILURES

    @property
    def signature(self) -> tuple[str, ...]:
        """What stays when a failure is shrunk: its kind, and what became what, or the words of the message."""
        if self.kind != "wrong":
            return self.kind, *re.sub(r"'[^']*'|[^A-Za-z ]", " ", self.detail.rpartition("p=")[2]).split()[:8]
        became = re.search(r"\] (\S+) became (\S+);", self.detail)
        values = [item if item in {"nan", "0"} else "number" for item in (became.groups() if became else ())]
        return self.kind, str(self.detail.startswith("full")), *values


class Subject:
    """One recipe: its model, and what the model computes, for as many journeys as are made."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.sizes = sizes_of(recipe)[0]
        self.written: Written = write(recipe, self.sizes)
        self._cases: list[tuple[str, Sizes, dict[str, Array], list[Array]]] | None = None

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        """The model before its journey."""
        if self.recipe.journey == "gradients":
            return differentiated(self.written.flat, self.written.inputs)
        return self.written.model

    @functools.cached_property
    def _is_inferred(self) -> bool:
        """Whether ONNX's own shape inference finds nothing wrong with the original; in functions it knows no fused operators."""
        try:
            onnx.checker.check_model(self.model, full_check=True)
        except Exception:  # noqa: BLE001 - the checker raises many kinds
            return False
        return True

    @property
    def _flat(self) -> onnx.ModelProto:
        """The model without functions."""
        return self.model if self.recipe.journey == "gradients" else self.written.flat

    def cases(self) -> list[tuple[str, Sizes, dict[str, Array], list[Array]]]:
        """All inputs on which the original runs, with its results."""
        if self._cases is None:
            ran = ((*case, self._ran(*case[1:])) for case in feeds(self.recipe, self.written.inputs))
            self._cases = [
                (*case, results)
                for *case, results in ran
                if results is not None and self._are_level(case[2]) and self._keep_keys(case[2])
            ]
        return self._cases

    def _are_level(self, inputs: Mapping[str, Array]) -> bool:
        """Whether scores are as small as `level-rows` says, beside -1e4 in float16 with what a bias adds, or beside -1e9."""
        if self.recipe.journey == "gradients":
            most = _LEVEL_SINGLE if "-1e9" in {self.recipe.floor, *(mask.fill for mask in self.recipe.masks)} else math.inf
        else:
            most = _LEVEL if is_small(self.recipe) and isinstance(self.original, Reference) else math.inf
        found = Reference(self.written.flat).run(self.written.scores, inputs) if self.written.scores and most < math.inf else []
        return all(not scores.size or float(np.abs(scores).max()) <= most for scores in found)

    def _keep_keys(self, inputs: Mapping[str, Array]) -> bool:
        """Whether rows of a converted model keep a key: in float16 all finite numbers that mask are one, and operators differ."""
        recipe = self.recipe
        several = len(recipe.masks) > 1 or recipe.operator != "none" or any(mask.applied == "integers" for mask in recipe.masks)
        if not recipe.journey.startswith("convert") or not several:
            return True
        nodes = self._flat.graph.node
        names = [node.input[0] for node in nodes if node.op_type == "Softmax"]
        names += [node.input[3] for node in nodes if node.op_type == "Attention" and len(node.input) > 3 and node.input[3]]
        tops = [array.max(-1) for array in Reference(self._flat).run(names, inputs) if array.dtype.kind == "f" and array.size]
        return not any(bool(((top < -_ORDINARY) & np.isfinite(top)).any()) for top in tops)

    def _ran(self, sizes: Sizes, inputs: Mapping[str, Array]) -> list[Array] | None:
        """What the original computes; nothing if it loses an axis on the way, as reshapes with -1 do where a length is 0."""
        try:
            results = self.original.run(None, inputs)
        except RuntimeRefusal:
            return None
        declared = self.written.results[: 1 if self.recipe.journey == "gradients" else None]
        shapes = [tuple(sizes.of(dim) for dim in dims) for dims in declared]
        return results if shapes == [result.shape for result in results[: len(shapes)]] else None

    @functools.cached_property
    def original(self) -> Runner:
        """The model as it was."""
        if self.recipe.journey == "gradients":
            return Runs(self.model)
        rounded = self.recipe.ep == "cuda" and self.recipe.dtype == "float16"
        return Reference(self.written.flat) if rounded else _Session(self.model)

    @functools.cached_property
    def opinions(self) -> Opinions:
        """What else the model may say."""
        model = widened(self._flat, self.recipe.dtype == "float16")
        try:
            wide = Runs(model) if self.recipe.journey == "gradients" else _Session(model)
        except RuntimeRefusal:
            wide = None
        half = narrowed(self._flat)
        narrow: tuple[Runner, ...] = (Reference(half), _Session(half)) if self.recipe.journey.startswith("convert") else ()
        if self.recipe.dtype == "float16" and isinstance(self.original, _Session):
            narrow += (Reference(self._flat),)  # ONNX Runtime skips a Cast to float16 before one to float32
        return Opinions(self.original, wide, self.recipe, narrow)

    def prepare(self) -> None:
        """Runs the original, and loads it as the result will be loaded; what it refuses is told by `outcome`."""
        with contextlib.suppress(Impossible, RuntimeRefusal):
            self.cases()
            if self.recipe.journey == "optimize_enabled":
                _Session(self.model, enabled=True)

    def outcome(self, level: str) -> Outcome:
        """Makes the journey with verification or without, and judges what comes back."""
        with quietly(logging.CRITICAL), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self._outcome(level) if self.cases() else Outcome("unrunnable")
            except (Impossible, RuntimeRefusal) as refusal:
                return Outcome("unrunnable", str(refusal))

    def _outcome(self, level: str) -> Outcome:
        try:
            arrived = journeys.travel(self.recipe, self.model, level)
        except (ModelError, OptionError) as error:
            return Outcome("declined", one_line(error))
        except VerificationError as error:
            return Outcome("differs", one_line(error))
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            place = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome("traceback", f"{type(error).__name__} in {place.name}: {one_line(error)}")
        kind, detail, inputs = self._compared(arrived)
        codes = tuple(sorted(arrived.codes))
        if kind:
            return Outcome(kind, detail, arrived.fused, codes, inputs)
        if "defect" in codes:
            return Outcome("traceback", "; ".join(arrived.messages), arrived.fused, codes)
        if arrived.again:
            return Outcome("again", f"{arrived.again} more by a second run", arrived.fused, codes)
        if "differs" in codes:
            return Outcome("differs", "; ".join(arrived.messages), arrived.fused, codes)
        return Outcome("fused" if arrived.fused else "refused", "", arrived.fused, codes)

    def _compared(self, arrived: journeys.Arrived) -> tuple[str, str, Mapping[str, Array] | None]:
        """The kind of failure and what it is, or ''."""
        model = arrived.model
        try:
            if self.recipe.journey != "gradients":
                onnx.checker.check_model(model, full_check=self._is_inferred and not model.functions)
        except Exception as error:  # noqa: BLE001 - the checker raises many kinds
            return "invalid", f"checker: {one_line(error)}", None
        try:
            run = _Result(model, self.recipe)
        except RuntimeRefusal as refusal:
            return "invalid", str(refusal), None
        for pattern, sizes, inputs, old in self.cases():
            where = f"{pattern}, b={sizes.b} s={sizes.s} t={sizes.t} p={sizes.p}"
            try:
                new = run(inputs)
            except RuntimeRefusal as refusal:
                if self._fails_in_reference(inputs):
                    continue
                return "fails", f"{where}: {refusal}", inputs
            kept = self._tokens(inputs, sizes) if arrived.packed else None
            for place, right in enumerate(new):
                if detail := self._differing(inputs, old, place, right, kept):
                    return self._blamed(run, inputs), f"{where}: {detail}", inputs
        return "", "", None

    def _fails_in_reference(self, inputs: Mapping[str, Array]) -> bool:
        """Whether the original fails where ONNX's reference runs the result, as Concat of operands without elements does."""
        if self.recipe.ep != "cuda" or not self.recipe.journey.startswith("convert"):
            return False
        try:
            Reference(narrowed(self._flat)).run(None, inputs)
        except RuntimeRefusal:
            return True
        return False

    def _differing(self, inputs: Mapping[str, Array], old: Sequence[Array], place: int, new: Array, kept: Array | None) -> str:
        """What differs from the result at this place, if it is nothing that the original gives, too; or ''."""
        among = old if self.recipe.journey == "gradients" else ()
        left, right = _shown(old[place], new, kept)
        detail = apart(left, right, tolerance(self.recipe), among)
        if not detail:
            return ""
        for more in (False, True):
            others = [_shown(left, run[place], kept)[1] for run in self.opinions.of(inputs, more=more)]
            if self.opinions.cover(left, right, others, among):
                return ""
        return detail

    def _blamed(self, run: _Result, inputs: Mapping[str, Array]) -> str:
        """Whether ONNX Runtime's own optimisations are to blame."""
        if not run.enabled:
            return "wrong"
        try:
            off = _Result(run.model, dataclasses.replace(self.recipe, journey="optimize"))(inputs)
            old = _Session(self.model).run(None, inputs)
        except RuntimeRefusal:
            return "wrong"
        same = all(not apart(left, right, tolerance(self.recipe)) for left, right in zip(old, off, strict=True))
        return "runtime" if same else "wrong"

    def _tokens(self, inputs: Mapping[str, Array], sizes: Sizes) -> Array:
        """(b, s): which tokens are no padding; of the others a packed encoder gives nothing."""
        kept = np.ones((sizes.b, sizes.s), bool)
        for name, given in self.written.inputs.items():
            if given.role == "mask" and len(given.dims) == 2 and given.dims[-1] == "s" and name.startswith("mask"):
                kept &= inputs[name].astype(bool)
            if given.role == "lengths":
                kept &= np.arange(sizes.s) < inputs[name][:, None]
        return kept


def _shown(left: Array, right: Array, kept: Array | None) -> tuple[Array, Array]:
    """Both results, zero where nothing is said; in float32 if only one of them is."""
    if left.dtype != right.dtype:
        left, right = left.astype(np.float32), right.astype(np.float32)
    if kept is None or left.shape[:2] != kept.shape or left.shape != right.shape:
        return left, right
    where = kept.reshape(*kept.shape, *[1] * (left.ndim - 2))
    return np.where(where, left, 0), np.where(where, right, 0)


def _narrowed(array: Array) -> Array:
    """In float16; what is finite stays finite."""
    most = float(np.finfo(np.float16).max)
    return np.where(np.isinf(array), array, np.clip(array, -most, most)).astype(np.float16)


class _Session:
    """A model in ONNX Runtime, as it is written or optimised."""

    def __init__(self, model: onnx.ModelProto, *, enabled: bool = False) -> None:
        options = onnxruntime.SessionOptions()
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if enabled else levels.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        try:
            self._session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RuntimeRefusal(one_line(error)) from error
        self._names = [entry.name for entry in self._session.get_inputs()]

    def run(self, outputs: None, feeds: Mapping[str, Array]) -> list[Array]:
        """All outputs; inputs in the types that the model has."""
        try:
            return self._session.run(outputs, {name: feeds[name] for name in self._names})
        except Exception as error:
            raise RuntimeRefusal(one_line(error)) from error


class _Result:
    """The result of a journey; by the reference where it is planned for a GPU and ONNX Runtime's CPU refuses it.

    What is planned for a GPU in float16 is rounded at every node, as the original is; also where the original was float32 and was
    converted before it was planned: what operators add in float32 there, such as Attention, those of the CPU add in float16.
    """

    def __init__(self, model: onnx.ModelProto, recipe: Recipe) -> None:
        self.model = model
        self.enabled = recipe.journey == "optimize_enabled"
        self._foreign = recipe.ep == "cuda"
        self._reference: Reference | None = None
        self._session: _Session | Runs | None = Runs(model) if recipe.journey == "gradients" else None
        if self._session is not None:
            return
        if self._foreign and (recipe.dtype == "float16" or recipe.journey == "convert_optimize"):
            self._reference = _reference(model)
            return
        try:
            self._session = _Session(model, enabled=self.enabled)
        except RuntimeRefusal:
            if not self._foreign:
                raise
            self._reference = _reference(model)

    def __call__(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs; inputs are given in the types that the model has now."""
        half = {entry.name for entry in self.model.graph.input if entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
        inputs = {name: _narrowed(array) if name in half else array for name, array in inputs.items()}
        refused = ""
        if self._session is not None:
            try:
                return self._session.run(None, inputs)
            except RuntimeRefusal as refusal:
                if not self._foreign:
                    raise
                refused = str(refusal)
        self._reference = self._reference or _reference(self.model)
        try:
            return self._reference.run(None, inputs)
        except RuntimeRefusal as refusal:
            raise RuntimeRefusal(f"{refused}; by the reference: {refusal}" if refused else str(refusal)) from refusal


def _reference(model: onnx.ModelProto) -> Reference:
    """A model in the reference, which knows no fused operators in functions."""
    return Reference(onnx.inliner.inline_local_functions(model) if model.functions else model)
