"""Processes of the command that end by a signal."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from onnx_attnfuse_cli.exits import Exit
from onnx_attnfuse_cli.main import main
from tests.support.small_models import ATTENTION, written

_MAIN = """
import os, signal, sys
from onnx_attnfuse.graph.staging import Stage
from onnx_attnfuse.verify import apart
from onnx_attnfuse_cli.main import main
commit, signalled = Stage.commit, sys.argv.pop() == "signalled"
def interrupted(stage):
    child = apart._WORKER._process = apart._WORKER._start()
    print(child.pid, *os.listdir(), flush=True)
    if signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    commit(stage)
Stage.commit = interrupted
sys.exit(main())
"""


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
