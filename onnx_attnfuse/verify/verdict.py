"""Verdicts on two results: equal, different with the evidence, or undecided."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.graph.thresholds import LEAST_SUM
from onnx_attnfuse.json_report import JsonReport
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.options import Trials
from onnx_attnfuse.verify.runtime import OLDEST, installed, is_old

_LONGEST = 1000
"""Characters of a key in an archive, whose format has two bytes for the length of one."""
TIGHT = 1e-4
"""float32: fused and unfused differ by 1e-6 of the magnitude, with large logits by 2e-5; a mask entry of 64 makes 1e-2."""
LOOSE = 5e-3
"""float16: the unfused nodes round scores of 4 to 2e-3 and the result to 5e-4 each time, the operator once: 7e-4 apart."""


_TOLERANCE = 1e-3
"""Ten times that of one site: errors of a site go through normalisations, which may enlarge them, and add up."""
_HALF_TOLERANCES = {ir.DataType.BFLOAT16: 2e-1, ir.DataType.FLOAT16: 5e-2}


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """A case in which two results differ, enough to run it again."""

    model: onnx.ModelProto | None
    """Computes both results; None where whole models were compared."""
    inputs: Mapping[str, Array]
    old: Mapping[str, Array]
    new: Mapping[str, Array]
    """The outputs by name; empty if the new nodes could not be run."""


@dataclasses.dataclass(frozen=True, eq=False)
class Verdict:
    """Whether two results are the same, and how that was found."""

    equal: bool
    """Shown equal; false also where it could not be decided."""
    max_abs_error: float
    cases: int
    """How many inputs both were run on."""
    detail: str
    """One line: the compared cases, or the case that differs and where."""
    undecided: str | None = None
    """Why nothing could be compared; None if something was."""
    evidence: Evidence | None = None
    """Present if they differ."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """The largest error found at one site that was shown equal, and the number of inputs it was run on."""

    max_abs_error: float
    cases: int


def of_parts(verdicts: Iterable[Verified | None]) -> Verified | None:
    """The verdict on several parts, of those that were judged; None where none was."""
    found = [verdict for verdict in verdicts if verdict is not None]
    return Verified(max(item.max_abs_error for item in found), sum(item.cases for item in found)) if found else None


def together(last: Verified | None, first: Verified | None) -> Verified | None:
    """The verdict on two rewrites, the second of the result of the first; None where the second was not judged."""
    if last is None or first is None:
        return last
    return Verified(last.max_abs_error + first.max_abs_error, min(last.cases, first.cases))


def undecided(reason: str) -> Verdict:
    """The verdict where nothing could be compared."""
    return Verdict(equal=False, max_abs_error=0.0, cases=0, detail=f"undecided: {reason}", undecided=reason)


def by_this_runtime(verdict: Verdict) -> Verdict:
    """The verdict as far as the installed ONNX Runtime can tell: one that is too old shows equality, but no difference.

    It may not know an operator, an attribute or an opset; its own kernel may differ.
    """
    if verdict.equal or not is_old(version := installed()):
        return verdict
    found = verdict.undecided or f"with it {verdict.detail}"
    wanted = ".".join(map(str, OLDEST))
    return undecided(f"onnxruntime {version} is too old to verify with; run pip install 'onnxruntime>={wanted}' ({found})")


@dataclasses.dataclass(frozen=True)
class OutputFinding:
    """One output over all cases."""

    name: str
    differing: int
    """Cases in which it differs."""
    max_abs_error: float | None
    """Over all elements that are finite in both models; None where shapes or types differ, or elements that are no floats."""
    relative_error: float | None
    """`max_abs_error` as a part of the magnitude of the first model's output."""
    nan_only_in_first: int
    nan_only_in_second: int
    """Elements, over all cases, that are NaN in one model only."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first inner value in which the models differ, of those that both have by name."""

    value: str
    node_in_first: str
    """The node that computes it, as `name (operator)`."""
    node_in_second: str
    site: str | None
    """The attention, by the name of its Softmax or operator, between the value and the last equal values; None: there is none."""
    detail: str
    """Where the value differs, and in how many elements."""


@dataclasses.dataclass(frozen=True)
class Verification(JsonReport):
    """Whether two models are the same, and how that was found."""

    equal: bool
    cases: int
    """Inputs that both were run on."""
    refused: int
    """Inputs that the first model does not run on; these are skipped."""
    outputs: tuple[OutputFinding, ...]
    detail: str
    """One line: that they are equal, or the first case in which they differ, and where."""
    kinds: tuple[tuple[str, str], ...]
    """Every input and its assumed kind."""
    divergence: Divergence | None = None
    """Where the difference begins; None if nothing differs, or no inner value is in both models."""
    notes: tuple[str, ...] = ()
    """Lines on other measurements: the error of a quantised cache."""

    def to_dict(self) -> dict[str, Any]:
        """The verification as plain JSON types."""
        return {**super().to_dict(), "kinds": dict(self.kinds)}


def finding(name: str, results: Sequence[Comparison]) -> OutputFinding:
    """The comparisons of one output in all cases, together."""
    errors, parts = ([getattr(result, field) for result in results] for field in ("max_abs_error", "relative"))
    return OutputFinding(
        name,
        sum(not result.equal for result in results),
        max(errors) if np.isfinite(errors).all() else None,
        max(parts) if np.isfinite(parts).all() else None,
        sum(result.nan_lost for result in results),
        sum(result.nan_found for result in results),
    )


