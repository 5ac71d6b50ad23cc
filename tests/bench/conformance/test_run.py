"""Running forms on the CPU: what is right is told as right, what is wrong as wrong, and what ends its process ends no more."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from onnx_attnfuse.bench.conformance import child, installed, run
from onnx_attnfuse.bench.conformance.cases import case_of, decomposed, feeds_of, forms, model_of, operators
from onnx_attnfuse.bench.conformance.installed import Installed, find
from onnx_attnfuse.bench.conformance.run import failures, lines
from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome
from onnx_attnfuse.kernels.operators import OpInfo, by_key
from onnx_attnfuse.verify.runtime import PieceSession, Reference
from onnx_attnfuse.verify.subprocess_runner import ProcessDied, Worker
from onnx_attnfuse.verify.verdict import TIGHT, compare

INFOS = {info.key: info for info in operators()}
FORMS = [(form, info) for info in INFOS.values() for form in forms(info, run.attributes(info)) if form.dtype == "float32"]
PACKED = {"PackedAttention", "PackedMultiHeadAttention"}
EXPECTED = [np.ones((2, 3), np.float32)]


def answered(fused: dict[str, Any]) -> dict[str, Any]:
    plain = {"results": EXPECTED, "ms": [2.0, 4.0, 2.0]}
    return {"fused": fused, "decomposed": plain}


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "info"), FORMS[::7], ids=[form.name for form, _ in FORMS[::7]])
def test_what_is_spelled_out_is_what_the_operator_computes(form: Form, info: OpInfo) -> None:
    case = case_of(form, info, run.attributes(info))
    inputs = case.inputs(np.float32)
    expected = Reference(model_of(case, inputs)).run(None, feeds_of(inputs))[0]
    model, feeds = decomposed(case, info, inputs)
    assert np.isfinite(expected).all()
    result = PieceSession(model.SerializeToString()).run(None, feeds)[0].reshape(expected.shape)
    if form.bias == "empty":  # what a row without a key gives is told, and no matter of right and wrong
        expected, result = (
            array[:, :-1] if array.ndim == 3 else np.delete(array, form.rows - 1, 0) for array in (expected, result)
        )
    assert compare(expected, result, TIGHT).equal


def test_every_attention_with_a_reference_is_tried() -> None:
    assert set(INFOS) == PACKED | {"Attention", "GroupQueryAttention", "MultiHeadAttention", "onnx.Attention"}
    assert {form.op for form, _ in FORMS} == set(INFOS)


_GROUPED = pytest.param("GroupQueryAttention", marks=pytest.mark.newest)  # it has learned to be causal or not since


@pytest.mark.parametrize("op", [_GROUPED, *sorted(set(INFOS) - PACKED - {"GroupQueryAttention"})])
def test_forms_differ_and_tell_of_every_way_that_the_operator_has(op: str) -> None:
    found = [form for form, info in FORMS if info.key == op]
    assert len(set(found)) == len(found)
    assert len({form.name for form in found}) == len(found)
    assert {form.mask for form in found} >= {"none", "bias"}
    assert {form.causal for form in found} == {False, True}
    assert {15, 64, 256} <= {form.head_size for form in found}
    assert any(form.cached and form.rows == 1 for form in found)
    assert any(form.heads % 2 for form in found)
    assert {form.dtype for form in found if form.bias == "empty"} == {"float32"}


def test_packed_operators_are_tried_where_they_may_have_a_kernel() -> None:
    assert {info.key for info in run._operators("cuda", None)} == set(INFOS)
    assert {info.key for info in run._operators("unheard-of", None)} == set(INFOS)
    assert {info.key for info in run._operators("cpu", None)} == set(INFOS) - PACKED
    assert [info.key for info in run._operators("cpu", "PackedAttention")] == ["PackedAttention"]


@pytest.mark.parametrize(("ep", "op", "tried"), [("cuda", "onnx.Attention", True), ("cpu", "onnx.Attention", False)])
def test_bfloat16_is_tried_where_a_kernel_is_known_or_it_is_asked_for(ep: str, op: str, tried: bool) -> None:
    assert ("bfloat16" in run._dtypes(INFOS[op], ep, None)) == tried
    assert run._dtypes(INFOS[op], ep, "bfloat16") == ("bfloat16",)


@pytest.mark.newest  # before onnx 1.23 its reference multiplies no matrices of bfloat16
def test_bfloat16_is_cast_inside_as_no_session_is_fed_it() -> None:
    info = INFOS["MultiHeadAttention"]
    form = next(form for form in forms(info, run.attributes(info), ("bfloat16",)) if form.mask == "bias")
    case = case_of(form, info, run.attributes(info))
    inputs = case.inputs(run.DTYPES["bfloat16"])
    model, feeds = decomposed(case, info, inputs)
    assert {array.dtype.name for array in feeds.values()} == {"float32"}
    expected = Reference(model_of(case, inputs)).run(None, feeds_of(inputs))[0]
    assert compare(expected, Reference(model).run(None, feeds)[0], run.TOLERANCES["bfloat16"]).equal


@pytest.mark.parametrize(
    ("row", "told"),
    [(0.0, "0"), (float("nan"), "NaN"), (1.0, "the mean of the values"), (0.25, "something else")],
)
def test_what_a_row_without_a_key_gives_is_told_and_judged_by_nobody(row: float, told: str) -> None:
    form = Form("X", "float32", "bias", "empty", rows=2)
    expected = [np.ones((1, 2, 3), np.float32)]
    result = expected[0].copy()
    result[0, 1] = row
    found = run.judged(form, {"fused": {"results": [result]}, "decomposed": {"results": expected}}, expected)
    assert (found.verdict, found.error, found.detail) == ("right", 0.0, f"a row without a key gives {told}")
    result[0, 0] = 2.0
    assert run.judged(form, {"fused": {"results": [result]}, "decomposed": {"results": expected}}, expected).verdict == "wrong"


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
    answer["decomposed"]["results"] = [EXPECTED[0] + np.float32(plain_off)]
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
    assert [case.verdict for case in table.cases] == ["right"] * 2 * len(set(INFOS) - PACKED)
    assert all(case.error is not None and case.error < 1e-5 and case.ratio for case in table.cases)
    assert "onnxruntime" in table.versions


def test_a_kernel_that_refuses_is_told_with_its_own_words() -> None:
    odd = next(form for form, info in FORMS if info.key == "GroupQueryAttention" and form.head_size == 15)
    with Worker(["-m", child.__name__], dataclasses.asdict(find("cpu"))) as worker:
        found = run.outcome(odd, INFOS["GroupQueryAttention"], worker, set())
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


def test_options_that_a_provider_is_known_not_to_take_are_refused_and_others_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_all", lambda: iter([Installed(name, name) for name in ("cpu", "openvino", "qnn", "new")]))
    with pytest.raises(OptionError, match=r"openvino takes no provider option 'precison'; choose one of cache_dir, .*precision"):
        find("openvino", {"precison": "FP32", "num_of_threads": "1"})
    with pytest.raises(OptionError, match="'threads': cpu takes none"):
        find("cpu", {"threads": "1"})
    for name, option in (("openvino", "precision"), ("qnn", "anything"), ("new", "anything")):
        assert find(name, {option: "1"}).options[option] == "1"


def test_the_summary_counts_and_puts_the_like_together() -> None:
    form = Form("X", "float32")
    refused = [Outcome(dataclasses.replace(form, head_size=size), "unsupported", detail=f"size {size}") for size in (3, 5)]
    table = Conformance("x", {}, (Outcome(form, "right", 1e-6, 1e-7, 0.5), *refused))
    assert list(lines(table)) == [("X", "float32", "1", "0", "2", "0", "1.0e-06", "1.0e-07", "0.50")]
    assert list(failures(table)) == ["unsupported x2, first X float32 none 2x5x5 head-3: size 3"]


def test_records_of_operators_are_all_that_is_read() -> None:
    assert set(INFOS) <= set(by_key())


class Scripted:
    """A process whose answers are written down; what it is asked does not matter."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.ended = list(errors), 0

    def ask(self, question: Any, /) -> Any:
        error = {"on cpu": False, "final": False, "error": self.errors.pop(0)}
        return {"fused": error, "decomposed": error}

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize(("error", "ended"), [("no room for {} bytes", 1), ("CUDA failure {}", 3)])
def test_an_error_that_a_fresh_process_gives_too_is_believed_unless_it_lasts(error: str, ended: int) -> None:
    form, info = next((form, info) for form, info in FORMS if info.key == "MultiHeadAttention")
    process, said = Scripted(*(error.format(number) for number in range(6))), set[str]()
    for _ in range(3):
        assert run.outcome(form, info, process, said).verdict == "unsupported"
    assert process.ended == ended
