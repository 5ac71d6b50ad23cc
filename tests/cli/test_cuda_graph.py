"""`--cuda-graph` on the command line: what it writes, and one line with exit status 2 and nothing written where it cannot."""

from __future__ import annotations

import json
import pathlib

import pytest

from onnx_attnfuse.graph import io
from onnx_attnfuse_cli.main import main
from tests.support import small_models

ASKED = ["--ep", "cuda", "--arch", "sm80", "--cuda-graph"]
SIZES = ["--dim", "b=2", "--dim", "s=16", "--dim", "t=16"]
COUNTING = small_models.ATTENTION.replace(
    "[values] out = MatMul(weights, v)",
    "[values] sum = MatMul(weights, v) [found] places = NonZero(sum) [least] n = ReduceMin<keepdims = 0>(places)"
    " float_ = Cast<to = 1>(n) out = Add(sum, float_)",
)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a model that can be captured and one that cannot, which is the working directory."""
    small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    small_models.written(COUNTING, tmp_path / "counting.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_of_the_sizes_that_were_told_is_written(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "model.onnx", "--report", "told.json", *ASKED, *SIZES]) == 0
    graph = io.load(folder / "model.attnfuse.onnx").graph
    assert [[*value.shape] for value in (*graph.inputs, *graph.outputs) if value.shape is not None] == [[2, 2, 16, 4]] * 4
    assert "CUDA graph: can be captured" in capsys.readouterr().out.splitlines()
    told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    assert told["capture"] == {"name": "CUDA graph", "possible": True, "sizes": [], "blockers": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.onnx", *ASKED], "cuda_graph needs numbers for the sizes 'b', 's', 't'; add --dim b=N --dim s=N --dim t=N"),
        (["model.onnx", *ASKED, *SIZES[2:]], "cuda_graph needs numbers for the sizes 'b'; add --dim b=N"),
        (
            ["model.onnx", "--ep", "cpu", "--cuda-graph"],
            "cuda_graph is asked for, and cpu captures no model; choose --ep cuda with it",
        ),
        (
            ["model.onnx", *ASKED, *SIZES, "--padding", "guarded"],
            "padding is 'guarded', a test at run time, which no CUDA graph has; leave it or cuda_graph out",
        ),
        (
            ["model.onnx", *ASKED, *SIZES, "--target", "packed"],
            "target is 'packed', and a CUDA graph has a fixed number of rows; add --packed-tokens N, for the most tokens of a"
            " batch, or leave cuda_graph out",
        ),
        (
            ["counting.onnx", *ASKED, *SIZES],
            "the model cannot be captured in a CUDA graph: NonZero waits for the device, as the host asks for the number of"
            " elements that it gives [found]; leave --cuda-graph out, or change that in its source",
        ),
    ],
    ids=["sizes", "size", "ep", "padding", "target", "node"],
)
def test_what_cannot_be_captured_is_one_line_and_nothing_is_written(
    arguments: list[str], message: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(folder)
    assert main(["optimize", *arguments, "-q"]) == 2
    assert capsys.readouterr() == ("", f"Error: {message}\n")
    assert names(folder) == before


def test_of_several_models_the_one_that_cannot_be_captured_is_left_out(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", "model.onnx", "counting.onnx", "-o", "out", *ASKED, *SIZES]) == 2
    assert len(names(folder / "out")) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 models done" in out
    assert err.startswith("Error: counting.onnx: the model cannot be captured in a CUDA graph: NonZero ")


def test_explain_says_of_every_model_whether_it_can_be_captured(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "model.onnx", "--ep", "cuda"]) == 0
    assert "CUDA graph: can be captured once its sizes are fixed (b, s, t); --cuda-graph does that" in capsys.readouterr().out
    assert main(["explain", "counting.onnx", "--ep", "cuda"]) == 0
    assert "CUDA graph: no, NonZero waits for the device" in capsys.readouterr().out
    assert main(["explain", "counting.onnx", *ASKED, *SIZES]) == 0
    assert "CUDA graph: no, NonZero waits for the device" in capsys.readouterr().out
    assert main(["explain", "model.onnx", "--ep", "cpu"]) == 0
    assert "CUDA graph" not in capsys.readouterr().out
