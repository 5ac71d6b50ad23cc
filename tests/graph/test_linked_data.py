"""Weights behind links, as model caches keep them: `snapshot/model.onnx_data -> ../blobs/abc`."""

from __future__ import annotations

import pathlib

import onnx
from onnx import external_data_helper

from onnx_attnfuse import optimize

BUNDLED = pathlib.Path(__file__).parents[2] / "models" / "bundled"


def test_constants_behind_links_are_read(tmp_path: pathlib.Path) -> None:
    """The mask's small constants lie in the data file too; the site is fused and verified all the same."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    model = onnx.load(BUNDLED / "gpt2__ts17__eager.onnx")
    external_data_helper.convert_model_to_external_data(model, location="weights", size_threshold=0)
    onnx.save(model, blobs / "model.onnx")
    for name in ("model.onnx", "weights"):
        (snapshot / name).symlink_to(blobs / name)

    result = optimize(snapshot / "model.onnx", verify="sites")
    result.save(snapshot / "fused.onnx")

    assert result.report.fused == result.report.candidates > 0
    assert all(site.verified is not None and site.verified.cases > 0 for site in result.report.sites)
    assert onnx.load(snapshot / "fused.onnx", load_external_data=False).graph.initializer
