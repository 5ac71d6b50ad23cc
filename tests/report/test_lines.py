"""Names that hold line breaks and escape sequences, in all that a run prints and logs."""

from __future__ import annotations

import logging
import pathlib

import onnx
import pytest

import onnx_attnfuse
from models.bundle import FOLDER
from onnx_attnfuse.report.lines import one_line
from onnx_attnfuse_cli.main import main

HOSTILE = "softmax\n::error::injected\x1b[31m\u2028\u202e"


def renamed(tmp_path: pathlib.Path, op: str) -> str:
    """A bundled model in which the first node of an operator has a hostile name."""
    model = onnx.load_model(FOLDER / "bert__dyn18__sdpa.onnx")
    next(node for node in model.graph.node if node.op_type == op).name = HOSTILE
    onnx.save_model(model, tmp_path / "named.onnx")
    return str(tmp_path / "named.onnx")


@pytest.mark.parametrize("text", ["a b", "größe × 2", "注意力", "", "non\u00a0breaking"])
def test_ordinary_text_stays(text: str) -> None:
    assert one_line(text) == text


def test_what_controls_a_terminal_is_escaped() -> None:
    assert one_line(HOSTILE) == r"softmax\n::error::injected\x1b[31m\u2028\u202e"
    assert one_line("\udcff\t\x7f\x85") == r"\udcff\t\x7f\x85"


@pytest.mark.parametrize("command", [["optimize", "--output"], ["explain"], ["explain", "--ep", "cuda"]])
def test_a_name_makes_no_line_and_no_escape_sequence(
    command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    output = [*rest, str(tmp_path / "out.onnx")] if name == "optimize" else rest
    assert main([name, renamed(tmp_path, "Softmax"), "-v", *output]) == 0
    printed = "".join(capsys.readouterr())
    assert r"softmax\n::error::injected\x1b[31m" in printed
    assert not any(line.startswith("::") for line in printed.splitlines())
    assert "\x1b" not in printed
    assert "\u202e" not in printed


def test_a_name_makes_no_line_in_a_log(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="onnx_attnfuse"):
        onnx_attnfuse.optimize(renamed(tmp_path, "Softmax"), verify="none")
    assert any("injected" in record.getMessage() for record in caplog.records)
    assert not any("\n::error" in record.getMessage() for record in caplog.records)
