"""Parts of a value along an axis, however they are taken, and what is no such part."""

from __future__ import annotations

import onnx.parser
import pytest

from onnx_attnfuse.graph import io
from onnx_attnfuse.graph.rules.reading import read_part
from onnx_attnfuse.graph.scopes import scopes

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
model (float[b, 6] x, int64 run) => (float[b, n] y)
<int64 none = {{0}}, int64 next = {{1}}, int64 far = {{3}}, int64 two = {{2}}, int64 four = {{4}}, int64[1] first = {{0}},
 int64[1] second = {{1}}, int64[1] third = {{2}}, int64[1] last = {{6}}, int64[2] uneven = {{2, 4}}> {{ {nodes} }}"""


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("parts = SplitToSequence<axis = 1>(x, two) y = SequenceAt(parts, next)", (2, 4, 1)),
        ("parts = SplitToSequence<axis = -1>(x, uneven) y = SequenceAt(parts, next)", (2, 6, 1)),
        ("left, y = Split<axis = 1>(x, uneven)", (2, 6, 1)),
        ("y = Slice(x, second, last, second, third)", (1, 6, 2)),
        ("parts = SplitToSequence<axis = 1>(x, two) y = SequenceAt(parts, far)", None),
        ("parts = SplitToSequence<axis = 1>(x, two) y = SequenceAt(parts, run)", None),
        ("parts = SplitToSequence<axis = 1>(x, four) y = SequenceAt(parts, none)", None),
        ("parts = SplitToSequence<axis = 1, keepdims = 1>(x) y = SequenceAt(parts, none)", None),
    ],
    ids=["an entry", "an uneven one", "a Split", "steps", "beyond", "at run time", "a rest", "single columns"],
)
def test_a_part_has_a_start_a_stop_and_a_step(nodes: str, wanted: tuple[int, int, int] | None) -> None:
    loaded, _ = io.from_any(onnx.parser.parse_model(_TEXT.format(nodes=nodes)))
    (scope,) = scopes(loaded)
    found = read_part(scope.graph.outputs[0], scope.facts)
    assert (None if found is None else (found.start, found.stop, found.step)) == wanted
    assert found is None or (found.whole.name, found.axis) == ("x", 1)
