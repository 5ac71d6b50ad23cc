"""`attnfuse unfuse`: what it writes, what it prints, and how it ends."""

from __future__ import annotations

import json
import pathlib

import pytest

from onnx_attnfuse.graph import io
from onnx_attnfuse_cli.main import main
from tests.support import small_models

FUSED = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
g (float[b, s, 32] q, float[b, t, 32] k, float[b, t, 32] v, int32[n] offsets) => (float[b, s, 32] out, float[m, 32] x)
{
    [attention] out = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v)
    [restore] x = com.microsoft.RestorePadding(q, offsets)
}"""


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A model with an operator that can be spelled out and one that cannot, in the working directory."""
    monkeypatch.chdir(tmp_path)
    return small_models.written(FUSED, tmp_path / "model.onnx")


def test_writes_beside_the_model_and_says_what_stays(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    assert main(["unfuse", "model.onnx"]) == 0
    assert model.read_bytes() == before
    ops = [node.op_type for node in io.load(model.with_name("model.unfused.onnx")).graph]
    assert "Softmax" in ops
    assert "MultiHeadAttention" not in ops
    out, err = capsys.readouterr()
    first, last = out.splitlines()
    assert first.startswith("restore: RestorePadding stays, packed: ")
    assert last == "decomposed 1 of 2 fused operators: 1 com.microsoft.MultiHeadAttention"
    assert err == "wrote model.unfused.onnx\n"


def test_the_json_is_the_documented_one(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unfuse", "model.onnx", "--json", "-o", "out.onnx"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["unfused"], report["kept"]) == (1, 1, 1)
    described = (pathlib.Path(__file__).parents[2] / "docs" / "unfuse.md").read_text()
    keys = {*report, *report["sites"][0], *report["sites"][0]["verified"], *report["sites"][1]["reason"]}
    assert {key for key in keys if f"`{key}`" not in described} == set()


def test_quiet_says_nothing(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unfuse", "model.onnx", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["none.onnx"], "does not exist"),
        (["model.onnx", "-o", "model.onnx"], "is the model itself"),
        (["model.onnx", "-o", "."], "is a folder"),
        (["model.onnx", "-o", "no/out.onnx"], "does not exist; make it first"),
        (["model.onnx", "-q", "--json"], "contradicts"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(arguments: list[str], cause: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unfuse", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert cause in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in model.parent.iterdir()] == ["model.onnx"]
