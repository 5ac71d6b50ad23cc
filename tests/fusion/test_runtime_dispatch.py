"""Models with tests at run time: nodes stand behind what they read, as the standard asks."""

from __future__ import annotations

import pathlib

import onnx
import pytest

import onnx_attnfuse
from tests.support.bundled import BUNDLED, name_of


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_nodes_stand_behind_what_they_read(path: pathlib.Path) -> None:
    fused = onnx_attnfuse.optimize(onnx.load(path), verify="none", ep="cuda", arch="sm90", padding="guarded")
    before: set[str] = {value.name for value in (*fused.model.graph.input, *fused.model.graph.initializer)}
    for node in fused.model.graph.node:
        assert set(filter(None, node.input)) <= before, node.name
        before.update(node.output)
    assert fused._ir.clone().graph.num_nodes() == len(fused.model.graph.node)
