"""Tables of conformance: which forms they refuse, which near misses they keep, and files that are none."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.kernels import conformance
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome
from onnx_attnfuse.kernels.operators import by_key

FORM = Form("MultiHeadAttention", "float32", "bias", "full", causal=True, head_size=64)
WRONG = Outcome(FORM, "wrong", 0.25, 1e-7, 0.5, "output 0 at [0] 1 became 2")


def of(*cases: Outcome) -> Conformance:
    return Conformance("webgpu", {"onnxruntime-webgpu": "1.27.0"}, cases)


def test_a_form_that_failed_is_refused_with_its_case() -> None:
    reason = of(WRONG).failure(FORM)
    assert reason is not None
    assert reason.code == "fails-conformance"
    assert reason.message == (
        "on webgpu MultiHeadAttention float32 bias-full causal 2x5x5 head-64 was wrong with onnxruntime-webgpu 1.27.0: "
        "output 0 at [0] 1 became 2"
    )


@pytest.mark.parametrize("verdict", ["wrong", "unsupported", "on-cpu"])
def test_each_way_to_fail_refuses(verdict: conformance.Verdict) -> None:
    assert of(Outcome(FORM, verdict)).failure(FORM) is not None
    assert of(Outcome(FORM, "right")).failure(FORM) is None


def test_rows_and_the_spread_of_a_bias_are_not_looked_at() -> None:
    asked = dataclasses.replace(FORM, bias="", batch=1, rows=1, columns=900)
    assert of(WRONG).failure(asked) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"op": "Attention"},
        {"dtype": "float16"},
        {"mask": "none", "bias": ""},
        {"mask": "lengths", "bias": ""},
        {"causal": False},
        {"windowed": True},
        {"cached": True},
        {"capped": True},
    ],
)
def test_another_form_is_kept(change: dict[str, object]) -> None:
    assert of(WRONG).failure(dataclasses.replace(FORM, **change)) is None


def test_grouped_heads_are_looked_up_without_groups_where_the_operator_knows_none() -> None:
    grouped = dataclasses.replace(FORM, grouped=True)
    assert of(WRONG).failure(grouped) is not None
    assert of(WRONG, Outcome(grouped, "right")).failure(grouped) is None


@pytest.mark.parametrize(
    ("size", "refused"), [(8, True), (64, True), (96, True), (12, False), (20, False), (15, False), (7, False)]
)
def test_a_head_size_that_was_not_tried_goes_with_those_of_the_same_part_of_eight(size: int, refused: bool) -> None:
    verdicts: dict[int, conformance.Verdict] = {8: "wrong", 12: "right", 15: "right", 64: "wrong"}
    table = of(*(Outcome(dataclasses.replace(FORM, head_size=tried), verdict) for tried, verdict in verdicts.items()))
    assert (table.failure(dataclasses.replace(FORM, head_size=size)) is not None) == refused


def test_a_head_size_that_is_not_known_is_refused_where_any_failed() -> None:
    odd = dataclasses.replace(FORM, head_size=15)
    assert of(Outcome(odd, "right"), WRONG).failure(dataclasses.replace(FORM, head_size=0)) is not None
    assert of(Outcome(odd, "right")).failure(dataclasses.replace(FORM, head_size=0)) is None


def test_where_no_head_size_is_alike_all_of_them_tell() -> None:
    assert of(WRONG).failure(dataclasses.replace(FORM, head_size=15)) is not None


def test_sizes_that_were_tried_with_one_head_size_only_do_not_tell_of_others() -> None:
    long = dataclasses.replace(FORM, rows=264, columns=264)
    odd = dataclasses.replace(FORM, head_size=15)
    table = of(Outcome(long, "wrong"), Outcome(odd, "right"))
    assert table.failure(odd) is None
    assert table.failure(dataclasses.replace(FORM, head_size=7)) is None
    assert table.failure(dataclasses.replace(FORM, head_size=128)) is not None


def test_a_file_holds_the_table(tmp_path: pathlib.Path) -> None:
    table, path = of(WRONG, Outcome(dataclasses.replace(FORM, windowed=True), "on-cpu")), tmp_path / "table.json"
    path.write_text(conformance.to_json(table))
    assert conformance.read(path) == table


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2}',
        conformance.to_json(of(WRONG)).replace('"wrong"', '"good"'),
        conformance.to_json(of(WRONG))[:-9],
    ],
)
def test_what_is_no_table_is_told(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"is no table of conformance; write one with attnfuse conformance --json"):
        conformance.read(path)


def test_a_table_from_before_the_number_of_heads_was_told_is_of_the_usual_number(tmp_path: pathlib.Path) -> None:
    path, told = tmp_path / "table.json", json.loads(conformance.to_json(of(WRONG)))
    place = told["columns"].index("heads")
    for row in [told["columns"], *told["cases"]]:
        del row[place]
    path.write_text(json.dumps(told))
    assert conformance.read(path) == of(WRONG)
    del told["columns"][0]
    path.write_text(json.dumps(told))
    with pytest.raises(OptionError, match="is no table of conformance"):
        conformance.read(path)


def test_a_missing_file_is_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read the table .*No such file"):
        conformance.read(tmp_path / "none.json")


def test_a_table_of_another_provider_is_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(conformance.to_json(of(WRONG)))
    with pytest.raises(OptionError, match="is a table of webgpu, and the model is for cpu; choose --ep webgpu"):
        conformance.table_for("cpu", path)
    assert conformance.table_for("webgpu", path) == of(WRONG)


@pytest.mark.parametrize("path", sorted(pathlib.Path(conformance.__file__).parent.glob("*.json")), ids=lambda path: path.stem)
def test_tables_that_come_along_are_of_operators_that_have_a_record(path: pathlib.Path) -> None:
    table = conformance.read(path)
    assert table.ep == path.stem.split("_")[0]
    assert table.versions
    assert {case.form.op for case in table.cases} <= set(by_key())
    assert len({case.form for case in table.cases}) == len(table.cases)


def test_on_the_cpu_nothing_is_wrong() -> None:
    table = conformance.known("cpu")
    assert table is not None
    failed = {(case.form.op, case.verdict, case.form.head_size % 8 == 0) for case in table.cases if case.verdict != "right"}
    assert failed == {("GroupQueryAttention", "unsupported", False)}


def test_the_table_of_a_gpu_in_software_counts_only_where_it_is_asked_for() -> None:
    path = pathlib.Path(conformance.__file__).parent / "webgpu_swiftshader.json"
    assert conformance.table_for("webgpu", None) is None
    table = conformance.table_for("webgpu", path)
    assert table is not None
    assert table.failure(Form("MultiHeadAttention", "float32", head_size=64)) is not None
    assert table.failure(Form("MultiHeadAttention", "float32", head_size=15)) is None


def test_of_an_unknown_provider_nothing_is_known() -> None:
    assert conformance.table_for("nowhere", None) is None
