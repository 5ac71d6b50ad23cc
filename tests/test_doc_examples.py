"""The examples of the documentation, run as they stand there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import onnx
import pytest

from tests.recorded import BUNDLED

_ROOT = pathlib.Path(__file__).parents[1]
_EXAMPLES = _ROOT / "docs" / "examples"
_MODEL = next(path for path in BUNDLED if path.stem == "bert__dyn18__sdpa")
_WRITTEN = {
    "after_dynamo_export": {"model.onnx": 1},
    "after_torchscript_export": {"exported.onnx": 0, "model.onnx": 1},
    "in_a_pass_manager": {"model.onnx": 2},
    "with_onnx_runtime": {},
}
"""The models that each example writes, and how many fused attentions are in them."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in _EXAMPLES.glob("*.py")} == set(_WRITTEN)


@pytest.mark.parametrize("name", _WRITTEN)
def test_it_does_what_it_says(name: str, tmp_path: pathlib.Path) -> None:
    path = os.pathsep.join(str(_ROOT / folder) for folder in (".", "patterns", "cli"))
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / f"{name}.py"), str(_MODEL)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("fused")]
    _, fused, _, candidates, *_ = told.split()
    assert fused == candidates != "0"
    assert {file.name: fused_in(file) for file in tmp_path.glob("*.onnx")} == _WRITTEN[name]


def fused_in(path: pathlib.Path) -> int:
    """How many attentions of a model are fused."""
    operators = [node.op_type for node in onnx.load(path).graph.node]
    assert ("Softmax" in operators) == ("MultiHeadAttention" not in operators)
    return operators.count("MultiHeadAttention")
