"""Reproduction of a difference as files: the submodel, its inputs, and both results."""

from __future__ import annotations

import pathlib
import re

import numpy as np

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.verify.verdict import Verdict


def save(verdict: Verdict, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes `<name>.txt` with the verdict's line, `<name>.npz` with inputs and results, and `<name>.onnx` if there is a piece.

    In the archive the arrays are called `input:<name>`, `old:<name>` and `new:<name>`.

    Args:
        verdict: One that found a difference; nothing is written for any other.
        folder: Where to; made if it does not exist.
        name: What to call the files; characters that file names cannot have are replaced.

    Returns:
        The files written.

    Raises:
        OptionError: The folder cannot be written to.
    """
    if verdict.evidence is None:
        return []
    evidence = verdict.evidence
    stem = re.sub(r"[^\w.-]+", "_", name).strip("._")[:100] or "site"
    arrays = {f"input:{key}": array for key, array in evidence.inputs.items()}
    arrays |= {f"old:{key}": array for key, array in evidence.old.items()}
    arrays |= {f"new:{key}": array for key, array in evidence.new.items()}
    files = {suffix: folder / f"{stem}{suffix}" for suffix in (".txt", ".npz", ".onnx")}
    if evidence.model is None:
        del files[".onnx"]
    try:
        with staged() as stage:
            stage.temporary(files[".txt"]).write_text(f"{name}\n{verdict.detail}\n", encoding="utf-8")
            with stage.temporary(files[".npz"]).open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            if evidence.model is not None:
                stage.temporary(files[".onnx"]).write_bytes(evidence.model.SerializeToString())
    except OSError as error:
        raise OptionError(f"cannot write to {folder}: {error.strerror or error}; choose another folder for evidence") from error
    return list(files.values())
