"""Each family of reasons by a model whose report has one of its codes, and what `attnfuse explain --code` says to do about it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import onnx_attnfuse
from onnx_attnfuse.containment import Attempt
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.testing import cases_in
from onnx_attnfuse.training.kernels import TrainingDevice
from onnx_attnfuse.training.ortmodule.pipeline import fuse_graph
from onnx_attnfuse_cli.main import main
from tests.attention.match import test_step_readers
from tests.fusion import test_containment
from tests.fusion.enabling import test_standalone_rotary
from tests.mixers import test_candidates
from tests.support import small_models
from tests.support.bundled import BUNDLED
from tests.training import evaluating, test_refusals
from tests.transforms import test_decompose

ROOT = pathlib.Path(__file__).parents[2]
ATTENTION = small_models.ATTENTION
NEGATIVE = ATTENTION.replace("{0.5}", "{-0.5}")
SEARCHED = ATTENTION.replace("out = MatMul(weights, v)", "out = MatMul(weights, v) places = NonZero(q)").replace(
    "(float[b, 2, s, 4] out)", "(float[b, 2, s, 4] out, int64[four, found] places)"
)
EXPORTS = {path.stem.partition("__")[0]: path for path in BUNDLED if path.stem.endswith(("dyn18__sdpa", "dyn18__eager"))}
CASES = {case.name: case.text for case in cases_in(ROOT / "tests" / "cases")}
FLASH = onnx_attnfuse.Policy(flash=True)
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "other-softmax": (CASES["casts-4"], {}),
    "inner-values": (CASES["inner_values-1"], {}),
    "mask-values": (CASES["fills_and_biases-2"], {}),
    "masked-weights": (CASES["masked_by_products-8"], {}),
    "hand-written-softmax": (CASES["exponentials_without_maximum-2"], {}),
    "score-steps": (CASES["einsum-5"], {}),
    "casts": (CASES["casts-6"], {}),
    "quantized-attention": (CASES["roundings-1"], {}),
    "axes": (CASES["mask_added-8"], {}),
    "unknown-sizes": (CASES["functions-2"], {}),
    "missing-data": (CASES["functions-3"], {}),
    "kept-operators": (CASES["attention_operator-7"], {}),
    "cache-forms": ("llama_past", {"target": "Attention"}),
    "causality": ("bert", {"target": "GroupQueryAttention"}),
    "head-forms": (ATTENTION, {"target": "GroupQueryAttention"}),
    "projections": ("t5", {"target": "Attention"}),
    "scales": (NEGATIVE, {"target": "onnx.Attention"}),
    "sinks-and-softcaps": (CASES["attention_operator-6"], {}),
    "device-support": ("llama_past", {"ep": "webgpu"}),
    "measured-slower": (ATTENTION, {"ep": "cuda", "arch": "sm80", "dim": {"b": 8, "s": 8192, "t": 8192}}),
    "policy": ("llama_past", {"policy": FLASH}),
    "kernel-devices": ("bert", {"ep": "cuda", "arch": "sm90"}),
    "kernel-sizes": ("bert", {"ep": "cuda", "arch": "sm90", "dim": {"seq": 8, "batch": 1}}),
    "kernel-masks": ("bert", {}),
    "graph-capture": (SEARCHED, {"ep": "cuda", "arch": "sm90"}),
    "verification": (ATTENTION, {"unproved": ("out",)}),
    "packed-tokens": (ATTENTION, {"target": "packed", "ep": "cuda", "arch": "sm90"}),
    "opset": ("bert", {"ep": "webgpu"}),
    "other-mixers": (test_candidates._STEP, {}),
}
"""By family ONNX text or the name of a bundled export, and options; without them for the CPU."""


def _shared_cache(patch: pytest.MonkeyPatch) -> set[str]:
    """A decoder whose present keys and values are no outputs."""
    model = onnx.load(EXPORTS["llama_past"])
    del model.graph.output[1:]
    report = onnx_attnfuse.explain(model, cache="shared", verify="none", ep="cpu")
    assert report.unshared is not None
    return {*codes(report)}


def _user_patterns(patch: pytest.MonkeyPatch) -> set[str]:
    """A reader of a step that fails."""
    model = onnx.parser.parse_model(test_step_readers.STABILISED)
    reader = onnx_attnfuse.score_step("Halve", domain=test_step_readers.DOMAIN)(test_containment.raising)
    return {*codes(onnx_attnfuse.explain(model, verify="none", patterns=(reader, test_step_readers.check)))}


def _decomposing(patch: pytest.MonkeyPatch) -> set[str]:
    """A triangle that kernels place differently."""
    text = test_decompose.CROSS.format(header=test_decompose.HEADER, attributes=", unidirectional = 1", inputs="", s="s")
    report = onnx_attnfuse.unfuse(onnx.parser.parse_model(text), verify="none").report
    return {site.reason.code for site in report.sites if site.reason}


def _gradients(patch: pytest.MonkeyPatch) -> set[str]:
    """Weights whose gradient has another factor."""
    model = ir.from_proto(evaluating.recorded("plain"))
    softmax = test_refusals.node(model, "SoftmaxGrad_13")
    softmax.inputs[0].producer().attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)
    return _refused(model, test_refusals.CPU)


def _trained_dropout(patch: pytest.MonkeyPatch) -> set[str]:
    """Dropout forwards, and none backwards."""
    model = ir.from_proto(evaluating.recorded("dropout"))
    gradient = test_refusals.node(model, "DropoutGrad")
    gradient.outputs[0].replace_all_uses_with(gradient.inputs[0])
    return _refused(model, TrainingDevice("cuda", 90))


def _refused(model: ir.Model, device: TrainingDevice) -> set[str]:
    sites = fuse_graph(model.graph, device, onnx_attnfuse.Policy(flash=False)).sites
    return {reason.code for site in sites for reason in site.reasons}


def _defects(patch: pytest.MonkeyPatch) -> set[str]:
    """A part of attnfuse that raises."""
    patch.setattr("onnx_attnfuse.fusion.site.SiteFuser.fuse", test_containment.raising)
    return {*codes(onnx_attnfuse.explain(onnx.parser.parse_model(ATTENTION), verify="none"))}


def _rotary(patch: pytest.MonkeyPatch) -> set[str]:
    """Heads that are counted at run time. No report has this reason, as the attention is fused all the same."""
    left, leave = set[str](), Attempt.__exit__

    def spy(attempt: Attempt, *raised: Any) -> bool:
        done = leave(attempt, *raised)
        left.update([attempt.reason.code] if attempt.reason else [])
        return done

    patch.setattr(Attempt, "__exit__", spy)
    text = test_standalone_rotary._TEXT.format(heads="n", turned=" ".join(map(test_standalone_rotary._TURNED.format, "qk")))
    assert onnx_attnfuse.optimize(onnx.parser.parse_model(text), verify="none").report.fused == 1
    return left


RUN: dict[str, Callable[[pytest.MonkeyPatch], set[str]]] = {
    "shared-cache": _shared_cache,
    "user-patterns": _user_patterns,
    "decomposing": _decomposing,
    "gradients": _gradients,
    "trained-dropout": _trained_dropout,
    "defects": _defects,
    "rotary": _rotary,
}
"""Families whose reasons come from training, other commands or faults, by a run that yields one of their codes."""


def codes(report: Report) -> Iterator[str]:
    """The codes of everything that a report says was refused."""
    for site in report.sites:
        yield from (reason.code for reason in site.reasons)
        yield from (kernel.code for kernel in (site.kernel.refused if site.kernel else ()))
    yield from (reason.code for mixer in report.mixers for reason in mixer.reasons)
    yield from (reason.code for reason in (report.capture.blockers if report.capture else ()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_yields_the_family_and_the_command_says_what_to_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family = reason_codes.families()[name]
    model, options = EXAMPLES[name]
    source = EXPORTS[model] if model in EXPORTS else onnx.parser.parse_model(model)
    report = onnx_attnfuse.explain(source, verify="none", **{"ep": "cpu", **options})
    said_of(family, codes(report), capsys)


@pytest.mark.parametrize("name", RUN)
def test_a_run_yields_the_family_and_the_command_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said_of(reason_codes.families()[name], RUN[name](monkeypatch), capsys)


def said_of(family: reason_codes.Family, given: Iterable[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One of the codes given is in the family, and the command shows its example and says what to do."""
    found = [code for code in given if code in family.codes]
    assert found
    assert main(["explain", "--code", found[0]]) == 0
    said = capsys.readouterr().out
    assert " ".join(said.split()).count(f"What to do: {family.codes[found[0]].remedy}") == 1
    assert all(line.strip() in said for line in family.example.splitlines())


def test_every_family_has_an_example() -> None:
    assert {*EXAMPLES, *RUN} == set(reason_codes.families())
