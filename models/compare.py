"""Runs exports with onnxruntime and measures how far their outputs are apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort

from models.references import Case, read

#: Largest allowed error, relative to one plus the expected value.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}
Outputs = tuple[np.ndarray, ...]


@dataclass
class Comparison:
    """How a fused model compares with its export and with torch.

    Attributes:
        against_export: Largest error over the cases that the export runs.
        against_torch: Largest error over the values where the export agrees with torch.
        cases: How many cases were compared.
        wrong: What is wrong with the fused model, one line per case.
        stuck: Cases that the export itself does not run, by what onnxruntime says.
        off: Cases where the export itself differs from torch, and how much.
        unchecked: Why nothing was compared; empty if something was.
    """

    against_export: float = 0.0
    against_torch: float = 0.0
    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    stuck: dict[str, list[str]] = field(default_factory=dict)
    off: dict[str, float] = field(default_factory=dict)
    unchecked: str = ""

    def notes(self) -> list[str]:
        """Returns what is wrong with the export itself, in a few lines."""
        lines = [self.unchecked] if self.unchecked else []
        lines += [f"the export does not run {', '.join(cases)}: {said}" for said, cases in self.stuck.items()]
        if self.off:
            cases = ", ".join(f"{case} {error:.0e}" for case, error in self.off.items())
            lines.append(f"the export differs from torch by itself: {cases}")
        return lines


def compare(exported: Path, fused: Path, references: Path, dtype: str) -> Comparison:
    """Compares a fused model with the export it was made from, and with torch.

    The export is judged first: a case that it cannot run, and the values where it disagrees with
    torch, are a note about the exporter. What remains is held against the fused model. Typically
    these values belong to tokens that may attend to nothing at all.

    Args:
        exported: The export.
        fused: The fused model.
        references: The ``.npz`` of the export.
        dtype: Element type; bfloat16 has no kernels on the CPU.
    """
    result = Comparison()
    if dtype not in TOLERANCE:
        result.unchecked = "not runnable on CPU"
        return result
    try:
        before = session(exported)
    except Exception as error:  # noqa: BLE001 - onnxruntime has one class per status
        result.unchecked = f"the export does not load: {_line(error)}"
        return result
    try:
        after = session(fused)
    except Exception as error:  # noqa: BLE001
        result.wrong.append(f"the fused model does not load: {_line(error)}")
        return result
    for case in read(references):
        _compare_case(case, before, after, TOLERANCE[dtype], result)
    return result


def _compare_case(
    case: Case,
    before: ort.InferenceSession,
    after: ort.InferenceSession,
    limit: float,
    result: Comparison,
) -> None:
    """Compares one case and adds what it finds to the result."""
    expected = run(before, case)
    if isinstance(expected, str):
        result.stuck.setdefault(expected, []).append(case.name)
        return
    found = run(after, case)
    result.cases += 1
    if isinstance(found, str):
        result.wrong.append(f"{case.name}: the fused model does not run: {found}")
        return
    error = distance(found, expected)
    result.against_export = max(result.against_export, error)
    differs = error > limit
    if differs:
        result.wrong.append(f"{case.name}: differs from the export by {error:.1e}")
    off = distance(expected, case.outputs)
    if off > limit:
        result.off[case.name] = off
    error = distance(found, case.outputs, agreement(expected, case.outputs, limit))
    result.against_torch = max(result.against_torch, error)
    if error > 2 * limit and not differs:
        result.wrong.append(f"{case.name}: differs from torch by {error:.1e}")


def session(path: Path) -> ort.InferenceSession:
    """Opens a model on the CPU with all graph optimisations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(model: ort.InferenceSession, case: Case) -> Outputs | str:
    """Runs one case; returns the outputs, or the error in one line.

    An exporter drops inputs that the model does not use, so the case may have more.
    """
    names = {given.name for given in model.get_inputs()}
    feeds = {name: value for name, value in case.inputs.items() if name in names}
    try:
        return tuple(model.run(None, feeds))
    except Exception as error:  # noqa: BLE001
        return _line(error)


def distance(found: Outputs, expected: Outputs, within: Outputs | None = None) -> float:
    """Returns the largest error relative to one plus the expected value.

    NaN equals NaN and an infinity equals itself; anything else against them, another shape
    or another number of outputs is infinitely far.

    Args:
        found: The outputs to judge.
        expected: What they should be.
        within: Which values count; all if left out.

    >>> distance((np.array([1.0, np.nan]),), (np.array([1.5, np.nan]),))
    0.2
    >>> distance((np.array([1.0]),), (np.array([np.nan]),))
    inf
    """
    if [a.shape for a in found] != [b.shape for b in expected]:
        return float("inf")
    largest = 0.0
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        errors = _errors(a, b)
        largest = max(largest, errors[within[at]].max(initial=0.0) if within else errors.max(initial=0.0))
    return float(largest)


def agreement(found: Outputs, expected: Outputs, limit: float) -> Outputs | None:
    """Returns which rows, along the last axis, are all within the limit.

    A single value may be right by chance where its row is not. None if the shapes differ.
    """
    if [a.shape for a in found] != [b.shape for b in expected]:
        return None
    near = (_errors(a, b) <= limit for a, b in zip(found, expected, strict=True))
    return tuple(np.broadcast_to(each.all(-1, keepdims=True), each.shape) if each.ndim else each for each in near)


def _errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Returns the error of every value."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        errors = np.abs(a - b) / (1 + np.abs(b))
    errors[~(np.isfinite(a) & np.isfinite(b))] = np.inf
    errors[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    return errors


def _line(error: Exception) -> str:
    """Returns what onnxruntime says, without node names, source files and paths."""
    text = " ".join(str(error).split())
    for start in ("Status Message: ", " failed:", " was false. "):
        text = text.rpartition(start)[2]
    return text[:200] or type(error).__name__
