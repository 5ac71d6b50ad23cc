"""Running forms on the CPU: what is right is told as right, what is wrong as wrong, and what ends its process ends no more."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.bench.conformance import child, run, spelled
from onnx_attnfuse.bench.conformance.forms import forms, operators
from onnx_attnfuse.bench.conformance.inputs import case_of, spread
from onnx_attnfuse.bench.conformance.installed import find
from onnx_attnfuse.bench.conformance.models import feeds_of, model_of
from onnx_attnfuse.bench.conformance.summary import failures, lines
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome
from onnx_attnfuse.kernels.operators import OpInfo, by_key
from onnx_attnfuse.verify.apart import ProcessDied, Worker
from onnx_attnfuse.verify.runtime import Reference, Session
from onnx_attnfuse.verify.tolerance import TIGHT, compare

INFOS = {info.key: info for info in operators()}
FORMS = [(form, info) for info in INFOS.values() for form in forms(info, run.attributes(info)) if form.dtype == "float32"]
EXPECTED = [np.ones((2, 3), np.float32)]


def answered(fused: dict[str, Any]) -> dict[str, Any]:
    plain = {"results": EXPECTED, "ms": [2.0, 4.0, 2.0]}
    return {"fused": fused, "spelled": plain}


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "info"), FORMS[::7], ids=[form.name for form, _ in FORMS[::7]])
def test_what_is_spelled_out_is_what_the_operator_computes(form: Form, info: OpInfo) -> None:
    case = case_of(form, info, run.attributes(info))
    inputs = case.inputs(np.float32)
    expected = Reference(model_of(case, inputs)).run(None, feeds_of(inputs))[0]
    model, feeds = spelled.model_of(form, spread(form, info, inputs))
    assert np.isfinite(expected).all()
    assert compare(expected, Session(model.SerializeToString()).run(None, feeds)[0], TIGHT).equal


def test_every_attention_with_a_reference_is_tried() -> None:
    assert set(INFOS) == {"Attention", "GroupQueryAttention", "MultiHeadAttention", "onnx.Attention"}
    assert {form.op for form, _ in FORMS} == set(INFOS)


_GROUPED = pytest.param("GroupQueryAttention", marks=pytest.mark.newest)  # it has learned to be causal or not since


@pytest.mark.parametrize("op", [_GROUPED, *(name for name in INFOS if name != "GroupQueryAttention")])
def test_forms_differ_and_tell_of_every_way_that_the_operator_has(op: str) -> None:
    found = [form for form, info in FORMS if info.key == op]
    assert len(set(found)) == len(found)
    assert len({form.name for form in found}) == len(found)
    assert {form.mask for form in found} >= {"none", "bias"}
    assert {form.causal for form in found} == {False, True}
    assert {15, 64, 256} <= {form.head_size for form in found}
    assert any(form.cached and form.rows == 1 for form in found)


def test_what_knows_no_causal_attribute_and_has_a_window_is_always_causal() -> None:
    found = list(forms(INFOS["GroupQueryAttention"], frozenset(["num_heads", "kv_num_heads", "local_window_size"])))
    assert {form.causal for form in found} == {True}


def test_a_kernel_that_agrees_is_right_and_timed_beside_what_is_spelled_out() -> None:
    found = run.judged(Form("X", "float32"), answered({"results": EXPECTED, "ms": [1.0, 9.0, 1.0]}), EXPECTED)
    assert (found.verdict, found.error, found.plain_error, found.ratio) == ("right", 0.0, 0.0, 0.5)


@pytest.mark.parametrize(("off", "verdict"), [(2e-4, "wrong"), (0.5e-4, "right")])
def test_beyond_its_tolerance_it_is_wrong(off: float, verdict: str) -> None:
    found = run.judged(Form("X", "float32"), answered({"results": [EXPECTED[0] + np.float32(off)], "ms": [1.0]}), EXPECTED)
    assert found.verdict == verdict
    assert ("became" in found.detail) == (verdict == "wrong")


@pytest.mark.parametrize(
    ("plain_off", "off", "verdict"),
    [(1e-3, 1.5e-3, "right"), (1e-3, 3e-3, "wrong"), (0.1, 0.15, "wrong"), (0.1, 0.5e-4, "right")],
)
def test_it_is_to_be_as_exact_as_what_is_spelled_out_unless_that_is_wrong(plain_off: float, off: float, verdict: str) -> None:
    answer = answered({"results": [EXPECTED[0] + np.float32(off)], "ms": [1.0]})
    answer["spelled"]["results"] = [EXPECTED[0] + np.float32(plain_off)]
    assert run.judged(Form("X", "float32"), answer, EXPECTED).verdict == verdict


def test_nan_is_wrong() -> None:
    found = run.judged(Form("X", "float32"), answered({"results": [EXPECTED[0] * np.float32("nan")], "ms": [1.0]}), EXPECTED)
    assert found.verdict == "wrong"


def test_what_is_refused_and_what_the_cpu_runs_are_told_apart() -> None:
    refused = run.judged(Form("X", "float32"), answered({"on cpu": False, "error": "no such kernel"}), EXPECTED)
    left = run.judged(Form("X", "float32"), answered({"on cpu": True, "error": "fallback"}), EXPECTED)
    assert (refused.verdict, refused.detail, refused.ratio) == ("unsupported", "no such kernel", None)
    assert (left.verdict, left.detail) == ("on-cpu", "")


def test_the_cpu_runs_the_first_forms_right() -> None:
    table = run.run(find("cpu"), dtype="float32", limit=2)
    assert [case.verdict for case in table.cases] == ["right"] * 2 * len(INFOS)
    assert all(case.error is not None and case.error < 1e-5 and case.ratio for case in table.cases)
    assert "onnxruntime" in table.versions


def test_a_kernel_that_refuses_is_told_with_its_own_words() -> None:
    odd = next(form for form, info in FORMS if info.key == "GroupQueryAttention" and form.head_size == 15)
    with Worker(["-m", child.__name__], dataclasses.asdict(find("cpu"))) as worker:
        found = run.outcome(odd, INFOS["GroupQueryAttention"], worker)
    assert found.verdict == "unsupported"
    assert found.detail.startswith("head_size must be a multiple of 8")


def test_a_process_that_dies_is_told_and_the_next_one_answers() -> None:
    with Worker(["-c", "import os; os._exit(7)"]) as worker:
        for _ in range(2):
            with pytest.raises(ProcessDied, match="status 7"):
                worker.ask("anything")


def test_an_operator_or_provider_that_is_not_there_is_told() -> None:
    with pytest.raises(OptionError, match="operator is 'None'; choose one of Attention"):
        run.run(find("cpu"), operator="None")
    with pytest.raises(OptionError, match=r"ep is 'nowhere', which is not installed here; choose .*cpu"):
        find("nowhere")


def test_the_summary_counts_and_puts_the_like_together() -> None:
    form = Form("X", "float32")
    refused = [Outcome(dataclasses.replace(form, head_size=size), "unsupported", detail=f"size {size}") for size in (3, 5)]
    table = Conformance("x", {}, (Outcome(form, "right", 1e-6, 1e-7, 0.5), *refused))
    assert list(lines(table)) == [("X", "float32", "1", "0", "2", "0", "1.0e-06", "1.0e-07", "0.50")]
    assert list(failures(table)) == ["unsupported x2, first X float32 none 2x5x5 head-3: size 3"]


def test_records_of_operators_are_all_that_is_read() -> None:
    assert set(INFOS) <= set(by_key())
