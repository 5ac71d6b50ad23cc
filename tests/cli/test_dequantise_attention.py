"""`--dequantise-attention` on the command line: what is told and held, and one line where the record is broken."""

from __future__ import annotations

import json
import pathlib

import onnx
import pytest

from onnx_attnfuse_cli.main import main
from tests.support.quantised import quantised


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a quantised BERT, which is the working directory."""
    onnx.save(quantised("bert__dyn18__sdpa"), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_costs_is_told_and_held(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["optimize", "model.onnx", "--dequantise-attention", "--require-all", "-o", "fused.onnx", "--report", "told.json"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "10 roundings inside of 2 attentions are left out" in out
    assert "difference of the outputs by that: largest" in out
    told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    assert (told["dequantised"]["sites"], told["dequantised"]["roundings"]) == (2, 10)
    (scores,) = (item for item in told["sites"][0]["roundings"] if item["place"] == "scores")
    assert (scores["type"], scores["axis"], len(scores["nodes"])) == ("INT8", None, 2)
    assert main(["verify", "model.onnx", "fused.onnx"]) == 0
    assert "stated: largest" in capsys.readouterr().out


def test_without_it_a_quantised_attention_stays(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "model.onnx", "--require-all", "-o", "same.onnx"]) == 1
    assert "--dequantise-attention allows that" in capsys.readouterr().out
    assert main(["explain", "--code", "quantized"]) == 0
    assert "--dequantise-attention" in capsys.readouterr().out


def test_a_broken_record_is_one_line(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "model.onnx", "--dequantise-attention", "-q", "-o", "fused.onnx"]) == 0
    model = onnx.load("fused.onnx")
    for entry in model.metadata_props:
        entry.value = "{}"
    onnx.save(model, "broken.onnx")
    before = set(folder.iterdir())
    assert main(["verify", "model.onnx", "broken.onnx"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith("make the model again")
    assert set(folder.iterdir()) == before
