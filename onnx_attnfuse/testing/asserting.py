"""The assertions: optimise, look at the report, and hold the result against the original.

A model is text, a file, a model object, or a torch function (`as_model`). Golden cases are small graphs as ONNX text with what
must become of each attention in them. A file holds cases that differ in the one thing that matters. Each case is

    # What it shows, in a line or two.
    # flags: keep_outputs, by_reference      only where there are any
    <the model in ONNX text>
    # ops: MatMul=0 Transpose=1              operators that are left, only where they matter
    # expect: fused MultiHeadAttention num_heads=2 scale=0.5
    # expect: skipped soft-fill

with one `expect` line for each Softmax or attention node, in the order of the report. After `fused` come the operator and the
attributes it must have, `bias` or `no-bias` for whether it gets an additive mask; after any other status the code of the reason,
where that is not the status itself.

    CASES = cases_in("my_attention.onnxtxt")

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_case(case):
        assert_case(case, my_pattern)
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

import onnx_attnfuse
from onnx_attnfuse.errors import MissingDependencyError, OptionError
from onnx_attnfuse.fusion.pipeline import Fusion
from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.constants import attribute
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.graph.tensors import bodies
from onnx_attnfuse.graph.uses import label
from onnx_attnfuse.language.decorators import Pattern
from onnx_attnfuse.language.matcher.match_state import Miss, Trace
from onnx_attnfuse.language.registry.discovery import load
from onnx_attnfuse.options import Options
from onnx_attnfuse.report.model import Report, SiteReport
from onnx_attnfuse.verify.compare_models import check_models
from onnx_attnfuse.verify.verifier import references

_EVIDENCE = pathlib.Path(tempfile.gettempdir()) / "attnfuse-evidence"


def assert_fuses(
    model: Model,
    *patterns: object,
    inputs: Sequence[Any] | None = None,
    into: str | None = None,
    sites: int | None = None,
    export: dict[str, Any] | None = None,
    **options: Any,
) -> onnx_attnfuse.Result:
    """Every attention of a model is fused, by each whole attention among the patterns, and nothing it computes changes.

    Args:
        model: A torch function or module, ONNX text, a path, or a model object.
        *patterns: The patterns to use beside the installed ones.
        inputs: Example inputs of a torch function or module.
        into: The operator that every site must become.
        sites: How many sites there must be; by default any number from 1 on.
        export: More arguments for `torch.onnx.export`.
        **options: Fields of `onnx_attnfuse.Options`.

    Returns:
        The result of `onnx_attnfuse.optimize`.

    Raises:
        AssertionError: Something is not as it should be; the message says what became of every site.
    """
    before = as_model(model, inputs, **(export or {}))
    chosen = onnx_attnfuse.Options(patterns=patterns, evidence=_EVIDENCE)
    result = onnx_attnfuse.optimize(before.clone(), chosen, **options)
    report, reported = result.report, _reported(result.report)
    if not report.candidates or report.skipped or report.already_fused:
        raise AssertionError(f"not every attention was fused:\n{reported}")
    if sites is not None and report.fused != sites:
        raise AssertionError(f"{report.fused} sites were fused and not {sites}:\n{reported}")
    if into is not None and any(site.op != into for site in report.sites if site.status == "fused"):
        raise AssertionError(f"not every site became {into}:\n{reported}")
    found = {(site.pattern or "").partition("(")[0] for site in report.sites}
    for pattern in patterns:
        if isinstance(pattern, Pattern) and pattern.name not in found:
            raise AssertionError(f"the pattern '{pattern.name}' was not what fused it:\n{reported}")
    _assert_same(before, result.model, patterns)
    return result


def assert_refuses(
    model: Model,
    *patterns: object,
    code: str | None,
    inputs: Sequence[Any] | None = None,
    export: dict[str, Any] | None = None,
    **options: Any,
) -> onnx_attnfuse.Result:
    """No attention of a model is fused, a site says so with the reason expected, and nothing it computes changes.

    Args:
        model: A torch function or module, ONNX text, a path, or a model object.
        *patterns: The patterns to use beside the installed ones.
        code: The code of the reason; None if nothing may even be found that looks like attention.
        inputs: Example inputs of a torch function or module.
        export: More arguments for `torch.onnx.export`.
        **options: Fields of `onnx_attnfuse.Options`.

    Returns:
        The result of `onnx_attnfuse.optimize`.

    Raises:
        AssertionError: Something was fused, or the reason is another; the message says what became of every site.
    """
    before = as_model(model, inputs, **(export or {}))
    chosen = onnx_attnfuse.Options(patterns=patterns, evidence=_EVIDENCE)
    result = onnx_attnfuse.optimize(before.clone(), chosen, **options)
    reported = _reported(result.report)
    if result.report.fused:
        raise AssertionError(f"{result.report.fused} sites were fused:\n{reported}")
    if code is None and result.report.candidates:
        raise AssertionError(f"attention was found:\n{reported}")
    codes = {reason.code for site in result.report.sites for reason in site.reasons}
    if code is not None and code not in codes:
        raise AssertionError(f"no site gives the reason {code}:\n{reported}")
    _assert_same(before, result.model, patterns)
    return result


def assert_case(case: Case, *patterns: object, **options: Any) -> onnx_attnfuse.Result:
    """A case of a file becomes what it says, and computes the same.

    Args:
        case: One of `cases_in`.
        *patterns: The patterns to use beside the installed ones.
        **options: Fields of `onnx_attnfuse.Options`.

    Returns:
        The result of `onnx_attnfuse.optimize`.

    Raises:
        AssertionError: It does not; the message says what became of every site.
    """
    before = as_model(case.text)
    chosen = onnx_attnfuse.Options(patterns=patterns, verify="none", keep_outputs="keep_outputs" in case.flags)
    result = onnx_attnfuse.optimize(before.clone(), chosen, **options)
    reported = _reported(result.report)
    if len(result.report.sites) != len(case.expected):
        raise AssertionError(
            f"{case.name}: {len(result.report.sites)} sites where {len(case.expected)} are expected:\n{reported}"
        )
    nodes = [node for graph in bodies(result.model) for node in graph.all_nodes()]
    fused = iter([node for node in nodes if node.domain == CONTRIB or node.op_type == "Attention"])
    for site, expected in zip(result.report.sites, case.expected, strict=True):
        problem = _unlike(site, expected, fused)
        if problem:
            raise AssertionError(f"{case.name}: {site.name} {problem}:\n{reported}")
    for op, count in case.ops.items():
        found = sum(node.op_type == op for node in nodes)
        if found != count:
            raise AssertionError(f"{case.name}: {found} {op} are left and not {count}")
    if "by_reference" not in case.flags:
        _assert_same(before, result.model, patterns)
    return result


def _unlike(site: SiteReport, expected: Expectation, fused: Iterator[ir.Node]) -> str | None:
    """The first difference between a site and its expectation; None if there is none."""
    if site.status != expected.status:
        return f"is {site.status} and not {expected.status}"
    if site.status != "fused":
        codes = " ".join(reason.code for reason in site.reasons)
        return None if codes == (expected.what or expected.status) else f"gives {codes} and not {expected.what}"
    if site.op != expected.what:
        return f"became {site.op} and not {expected.what}"
    node = next(node for node in fused if node.op_type == site.op)
    for name, value in expected.attributes.items():
        found = attribute(node, name)
        if found is None or not math.isclose(found, value, rel_tol=1e-6):
            return f"has {name}={found} and not {value}"
    place = 5 if node.domain else 3
    has_bias = len(node.inputs) > place and node.inputs[place] is not None
    return None if expected.bias in {None, has_bias} else f"has {'a' if has_bias else 'no'} bias"


def _assert_same(before: ir.Model, after: ir.Model, patterns: Sequence[object]) -> None:
    """Two models give the same results on hostile inputs."""
    catalogue = load(onnx_attnfuse.Options(patterns=tuple(patterns)))
    verdict = check_models(ir.to_proto(before), ir.to_proto(after), references(catalogue.operators.values()))
    if verdict.undecided is not None:
        raise AssertionError(f"it could not be compared with the original: {verdict.undecided}")
    if not verdict.equal:
        raise AssertionError(f"it differs from the original: {verdict.detail}")


def _reported(report: Report) -> str:
    """A line for every site."""
    lines = [
        f"  {site.name}: {site.status} {site.op or ''}{f' by {site.pattern}' if site.pattern else ''} "
        + "; ".join(f"{reason.code}: {reason}" for reason in site.reasons)
        for site in report.sites
    ]
    return "\n".join([*lines, *(f"  {note}" for note in report.notes)]) or "  no attention was found"


@dataclasses.dataclass(frozen=True)
class Checked:
    """A model looked at by patterns."""

    report: Report
    misses: Mapping[str, Miss]
    """By the name of the Softmax, the attempt of one of the patterns at it that came furthest and failed."""
    nearest: Miss | None
    """Of attempts that met no Softmax."""


def check(model: Model, *patterns: object, inputs: Sequence[Any] | None = None, **options: Any) -> Checked:
    """Looks at a model by patterns; nothing is written.

    Args:
        model: A torch function or module, ONNX text, a path, or a model object.
        *patterns: The patterns, or files of them.
        inputs: Example inputs of a torch function or module.
        **options: Fields of `onnx_attnfuse.Options`.

    Raises:
        ModelError: The model cannot be read.
        OptionError: A pattern cannot be used.
    """
    fusion = Fusion(dataclasses.replace(Options(patterns=patterns), **options), keep_evidence=False)
    trace = Trace({entry.name for entry in fusion.catalogue.entries if not entry.owner.startswith("pack ")})
    report = fusion.fuse(as_model(model, inputs).clone(), trace=trace)
    misses = {label(node): miss for node, miss in trace.nearest.items() if node is not None}
    return Checked(report, misses, trace.nearest.get(None))


Model: TypeAlias = Any
"""ONNX text, a path, an `onnx.ModelProto`, an `onnx_ir.Model`, or a torch function or module."""


def as_model(model: Model, inputs: Sequence[Any] | None = None, **export: Any) -> ir.Model:
    """The model, read or exported.

    Args:
        model: The model; text differs from a path by line breaks or a `<`.
        inputs: Example inputs of a torch function or module; those of a function with defaults are the defaults.
        **export: More arguments for `torch.onnx.export`, as `dynamic_shapes`.

    Raises:
        MissingDependencyError: A torch function is given and torch is not installed.
        ModelError: It cannot be read.
        OptionError: Inputs are missing, or text is no model.
    """
    if callable(model):
        return _exported(model, inputs, export)
    if isinstance(model, str) and ("\n" in model or model.lstrip().startswith("<")):
        try:
            return ir.from_proto(onnx.parser.parse_model(model))
        except onnx.parser.ParseError as error:
            raise OptionError(f"the text is no model: {error}") from error
    if isinstance(model, (str, os.PathLike, onnx.ModelProto, ir.Model)):
        return io.from_any(model)[0]  # pyright: ignore[reportUnknownArgumentType] - any path will do
    raise OptionError(f"{model!r} is no model; give ONNX text, a path, a model object, or a torch function with inputs")


def _exported(function: Callable[..., Any], inputs: Sequence[Any] | None, export: dict[str, Any]) -> ir.Model:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError("a torch function needs torch; run pip install 'onnx-attnfuse[torch]'") from error
    if inputs is None:
        inputs = getattr(function, "__defaults__", None) or ()
    if not inputs:
        raise OptionError("a torch function needs example inputs; pass inputs=(...) or give its parameters tensors as defaults")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an exporter warns of itself
        program: Any = torch.onnx.export(_module(function, torch), tuple(inputs), dynamo=True, verbose=False, **export)
    return io.from_any(program)[0]


def _module(function: Callable[..., Any], torch: Any) -> Any:
    if isinstance(function, torch.nn.Module):
        return function.eval()  # pyright: ignore[reportFunctionMemberAccess, reportUnknownMemberType]

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return Wrapped().eval()


@dataclasses.dataclass(frozen=True)
class Expectation:
    """The expected report on one attention."""

    status: str
    what: str | None
    """The operator it is fused into, or the codes of the reasons."""
    attributes: dict[str, float]
    bias: bool | None


@dataclasses.dataclass(frozen=True)
class Case:
    """One graph."""

    name: str
    flags: frozenset[str]
    text: str
    ops: dict[str, int]
    expected: tuple[Expectation, ...]


def cases_in(path: str | os.PathLike[str]) -> list[Case]:
    """Every case of a file, or of all `.onnxtxt` files of a folder.

    Raises:
        OptionError: There is none, or a case expects nothing.
    """
    place = pathlib.Path(path)
    files = sorted(place.glob("*.onnxtxt")) if place.is_dir() else [place]
    try:
        found = [case for file in files for case in _cases(file)]
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}; give a file of cases or a folder of them") from error
    if not found:
        raise OptionError(f"{path} holds no case; write ONNX text and an `# expect:` line")
    return found


def _cases(path: pathlib.Path) -> Iterator[Case]:
    heads: list[str] = []
    graph: list[str] = []
    tails: list[str] = []
    count = 0
    for line in [*path.read_text(encoding="utf-8").splitlines(), "# end"]:
        is_comment = line.startswith("#")
        if is_comment and not graph:
            heads.append(line)
        elif not is_comment and not tails:
            graph += [line] if line.strip() or graph else []
        elif re.match(r"# (ops|expect):", line):
            tails.append(line)
        elif is_comment:
            count += 1
            yield _case(f"{path.stem}-{count}", heads, graph, tails)
            heads, graph, tails = [line], [], []


def _case(name: str, heads: list[str], graph: list[str], tails: list[str]) -> Case:
    flags = frozenset(flag.strip() for line in heads if line.startswith("# flags:") for flag in line[8:].split(","))
    ops = dict(item.split("=") for line in tails if line.startswith("# ops:") for item in line[6:].split())
    expected = tuple(_expectation(line[9:].split()) for line in tails if line.startswith("# expect:"))
    if not expected:
        raise OptionError(f"the case {name} expects nothing; write an `# expect:` line for each Softmax")
    return Case(name, flags, "\n".join(graph), {op: int(number) for op, number in ops.items()}, expected)


def _expectation(words: list[str]) -> Expectation:
    status, *rest = words
    plain = [word for word in rest if "=" not in word and word not in {"bias", "no-bias"}]
    attributes = {name: float(value) for name, _, value in (word.partition("=") for word in rest if "=" in word)}
    bias = True if "bias" in rest else False if "no-bias" in rest else None
    return Expectation(status, " ".join(plain) or None, attributes, bias)
