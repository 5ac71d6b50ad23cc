"""Reproduction of a difference as files: the submodel, its inputs, and both results."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

import numpy as np

from onnx_attnfuse.errors import OptionError
from onnx_attnfuse.graph.staging import staged
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.verdict import Verdict

_LONGEST = 1000
"""Characters of a key in an archive, whose format has two bytes for the length of one."""


def save(verdict: Verdict, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Writes `<name>.txt` with the verdict's line, `<name>.npz` with inputs and results, and `<name>.onnx` if there is a piece.

    In the archive the arrays are called `input:<name>`, `old:<name>` and `new:<name>`. A key that would be too long has the
    array's number instead, and the text file has a line `<key> is <name>`.

    Args:
        verdict: One that found a difference; nothing is written for any other.
        folder: Where to; made if it does not exist.
        name: The name of the files; characters that file names cannot have are replaced.

    Returns:
        The files written.

    Raises:
        OptionError: The folder cannot be written to.
    """
    if verdict.evidence is None:
        return []
    evidence = verdict.evidence
    stem = re.sub(r"[^\w.-]+", "_", name).strip("._").encode()[:100].decode(errors="ignore") or "site"
    arrays, renamed = _keyed({"input": evidence.inputs, "old": evidence.old, "new": evidence.new})
    files = {suffix: folder / f"{stem}{suffix}" for suffix in (".txt", ".npz", ".onnx")}
    if evidence.model is None:
        del files[".onnx"]
    try:
        with staged() as stage:
            stage.temporary(files[".txt"]).write_text("\n".join([name, verdict.detail, *renamed, ""]), encoding="utf-8")
            with stage.temporary(files[".npz"]).open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
            if evidence.model is not None:
                stage.temporary(files[".onnx"]).write_bytes(evidence.model.SerializeToString())
    except OSError as error:
        raise OptionError(f"cannot write to {folder}: {error.strerror or error}; choose another folder for evidence") from error
    return list(files.values())


def _keyed(groups: Mapping[str, Mapping[str, Array]]) -> tuple[dict[str, Array], list[str]]:
    """The arrays by their keys in the archive, and a line on each key that is a number."""
    arrays: dict[str, Array] = {}
    renamed: list[str] = []
    for group, members in groups.items():
        for count, (name, array) in enumerate(members.items()):
            key = f"{group}:{name}"
            if len(key) > _LONGEST:
                key = f"{group} {count}"
                renamed.append(f"{key} is {name}")
            arrays[key] = array
    return arrays, renamed
