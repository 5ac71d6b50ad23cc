"""Verdicts on two results: equal, different with the evidence, or undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx

from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.runtime import OLDEST, installed, is_old


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
