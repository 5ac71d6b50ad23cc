"""The most positions of a decoder: the rows of a table that is read by position, and of no other table."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_attnfuse
from tests.support.decoders import decoder

_BY_POSITION = "line = Gather(rows_of, position_ids) sum = Add(y1, line) logits = MatMul(sum, head)"
_BY_SCORE = """four = Slice(y1, zeros, fours, last) count = Unsqueeze(one, zeros) best, chosen = TopK<axis=-1>(four, count)
   expert = Squeeze(chosen, last) line = Gather(rows_of, expert) sum = Add(y1, line) logits = MatMul(sum, head)"""
_BY_COUNT = """counted = CumSum(attention_mask, one) new = Shape<start=1>(input_ids) back = Neg(new)
   after = Slice(counted, back, large, last) line = Gather(rows_of, after) sum = Add(y1, line) logits = MatMul(sum, head)"""
_BY_TYPE = """size = Shape(input_ids) types = Expand(none, size) line = Gather(rows_of, types) sum = Add(y1, line)
   logits = MatMul(sum, head)"""
_BY_TYPE_OF_POSITION = """size = Shape(position_ids) entries = Slice(size, zeros, first) cells = Concat<axis=0>(entries, sixty)
   table_of_types = Expand(none, cells) types = GatherElements<axis=1>(table_of_types, position_ids) line = Gather(rows_of, types)
   sum = Add(y1, line) logits = MatMul(sum, head)"""
"""Types in a buffer of zeros that is read by position, as RoBERTa and ELECTRA have them."""
_BEHIND_TWO = "moved = Add(position_ids, two) line = Gather(rows_of, moved) sum = Add(y1, line) logits = MatMul(sum, head)"
_CLIPPED = "near = Min(position_ids, reach) line = Gather(rows_of, near) sum = Add(y1, line) logits = MatMul(sum, head)"
_BY_DISTANCE = """gaps = Sub(i, j) lines = Gather(rows_of, gaps) line = ReduceMean<keepdims=0>(lines, first) sum = Add(y1, line)
   logits = MatMul(sum, head)"""
_BY_TOKEN = "line = Gather(rows_of, input_ids) sum = Add(y1, line) logits = MatMul(sum, head)"


@pytest.mark.parametrize(
    ("end", "rows", "wanted"),
    [
        (_BY_POSITION, 40, 40),
        (_BY_COUNT, 40, 39),
        (_BEHIND_TWO, 40, 38),
        (_BY_TYPE_OF_POSITION, 2, 60),
        (_BY_SCORE, 4, None),
        (_BY_TYPE, 2, None),
        (_BY_TOKEN, 99, None),
        (_CLIPPED, 4, None),
        (_BY_DISTANCE, 40, None),
    ],
    ids=["position", "count", "behind two", "type of a position", "score", "type", "token", "clipped", "distance"],
)
def test_only_a_table_that_is_read_by_position_tells_how_many_there_are(end: str, rows: int, wanted: int | None) -> None:
    model = decoder(end=end)
    for name, array in {
        "rows_of": np.zeros((rows, 64), np.float32),
        "fours": np.array([4]),
        "none": np.array(0),
        "two": np.array(2),
        "sixty": np.array([60]),
        "large": np.array([99]),
    }.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result = onnx_attnfuse.optimize(model, ep="cpu", cache="shared", verify="none")
    assert result.report.decoder is not None, result.report.notes
    assert result.report.decoder.context_length == wanted
