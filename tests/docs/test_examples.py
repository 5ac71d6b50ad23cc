"""The examples of the documentation, run as they are; `make test-olive` runs the one for Olive, `make test-models` that for
transformers, and the tests of shared caches that for decoders."""

from __future__ import annotations

import ast
import json
import pathlib
from typing import Any

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


@_SLOW
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:# The axis name:UserWarning")  # torch, of itself
def test_the_notebook_runs_cell_by_cell(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for lines that install; the last expression of a cell is shown, as Jupyter does."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {}
    shown: list[Any] = []
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or not cell["outputs"]
        lines = [line for line in cell["source"] if not line.startswith("%")]
        if cell["cell_type"] == "code" and lines:
            tree = ast.parse("".join(lines))
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            shown += [eval(compile(last, "cell", "eval"), names)] if last else []
    result, difference = (value for value in shown if value is not None)
    assert result.report.fused == result.report.candidates == 1
    assert "<table>" in result._repr_html_()
    assert difference.startswith("largest difference ")
