"""Results of `attnfuse conformance`: the forms of fused operators that an execution provider runs, and runs right.

table = known("webgpu")                 # one that comes with the package, or None
table = read(pathlib.Path("mine.json"))
table.failure(asked)                    # why a form is not to be used, or None
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.conditions import AttentionParams, MaskForm
from onnx_attnfuse.reasons import Reason

Verdict = Literal["right", "wrong", "unsupported", "on-cpu"]
"""The results are those of the reference; they are not; the operator is refused, fails or ends the process; ONNX Runtime runs it
on the CPU in the place of the execution provider."""
BiasForm = Literal["", "full", "broadcast", "holes", "empty"]
"""An additive mask: none; of all sizes; of one entry and head; that with -inf in places; with a row of the lowest number."""
SCHEMA = 1
USUAL_HEADS = 4
"""The heads of queries in most cases, two of which share one of keys and values where heads are grouped."""
_UNKNOWN = 0
"""The head size of an attention whose own is not known: every one that was tried tells of it."""
_ALIGNED = 8
"""Kernels load vectors of up to so many channels: head sizes that leave the same part of it are taken for alike."""
_WORDS: Mapping[Verdict, str] = {
    "right": "right",
    "wrong": "wrong",
    "unsupported": "refused",
    "on-cpu": "left to the CPU",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an attention, by which its kernel is chosen: all of a case but its numbers."""

    op: str
    """The operator's name among fused operators, `onnx.` before it if it is a standard one."""
    dtype: str
    """The element type, as in `float32`."""
    mask: MaskForm = "none"
    bias: BiasForm = ""
    """How an additive mask is spread; empty where `mask` is no bias."""
    causal: bool = False
    windowed: bool = False
    cached: bool = False
    """The operator itself appends keys and values to those of earlier positions."""
    grouped: bool = False
    """Several heads share keys and values."""
    capped: bool = False
    batch: int = 2
    rows: int = 5
    past: int = 0
    columns: int = 5
    """All keys, those of the past counted."""
    head_size: int = 64
    heads: int = USUAL_HEADS

    @property
    def name(self) -> str:
        """One line for a reader, unlike that of any other form."""
        words = [self.op, self.dtype, self.mask if self.mask != "bias" else f"bias-{self.bias}"]
        words += [name for name in ("causal", "windowed", "grouped", "capped") if getattr(self, name)]
        words += [
            f"{self.batch}x{self.rows}x{self.columns}",
            f"past-{self.past}" if self.cached else "",
            f"head-{self.head_size}",
            f"heads-{self.heads}" if self.heads != USUAL_HEADS else "",
        ]
        return " ".join(filter(None, words))

    @classmethod
    def of(cls, params: AttentionParams, *, cached: bool) -> Form:
        """The form of a planned attention; `cached` where the operator itself appends to a cache."""
        head_size = params.head_size if isinstance(params.head_size, int) else _UNKNOWN
        marks = params.causal, params.windowed, cached, params.grouped, params.capped
        return cls(params.op, f"{params.dtype.numpy()}", params.mask, "", *marks, head_size=head_size)

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the sizes and the number of heads, and how an additive mask is spread, which a plan does not know."""
        return (self.op, self.dtype, self.mask, self.causal, self.windowed, self.cached, self.grouped, self.capped)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    form: Form
    verdict: Verdict
    error: float | None = None
    """The largest difference from the reference as a part of its magnitude; None: there are no results."""
    plain_error: float | None = None
    """The same of the attention decomposed into MatMul and Softmax, on the same execution provider."""
    ratio: float | None = None
    """The time of the operator as a part of that of the decomposed attention."""
    detail: str = ""
    """The difference, or ONNX Runtime's message."""


