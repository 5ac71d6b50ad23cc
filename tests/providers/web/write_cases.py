"""Writes bundled models, fused for a browser, with their inputs and the results of the exports: `write_cases.py FOLDER [EP]`.

The folder gets `cases.json` and the files that it names, which the page reads.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from typing import Any

import numpy as np
import onnx

import onnx_attnfuse
from onnx_attnfuse.kernels import providers
from tests.support.bundled import BUNDLED, Array, cases, session


def main(folder: pathlib.Path, ep: str) -> None:
    """Writes everything."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for path in BUNDLED:
        feeds = cases(path)["example"]
        export = session(onnx.load(path))
        names = [output.name for output in export.get_outputs()]
        expected = dict(zip(names, export.run(None, feeds), strict=True))
        shutil.copy(path, folder / path.name)
        fused = f"{path.stem}.fused.onnx"
        onnx_attnfuse.optimize(path, ep=ep if ep in providers.names() else "cpu").save(folder / fused)
        told = {"name": path.stem, "export": path.name, "fused": fused}
        found.append(
            told | {"inputs": _written(feeds, folder, path.stem), "outputs": _written(expected, folder, f"{path.stem} out")}
        )
    (folder / "cases.json").write_text(json.dumps(found))


def _written(arrays: dict[str, Array], folder: pathlib.Path, prefix: str) -> list[dict[str, Any]]:
    """Arrays as files of their bytes, and what they are."""
    told: list[dict[str, Any]] = []
    for place, (name, array) in enumerate(arrays.items()):
        file = f"{prefix} {place}.bin".replace(" ", "_")
        (folder / file).write_bytes(np.ascontiguousarray(array).tobytes())
        told.append({"name": name, "type": array.dtype.name, "dims": list(array.shape), "file": file})
    return told


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "wasm")
