"""`--kv-cache` and `--calibrate` on the command line: what is told, and one line with nothing written where it cannot."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnx_attnfuse_cli.main import main
from tests.support.decoders import decoder

_SHARED = ["optimize", "model.onnx", "--ep", "cpu", "--cache", "shared"]


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a decoder and a text, which is the working directory."""
    onnx.save(decoder(), tmp_path / "model.onnx")
    np.savez(tmp_path / "text.npz", input_ids=np.random.default_rng(0).integers(0, 99, (2, 20)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_costs_is_told_and_held(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_SHARED, "--kv-cache", "int8", "--calibrate", "text.npz", "-o", "int8.onnx", "--report", "told.json"]) == 0
    out = capsys.readouterr().out
    assert "the cache is int8, 128 bytes a position instead of 512; scales from 40 tokens of text.npz" in out
    assert "error of the logits by the int8 cache on text of that file, with scales from the rest: largest" in out
    assert "error of the logits by the int8 cache on random tokens: largest" in out
    told = json.loads((folder / "told.json").read_text(encoding="utf-8"))["kv_cache"]
    assert (told["format"], told["bytes_per_position"]) == ("int8", 128)
    assert main(["verify", "model.onnx", "int8.onnx"]) == 0
    assert "stated: largest" in capsys.readouterr().out
    model = onnx.load("int8.onnx")
    (scale,) = (item for item in model.graph.initializer if item.name.endswith("1.value.scale"))
    scale.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(scale) * 0.1).astype(np.float32), scale.name))
    onnx.save(model, "cut.onnx")
    assert main(["verify", "model.onnx", "cut.onnx", "-q"]) == 3
    assert "was stated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimize", "model.onnx", "--kv-cache", "int8"], "which only a shared cache can be; add --cache shared"),
        ([*_SHARED, "--calibrate", "text.npz"], "is for the scales of a quantised cache; add --kv-cache int8, or leave it out"),
        ([*_SHARED, "--kv-cache", "int8", "--calibrate", "no.npz"], "no.npz is not there; write one with numpy.savez"),
        ([*_SHARED, "--kv-cache", "int8", "--calibrate", "model.onnx"], "is no .npz file of arrays"),
        ([*_SHARED, "--kv-cache", "int16"], "int16"),
    ],
)
def test_what_contradicts_is_one_line_and_nothing_is_written(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = set(folder.iterdir())
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert set(folder.iterdir()) == before


def test_the_reason_of_a_device_without_the_kernel_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--code", "no-kernel-for-cache"]) == 0
    assert "--kv-cache" in capsys.readouterr().out
