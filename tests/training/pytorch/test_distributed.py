"""Fused modules in two processes: DistributedDataParallel and fully sharded, with gloo on the CPU."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.exhaustive
def test_losses_of_two_processes_are_those_of_one() -> None:
    path = os.pathsep.join(str(ROOT / place) for place in (".", "patterns", "cli"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.on_torch", "distributed", "--provider", "cpu", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    far = [float(text) for text in re.findall(r"to [\d.]+, (\S+)", done.stdout)]
    assert len(far) == 6
    assert max(far) < 1e-5
