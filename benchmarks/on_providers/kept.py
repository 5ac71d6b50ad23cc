"""Rows of earlier runs, and whether they still hold: `Kept`, and the digests that tell."""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterable, Iterator

from benchmarks.on_providers.judge import Row, Side

_HERE = pathlib.Path(__file__).parent
_RUN = ("runner.py", "runner.js", "judge.py", "tensors.py")
"""Files of this folder that decide what is run of what is written, and how it is judged."""


class Kept:
    """Rows in a file, one a line, each added as it comes; of two of one name the later holds."""

    def __init__(self, file: pathlib.Path) -> None:
        """The rows that are in the file; none where there is no such file.

        Args:
            file: The file; its folder is made.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._lock = file, threading.Lock()
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.rows: dict[str, Row] = {row.name: row for row in map(_row, lines)}

    def add(self, row: Row) -> None:
        """Writes a row at once."""
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            print(json.dumps(dataclasses.asdict(row)), file=file)
            self.rows[row.name] = row


def runners() -> Iterator[pathlib.Path]:
    """The files that decide what a row says of two models."""
    return (_HERE / name for name in _RUN)


def digest(texts: Iterable[object], files: Iterable[pathlib.Path]) -> str:
    """One short text for what is said and what is in files, whatever the files are called.

    Args:
        texts: What is said.
        files: The files.
    """
    found = hashlib.blake2b(repr([str(text) for text in texts]).encode(), digest_size=12)
    for file in files:
        found.update(hashlib.blake2b(file.read_bytes()).digest())
    return found.hexdigest()


def _row(line: str) -> Row:
    """A row that an earlier run wrote, also one that knew of other fields."""
    told = {key: value for key, value in json.loads(line).items() if key in Row.__dataclass_fields__}
    return Row(**{**told, "export": Side(**told["export"]), "ours": Side(**told["ours"])})
