"""Fused modules in two processes: DistributedDataParallel and fully sharded, with gloo on the CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.exhaustive
def test_losses_of_two_processes_are_those_of_one() -> None:
    path = os.pathsep.join(str(ROOT / place) for place in (".", "patterns", "cli"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "training_torch_distributed.py"), "--device", "cpu", "--steps", "3"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("beside one process") == 6
