"""`attnfuse conformance`, and `--conformance` of the commands that plan."""

from __future__ import annotations

import json
import pathlib

import onnx
import pytest

from onnx_attnfuse.kernels import conformance
from onnx_attnfuse.kernels.conformance import Conformance, Form, Outcome
from onnx_attnfuse_cli.main import main
from tests.support.bundled import BUNDLED

BERT = next(str(path) for path in BUNDLED if path.name == "bert__dyn18__sdpa.onnx")


def table_of(path: pathlib.Path, form: Form, verdict: conformance.Verdict = "wrong", ep: str = "cpu") -> str:
    path.write_text(conformance.to_json(Conformance(ep, {"onnxruntime": "0"}, (Outcome(form, verdict),))))
    return str(path)


def test_a_table_is_written_and_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    assert main(["conformance", "--operator", "MultiHeadAttention", "--limit", "2", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 forms" not in out
    assert "2 of 2 forms are right on cpu" in out
    assert [case.form.op for case in conformance.read(path).cases] == ["MultiHeadAttention"] * 2
    assert json.loads(path.read_text())["schema"] == 1


def test_a_page_is_written_and_nothing_is_run_where_none_can_be(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.html"
    arguments = ["conformance", "--operator", "MultiHeadAttention", "--limit", "2", "--html", str(path)]
    assert main(arguments) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    assert "2 of 2 forms are right" in path.read_text()
    path.unlink()
    monkeypatch.setattr("onnx_attnfuse.report.html._NEEDED", {"nothing_of_this_name": "Nothing"})
    assert main(arguments) == 2
    assert "needs Nothing; run pip install 'onnx-attnfuse[report]'" in capsys.readouterr().err
    assert not path.exists()


def test_a_model_is_planned_by_it(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = table_of(tmp_path / "failing.json", Form("MultiHeadAttention", "float32", "bias", "full"))
    out = tmp_path / "out.onnx"
    assert main(["optimize", BERT, "-o", str(out), "--conformance", failing]) == 0
    assert "fails-conformance" in capsys.readouterr().out
    assert not [node for node in onnx.load(out).graph.node if node.op_type == "MultiHeadAttention"]


def test_a_near_miss_is_fused_as_without(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = table_of(tmp_path / "near.json", Form("MultiHeadAttention", "float16", "bias", "full"))
    out = tmp_path / "out.onnx"
    assert main(["optimize", BERT, "-o", str(out), "--conformance", near]) == 0
    assert "fails-conformance" not in capsys.readouterr().out
    assert len([node for node in onnx.load(out).graph.node if node.op_type == "MultiHeadAttention"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conformance", "--ep", "nowhere"], "ep is 'nowhere', which is not installed here; choose"),
        (["conformance", "--operator", "Nothing"], "operator is 'Nothing'; choose one of Attention"),
        (["conformance", "--dtype", "int8"], "dtype is 'int8'; choose one of float32, float16, bfloat16"),
        (["conformance", "--provider-option", "novalue"], "'novalue' is not NAME=VALUE"),
        (["conformance", "--provider-option", "threads=1"], "provider option 'threads': cpu takes none; leave it out"),
        (["conformance", "--limit", "0"], "0 is not in the range"),
        (["conformance", "--json", "no/folder/x.json"], "the folder no/folder does not exist; make it first"),
        (["conformance", "--html", "no/folder/x.html"], "the folder no/folder does not exist; make it first"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not found.out


@pytest.mark.parametrize("name", ["optimize", "explain"])
def test_a_table_that_cannot_be_used_is_one_line_and_nothing_is_written(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = table_of(tmp_path / "other.json", Form("MultiHeadAttention", "float32"), ep="webgpu")
    (tmp_path / "none.json").write_text("{}")
    for file, message in (
        (other, "is a table of webgpu, and the model is for cpu"),
        (str(tmp_path / "none.json"), "is no table of conformance"),
        (str(tmp_path / "missing.json"), "cannot read the table"),
    ):
        out = tmp_path / "out.onnx"
        written = ["-o", str(out)] if name == "optimize" else []
        assert main([name, BERT, *written, "--ep", "cpu", "--conformance", file]) == 2
        found = capsys.readouterr()
        assert message in found.err
        assert len(found.err.strip().splitlines()) == 1
        assert not out.exists()
