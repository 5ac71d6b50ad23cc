"""Models through standard input and output, by processes as a shell starts them."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import onnx
import pytest

from tests.support import small_models

COMMAND = [sys.executable, "-m", "onnx_attnfuse_cli", "optimize"]
MODEL = small_models.parsed(small_models.ATTENTION).SerializeToString()


def run(*arguments: str, given: bytes = MODEL, folder: pathlib.Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *arguments], input=given, capture_output=True, check=False, cwd=folder)


def test_a_model_goes_through(tmp_path: pathlib.Path) -> None:
    done = run("-", "-o", "-", folder=tmp_path)
    assert done.returncode == 0
    assert "Softmax" not in {node.op_type for node in onnx.load_from_string(done.stdout).graph.node}
    assert b"fused 1 of 1 attention site" in done.stderr
    assert b"wrote" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_one_end_may_be_a_file(tmp_path: pathlib.Path) -> None:
    path = small_models.written(small_models.ATTENTION, tmp_path / "model.onnx")
    from_file = run("model.onnx", "-o", "-", "-q", given=b"", folder=tmp_path)
    assert run("-", "-o", "out.onnx", folder=tmp_path).returncode == 0
    assert onnx.load_from_string(from_file.stdout) == onnx.load(tmp_path / "out.onnx")
    assert {item.name for item in tmp_path.iterdir()} == {path.name, "out.onnx"}


def test_a_dry_run_writes_nothing_to_the_stream(tmp_path: pathlib.Path) -> None:
    done = run("-", "--dry-run", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith(b"fused 1 of 1 attention site\n")


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        (["-"], MODEL, b"a model from standard input has no name"),
        (["-", "model.onnx", "-o", "out"], MODEL, b"- is one model, and there are several"),
        (["-", "-o", "-"], b"no model", b"stdin.onnx is not an ONNX model"),
        (["-", "-o", "-", "--cache", "shared"], MODEL, b"proofs and --cache write files next to the model"),
    ],
)
def test_what_a_stream_cannot_be_is_one_line(arguments: list[str], given: bytes, message: bytes, tmp_path: pathlib.Path) -> None:
    done = run(*arguments, given=given, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"Error: " + message)
    assert done.stderr.count(b"\n") == 1
