"""The example for Olive, run by `make test-olive`: Olive and what it needs are larger than all other dependencies."""

from __future__ import annotations

import pathlib

from tests.support.doc_examples import run


def test_it_does_what_it_says(tmp_path: pathlib.Path) -> None:
    found = run("as_an_olive_pass", tmp_path)
    assert {pathlib.PurePath(name).parts[0]: count for name, count in found.items()} == {"optimized": 0, "fused": 2}
