"""Verification runs sizes beyond the constants that positions are compared with."""

from __future__ import annotations

import onnx
import pytest

import onnx_attnfuse
from onnx_attnfuse.graph.io import from_any
from onnx_attnfuse.verify.subgraph import reach_of

WINDOW = """<ir_version: 10, opset_import: ["" : 20]>
g (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v) => (float[b, 2, s, 8] y)
<int64 zero = {{0}}, int64 one = {{1}}, int64 back = {{{back}}}, int64[1] axis = {{1}}, float low = {{-3.4e38}},
 float none = {{0}}>
{{
    shape = Shape <start = 2, end = 3> (q)
    length = Squeeze (shape)
    keys = Range (zero, length, one)
    rows = Unsqueeze (keys, axis)
    since = Sub (rows, back)
    near = {op} (keys, since)
    mask = Where (near, none, low)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    qk = MatMul (q, kt)
    masked = Add (qk, mask)
    weights = Softmax (masked)
    y = MatMul (weights, v)
}}"""


def _model(back: int, op: str = "Greater") -> onnx.ModelProto:
    return onnx.parser.parse_model(WINDOW.format(back=back, op=op))


@pytest.mark.parametrize(("back", "reach"), [(3, 0), (127, 127), (4096, 0)])
def test_the_reach_is_that_of_a_window_unless_it_shows_anyway_or_never(back: int, reach: int) -> None:
    model, _ = from_any(_model(back))
    assert reach_of(model.graph) == reach


def test_numbers_that_lengths_are_divided_by_count() -> None:
    text = "g (int64[2] x) => (int64[2] y) <int64 strip = {70}> { y = Div (x, strip) }"
    model, _ = from_any(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'))
    assert reach_of(model.graph) == 70


def test_windows_that_differ_by_one_far_away_are_told_apart() -> None:
    assert not onnx_attnfuse.verify_models(_model(127), _model(126)).equal
    assert onnx_attnfuse.verify_models(_model(127), _model(127)).equal


def test_a_site_is_judged_beyond_its_window() -> None:
    result = onnx_attnfuse.optimize(_model(127), verify="sites")
    assert result.report.fused == 1