@dataclasses.dataclass(frozen=True)
class Conformance:
    """The outcomes of all cases on one execution provider."""

    ep: str
    """The name of the execution provider."""
    versions: Mapping[str, str]
    """The versions of ONNX Runtime's packages that were run."""
    cases: tuple[Outcome, ...]

    def failure(self, asked: Form) -> Reason | None:
        """Why a form is not to be used: the first case of it that failed; None also where it was not tried.

        How many rows `asked` has is not looked at, as a plan holds for all.
        """
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        alike = self._alike(asked)
        for case in alike:
            if case.verdict != "right" and _covers(case.form, asked.head_size, alike):
                found = f"{case.form.name} was {_WORDS[case.verdict]} with {versions}"
                return Reason("fails-conformance", f"on {self.ep} {found}{case.detail and ': '}{case.detail}")
        return None

    def _alike(self, asked: Form) -> Sequence[Outcome]:
        """The cases of one kind; an operator that knows no grouped heads has them repeated before it."""
        return self._of_kind.get(asked.kind) or self._of_kind.get(dataclasses.replace(asked, grouped=False).kind, ())

    @functools.cached_property
    def _of_kind(self) -> Mapping[tuple[object, ...], list[Outcome]]:
        found: dict[tuple[object, ...], list[Outcome]] = {}
        for case in self.cases:
            found.setdefault(case.form.kind, []).append(case)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The table as plain JSON types: the names of the columns once, then a row for each case."""
        rows = [[*map(_plain, dataclasses.astuple(case.form)), *dataclasses.astuple(case)[1:]] for case in self.cases]
        return {"schema": SCHEMA, "ep": self.ep, "versions": dict(self.versions), "columns": list(_COLUMNS), "cases": rows}


_FORM = tuple(field.name for field in dataclasses.fields(Form))
_FLAGS = frozenset(field.name for field in dataclasses.fields(Form) if field.default is False)
_COLUMNS = (*_FORM, *(field.name for field in dataclasses.fields(Outcome)[1:]))
_NEEDED = frozenset(_COLUMNS) - {"heads"}
"""The columns of every table; one that was written before a column was there tells of what the column usually is."""


def _covers(form: Form, head_size: int, alike: Sequence[Outcome]) -> bool:
    """Whether a case covers a head size: its own, or else one that was not tried and leaves the same part of eight.

    Where no such head size was tried of any case of the kind, all of them tell.
    """
    tried = {case.form.head_size for case in alike if dataclasses.replace(case.form, head_size=form.head_size) == form}
    if head_size in {_UNKNOWN, *tried}:
        return head_size in {_UNKNOWN, form.head_size}
    part = math.gcd(head_size, _ALIGNED)
    if any(math.gcd(size, _ALIGNED) == part for size in tried):
        return math.gcd(form.head_size, _ALIGNED) == part
    return all(math.gcd(case.form.head_size, _ALIGNED) != part for case in alike)


def to_json(table: Conformance) -> str:
    """A table as JSON, a line for each case."""
    head = table.to_dict()
    lines = ",\n".join(json.dumps(row) for row in head.pop("cases"))
    return f"{json.dumps(head | {'cases': []})[:-2]}\n{lines}\n]}}\n"


def read(path: pathlib.Path) -> Conformance:
    """The table in a file that `attnfuse conformance --json` wrote.

    Raises:
        OptionError: There is no such file, or it is no table.
    """
    try:
        return _table(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise OptionError(
            f"cannot read the table {path}: {error.strerror}; write one with attnfuse conformance --json"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(f"{path} is no table of conformance; write one with attnfuse conformance --json {path}") from error


def table_for(ep: str, path: pathlib.Path | None) -> Conformance | None:
    """The table to plan by: the one in a file, or else the one that comes with the package, if there is one.

    Raises:
        OptionError: The file cannot be read, is no table, or is one of another execution provider.
    """
    table = known(ep) if path is None else read(path)
    if table is not None and table.ep != ep:
        raise OptionError(f"{path} is a table of {table.ep}, and the model is for {ep}; choose --ep {table.ep} or another table")
    return table


@functools.cache
def known(ep: str) -> Conformance | None:
    """The table of an execution provider that comes with the package, or None."""
    path = pathlib.Path(__file__).parent / f"{ep}.json"
    return read(path) if path.exists() else None


def _table(found: Mapping[str, Any]) -> Conformance:
    columns: list[str] = found["columns"]
    if found["schema"] != SCHEMA or not _NEEDED <= set(columns) <= set(_COLUMNS):
        raise ValueError("another schema")
    tested = (_tested(dict(zip(columns, row, strict=True))) for row in found["cases"])
    return Conformance(str(found["ep"]), dict(found["versions"]), tuple(tested))


def _tested(row: Mapping[str, Any]) -> Outcome:
    if row["verdict"] not in get_args(Verdict):
        raise ValueError("no row of a table")
    form: dict[str, Any] = {name: bool(item) if name in _FLAGS else item for name, item in row.items() if name in _FORM}
    return Outcome(Form(**form), **{name: item for name, item in row.items() if name not in _FORM})


def _plain(item: object) -> object:
    """Truth values as 0 and 1, as a table is long."""
    return int(item) if isinstance(item, bool) else item
