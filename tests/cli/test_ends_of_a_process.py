"""Processes of the command that end by a signal, or that are given names of files that are no text."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from onnx_attnfuse_cli.main import main
from onnx_attnfuse_cli.terminal import Exit
from tests.support.small_models import ATTENTION, written

_MAIN = """
import os, signal, sys
from onnx_attnfuse.graph.staging import Stage
from onnx_attnfuse.verify import subprocess_runner
from onnx_attnfuse_cli.main import main
commit, signalled = Stage.commit, sys.argv.pop() == "signalled"
def interrupted(stage):
    child = subprocess_runner._WORKER._process = subprocess_runner._WORKER._start()
    print(child.pid, *os.listdir(), flush=True)
    if signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    commit(stage)
Stage.commit = interrupted
sys.exit(main())
"""
_NAME = b"m\xe9.onnx"


@pytest.mark.parametrize("end", ["signalled", "left alone"])
def test_sigterm_leaves_no_file_and_no_child(end: str, tmp_path: pathlib.Path) -> None:
    written(ATTENTION, tmp_path / "m.onnx")
    command = [sys.executable, "-c", _MAIN, "optimize", "m.onnx", "-o", "r.onnx", "-q", end]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    child, *there = done.stdout.split()
    assert any(name.endswith(".part") for name in there)
    assert not pathlib.Path("/proc", child).exists()
    if end == "signalled":
        assert (done.returncode, done.stderr) == (Exit.TERMINATED, "Terminated.\n")
        assert {path.name for path in tmp_path.iterdir()} == {"m.onnx"}
    else:
        assert (done.returncode, done.stderr) == (Exit.DONE, "")
        assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "r.onnx"}


def test_a_program_that_calls_main_keeps_its_own_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--version"]) == Exit.DONE
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", [_NAME, "mé.onnx".encode()])
def test_a_path_that_is_no_utf8_is_told_with_its_bytes_escaped(name: bytes, several: bool, tmp_path: pathlib.Path) -> None:
    names = map(os.fsdecode, [name, b"z" + name] if several else [name])
    models = [written(ATTENTION, tmp_path / item) for item in names]
    report = tmp_path / ("reports" if several else "r.html")
    out = tmp_path / ("fused" if several else "r.onnx")
    command = [sys.executable, "-m", "onnx_attnfuse_cli", "optimize", *models, "-o", out, "--report", report]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == Exit.DONE, done.stderr
    page = (report / "index.html" if several else report).read_text(encoding="utf-8").replace("<wbr>", "")
    assert ("m?.onnx" if name == _NAME else "mé.onnx") in page
    if several:
        assert ("m%E9.html" if name == _NAME else "m%C3%A9.html") in page
        assert (b"m\\udce9.onnx" if name == _NAME else "mé.onnx".encode()) in done.stdout


def test_a_defect_on_such_a_path_is_written_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_attnfuse_cli.endings import write_report

    monkeypatch.chdir(tmp_path)
    text = write_report(ValueError(os.fsdecode(_NAME)), ["explain", os.fsdecode(_NAME)]).read_text(encoding="utf-8")
    assert "ValueError: m?.onnx" in text
    assert "explain 'm?.onnx'" in text
