"""Running the examples of the documentation as they stand there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import onnx

from tests.support.bundled import BUNDLED

_ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = _ROOT / "docs" / "examples"
_MODEL = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")


def run(name: str, folder: pathlib.Path) -> dict[str, int]:
    """Runs an example in a folder, with a small model as its argument.

    Returns:
        The models it wrote, and how many fused attentions are in each.
    """
    (told,) = [line for line in said(name, folder).splitlines() if line.startswith("fused")]
    _, fused, _, candidates, *_ = told.split()
    assert fused == candidates != "0"
    return {file.relative_to(folder).as_posix(): _fused_in(file) for file in folder.rglob("*.onnx")}


def said(name: str, folder: pathlib.Path) -> str:
    """Runs an example in a folder, with a small model as its argument; returns what it printed."""
    path = os.pathsep.join(str(_ROOT / place) for place in (".", "patterns", "cli"))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(_MODEL)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OLIVE_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _fused_in(path: pathlib.Path) -> int:
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert ("Softmax" in operators) == ("MultiHeadAttention" not in operators)
    return operators.count("MultiHeadAttention")