def save(verdict: Verdict, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes `<name>.txt` with the verdict's line, `<name>.npz` with inputs and results, and `<name>.onnx` if there is a piece.

    In the archive the arrays are called `input:<name>`, `old:<name>` and `new:<name>`. A key that would be too long has the
    array's number instead, and the text file has a line `<key> is <name>`.

    Args:
        verdict: One that found a difference; nothing is written for any other.
        folder: Where to; made if it does not exist.
        name: The name of the files; characters that file names cannot have are replaced.

    Returns:
        The files written.

    Raises:
        OptionError: The folder cannot be written to.
    """
    if verdict.evidence is None:
        return []
    evidence = verdict.evidence
    stem = re.sub(r"[^\w.-]+", "_", name).strip("._").encode()[:100].decode(errors="ignore") or "site"
    arrays, renamed = _keyed({"input": evidence.inputs, "old": evidence.old, "new": evidence.new})
    files = {suffix: folder / f"{stem}{suffix}" for suffix in (".txt", ".npz", ".onnx")}
    if evidence.model is None:
        del files[".onnx"]
    try:
        with staged() as stage:
            stage.temporary(files[".txt"]).write_text("\n".join([name, verdict.detail, *renamed, ""]), encoding="utf-8")
            with stage.temporary(files[".npz"]).open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            if evidence.model is not None:
                stage.temporary(files[".onnx"]).write_bytes(evidence.model.SerializeToString())
    except OSError as error:
        raise OptionError(f"cannot write to {folder}: {error.strerror or error}; choose another folder for evidence") from error
    return list(files.values())


def _keyed(groups: Mapping[str, Mapping[str, Array]]) -> tuple[dict[str, Array], list[str]]:
    """The arrays by their keys in the archive, and a line on each key that is a number."""
    arrays: dict[str, Array] = {}
    renamed: list[str] = []
    for group, members in groups.items():
        for count, (name, array) in enumerate(members.items()):
            key = f"{group}:{name}"
            if len(key) > _LONGEST:
                key = f"{group} {count}"
                renamed.append(f"{key} is {name}")
            arrays[key] = array
    return arrays, renamed


@dataclasses.dataclass(frozen=True)
class ErrorBounds:
    """How far an element may be off: by `absolute`, and by a part of itself."""

    absolute: float
    relative: float


def tolerance_of(trials: Trials, computed: Collection[ir.DataType | None]) -> float | ErrorBounds:
    """How far outputs of whole models that compute in some types may be apart."""
    if trials.atol is not None or trials.rtol is not None:
        return ErrorBounds(trials.atol or 0.0, trials.rtol or 0.0)
    if trials.tolerance is not None:
        return trials.tolerance
    return next((tolerance for dtype, tolerance in _HALF_TOLERANCES.items() if dtype in computed), _TOLERANCE)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far two arrays are apart."""

    equal: bool
    max_abs_error: float
    """Over all elements that are finite in both."""
    relative: float
    """`max_abs_error` as a part of the magnitude of the result."""
    detail: str
    """The differences and where; empty if there are none."""
    telling: bool = True
    """Whether the first array has an element that is a number."""
    nan_lost: int = 0
    """Elements that are NaN in the first only."""
    nan_found: int = 0
    """Elements that are NaN in the second only."""


def compare(old: Array, new: Array, tolerance: float | ErrorBounds) -> Comparison:
    """Judges `new` against `old`; a tolerance that is a number is a part of the magnitude of `old`."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return Comparison(False, np.inf, np.inf, f"{old.dtype.name} {list(old.shape)} became {new.dtype.name} {list(new.shape)}")
    if old.dtype.kind not in "fV":
        return _exact(old, new)
    left, right = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(left) & np.isfinite(right)
    same = finite | (np.isnan(left) & np.isnan(right)) | (left == right)
    error = np.abs(np.where(finite, left, 0) - np.where(finite, right, 0))
    magnitude = max(float(np.abs(left[finite]).max(initial=0.0)), LEAST_SUM) if left[finite].any() else 1.0
    largest = float(error.max(initial=0.0))
    wrong = ~same | (error > _allowed(tolerance, left, magnitude))
    lost, found = np.isnan(left), np.isnan(right)
    if not wrong.any():
        return Comparison(True, largest, largest / magnitude, "", telling=not bool(np.isnan(left).all()))
    worst = np.where(same, error, np.inf).argmax() if not same.all() else error.argmax()
    detail = _at(old, new, int(worst), int(wrong.sum()))
    apart = int((lost & ~found).sum()), int((found & ~lost).sum())
    return Comparison(False, largest, largest / magnitude, detail, nan_lost=apart[0], nan_found=apart[1])


def _allowed(tolerance: float | ErrorBounds, array: Array, magnitude: float) -> Array:
    """How far each element may be off."""
    if isinstance(tolerance, ErrorBounds):
        return tolerance.absolute + tolerance.relative * np.abs(np.where(np.isfinite(array), array, 0))
    return np.asarray(tolerance * magnitude)


def _exact(old: Array, new: Array) -> Comparison:
    wrong = old != new
    if not wrong.any():
        return Comparison(True, 0.0, 0.0, "")
    return Comparison(False, np.inf, np.inf, _at(old, new, int(wrong.argmax()), int(wrong.sum())))


def _at(old: Array, new: Array, index: int, count: int) -> str:
    place = [int(item) for item in np.unravel_index(index, old.shape)]
    return f"at {place} {_number(old, index)} became {_number(new, index)}; {count} of {old.size} elements differ"


def _number(array: Array, index: int) -> str:
    return f"{float(array.reshape(-1)[index]):.6g}"


def as_typed(array: Array, other: Array) -> Array:
    """A float array in the float type of another."""
    return array.astype(other.dtype) if array.dtype.kind in "fV" and other.dtype.kind in "fV" else array
