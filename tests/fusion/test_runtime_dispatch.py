"""Models with tests at run time, which are written where they are asked for: nodes stand behind what they read."""

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


@pytest.mark.parametrize("path", BUNDLED, ids=name_of)
def test_nothing_is_tested_at_run_time_unless_that_is_asked_for(path: pathlib.Path) -> None:
    fused = onnx_attnfuse.optimize(onnx.load(path), verify="none", ep="cuda", arch="sm90")
    assert fused.report.fused
    assert "If" not in {node.op_type for node in fused.model.graph.node}
    assert fused.report.session is not None
    assert not fused.report.session.provider_options


def test_padding_is_tested_at_run_time_where_that_is_asked_for() -> None:
    path = next(path for path in BUNDLED if name_of(path) == "bert__dyn18__sdpa")
    fused = onnx_attnfuse.optimize(onnx.load(path), verify="none", ep="cuda", arch="sm90", padding="guarded")
    assert [node.op_type for node in fused.model.graph.node].count("If") > 1
    assert fused.report.session is not None
    assert fused.report.session.lines() == [
        "CUDAExecutionProvider use_ep_level_unified_stream=1 (the branches of If share one stream, and its memory)"
    ]
