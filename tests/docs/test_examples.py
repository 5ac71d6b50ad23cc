"""The examples of the documentation, run as they are; `make test-olive` runs the one for Olive, `make test-models` that for
transformers, and the tests of shared caches that for decoders."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.doc_examples import EXAMPLES, run

_WRITTEN = {
    "check_in_ci": {},
    "export_with_a_mask": {"model.onnx": 1},
    "list_unfused": {},
    "quickstart": {"model.onnx": 2},
    "after_dynamo_export": {"model.onnx": 1},
    "after_torchscript_export": {"exported.onnx": 0, "model.onnx": 1},
    "in_a_pass_manager": {"model.onnx": 2},
    "quantise_around_attention": {"quantised.onnx": 0, "model.onnx": 2},
    "train_on_pytorch": {},
    "with_onnx_runtime": {},
}
"""The models that each example writes, and how many fused attentions are in them."""
_SLOW = pytest.mark.exhaustive


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *_WRITTEN, "after_transformers_export", "as_an_olive_pass", "decode_with_a_shared_cache",
            "export_a_hybrid",
    }  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=_SLOW if "export" in name else ()) for name in _WRITTEN])
def test_it_does_what_it_says(name: str, tmp_path: pathlib.Path) -> None:
    assert run(name, tmp_path) == _WRITTEN[name]
