"""Each family of reasons by a model whose report has one of its codes, and what `attnfuse explain --code` says to do about it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import onnx.parser
import pytest

import onnx_attnfuse
from onnx_attnfuse.report import reason_codes
from onnx_attnfuse.report.model import Report
from onnx_attnfuse.testing import cases_in
from onnx_attnfuse_cli.main import main
from tests.support import small_models
from tests.support.bundled import BUNDLED

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
}
"""By family ONNX text or the name of a bundled export, and options; without them for the CPU."""
ELSEWHERE = {
    "other-mixers": "mixers/test_candidates.py",
    "shared-cache": "fusion/shared_cache/test_static_caches.py",
    "user-patterns": "attention/match/test_step_readers.py",
    "decomposing": "transforms/test_decompose.py",
    "gradients": "training/test_refusals.py",
    "trained-dropout": "training/test_refusals.py",
    "defects": "fusion/test_containment.py",
}
"""Families whose reasons come from training, other commands or faults, by the test that asserts one of their codes."""
LOGGED = {"rotary"}
"""No report has these reasons, as the attention is fused all the same."""


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
    found = [code for code in codes(report) if code in family.codes]
    assert found
    assert main(["explain", "--code", found[0]]) == 0
    said = capsys.readouterr().out
    assert " ".join(said.split()).count(f"What to do: {family.codes[found[0]].remedy}") == 1
    assert all(line.strip() in said for line in family.example.splitlines())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_other_families_are_asserted_where_they_come_from(name: str) -> None:
    text = (ROOT / "tests" / ELSEWHERE[name]).read_text(encoding="utf-8")
    assert any(f'"{code}"' in text for code in reason_codes.families()[name].codes)


def test_every_family_has_an_example() -> None:
    assert {*EXAMPLES, *ELSEWHERE, *LOGGED} == set(reason_codes.families())
