"""The examples for the exporter of transformers 5, run by `make test-models`."""

from __future__ import annotations

import pathlib

from tests.support.doc_examples import run, said


def test_it_does_what_it_says(tmp_path: pathlib.Path) -> None:
    assert run("after_transformers_export", tmp_path) == {"model.onnx": 2}


def test_a_hybrid_has_an_operator_for_each_layer(tmp_path: pathlib.Path) -> None:
    assert "fused 2 of 2 layers: LinearAttention, Attention" in said("export_a_hybrid", tmp_path)
