"""The example of the documentation that generates with a shared cache, run as it stands there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import onnx

import onnx_attnfuse
from tests.support.bundled import BUNDLED
from tests.support.decoder_loops import Fed, grown
from tests.support.doc_examples import EXAMPLES

_ROOT = pathlib.Path(__file__).parents[3]
_LLAMA = next(path for path in BUNDLED if path.stem == "llama_past__dyn18__sdpa")
_PROMPT = np.array([[0, 0, 5, 7, 11, 2], [3, 8, 4, 6, 9, 12]])
_MASK = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def test_it_generates_what_the_source_does(tmp_path: pathlib.Path) -> None:
    path = os.pathsep.join(str(_ROOT / place) for place in (".", "patterns", "cli"))
    script = str(EXAMPLES / "decode_with_a_shared_cache.py")
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, script, str(_LLAMA)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, *rows = done.stdout.splitlines()
    assert told == "fused 2 of 2 attentions"
    assert [[int(word) for word in row.strip(" []").split()] for row in rows] == _generated()


def _generated(count: int = 8) -> list[list[int]]:
    """What the source generates with a cache that grows."""
    model = onnx.load(_LLAMA)
    decoder = onnx_attnfuse.optimize(model, cache="shared").report.decoder
    assert decoder is not None
    fed = [Fed(_PROMPT, _MASK)]
    found: list[np.ndarray] = []
    for _ in range(count):
        found.append(grown(model, decoder, fed)[-1][:, -1].argmax(-1))
        mask = np.concatenate([fed[-1].mask, np.ones((2, 1), np.int64)], axis=1)
        fed.append(Fed(found[-1][:, None], mask))
    return np.stack(found, axis=1).tolist()
