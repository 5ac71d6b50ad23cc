"""The example for the exporter of transformers 5, run by `make test-models`."""

from __future__ import annotations

import pathlib

from tests.support.doc_examples import run


def test_it_does_what_it_says(tmp_path: pathlib.Path) -> None:
    assert run("after_transformers_export", tmp_path) == {"model.onnx": 2}
