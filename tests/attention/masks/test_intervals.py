"""What a mask may come to: no operator that hands a number on makes an ordinary one of it."""

from __future__ import annotations

import math

import onnx.parser
import onnx_ir as ir
import pytest

from onnx_attnfuse.attention.masks.intervals import Bounds
from onnx_attnfuse.graph.facts import Facts

_LOWEST = -3.4028234663852886e38


def _bounds(steps: str, opset: int = 18) -> tuple[float, float]:
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (bool[b, s] seen, float[b, s] given, int64[b, 2] at) => (float y)
        <float none = {{0}}, float low = {{-3.4028234663852886e38}}, float thousand = {{-1000}}, float top = {{5}},
         int64[4] pads = {{0, 0, 0, 1}}, int64[1] last = {{-1}}>
        {{ mask = Where(seen, none, low)
           far = Where(seen, none, thousand)
           rows = Gather<axis = 1>(mask, last)
           {steps} }}"""
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    return Bounds(Facts(graph)).of(graph.outputs[0])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("y = Clip(mask, low, none)", (_LOWEST, 0)),
        ("y = Clip(mask, thousand, none)", (-1000, 0)),
        ("y = Clip(given, thousand, top)", (-1000, 5)),
        ("y = Clip(given, thousand)", (-1000, math.inf)),
        ("y = Clip(far, , thousand)", (-1000, -1000)),
        ("y = Clip(far)", (-1000, 0)),
        ("y = Pad(far, pads, low)", (_LOWEST, 0)),
        ("y = Pad(far, pads)", (-1000, 0)),
        ("y = ReduceMax(mask, last)", (_LOWEST, 0)),
        ("y = ReduceMin(far, last)", (-1000, 0)),
        ("y = ScatterND(far, at, thousand)", (-1000, 0)),
        ('y = ScatterND<reduction = "add">(far, at, thousand)', (-math.inf, math.inf)),
        ("y = Abs(far)", (0, 1000)),
        ("y = Log(top)", (math.log(5), math.log(5))),
        ("y = Log(far)", (-math.inf, math.inf)),
    ],
)
def test_what_goes_in_comes_out(steps: str, expected: tuple[float, float]) -> None:
    assert _bounds(steps) == expected


def test_attributes_of_older_opsets_say_the_same() -> None:
    assert _bounds("y = Clip<min = -1000.0, max = 0.0>(mask)", 10) == (-1000, 0)
    assert _bounds("y = Clip<max = 0.0>(mask)", 10) == (_LOWEST, 0)
    assert _bounds("y = Pad<pads = [0, 0, 0, 1], value = -5.0>(mask)", 10) == (_LOWEST, 0)
    assert _bounds("y = Pad<pads = [0, 0, 0, 1], value = -2000.0>(far)", 10) == (-2000, 0)
