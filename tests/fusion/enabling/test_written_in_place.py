"""Numbers that are added to a part of the scores in place are read as a bias, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import onnx_attnfuse
from tests.support.bundled import run

BY_AXES = """
    part = Slice(scores, one, end, rows, one)
    smaller = Slice(part, one, end, columns, one)
    added = Add(smaller, bias)
    part_turned = Transpose<perm = [3, 1, 2, 0]>(part)
    added_turned = Transpose<perm = [3, 1, 2, 0]>(added)
    columns_written = ScatterND(part_turned, behind_first_column, added_turned)
    columns_back = Transpose<perm = [2, 1, 3, 0]>(columns_written)
    scores_turned = Transpose<perm = [2, 1, 0, 3]>(scores)
    rows_written = ScatterND(scores_turned, behind_first_row, columns_back)
    masked = Transpose<perm = [2, 1, 0, 3]>(rows_written)"""
"""As dynamo writes `scores[:, :, 1:, 1:] += bias`: one ScatterND for each axis, at indices [[1], [2], ...]."""
AT_ONCE = """
    part = Slice(scores, ones, ends, both, ones)
    added = Add(part, bias)
    places = Concat<axis = -1>(entry, head, row, column)
    masked = ScatterND(scores, places, added)"""
"""As TorchScript does: one ScatterND at a table of the indices of all axes."""
TWICE = """
    queries = Slice(q, one, end, rows, one)
    positions = MatMul(queries, keys)
    addend = Unsqueeze(positions, last)
    other = Unsqueeze(bias, last)
    part = Slice(scores, ones, ends, both, ones)
    wide = Unsqueeze(part, last)
    once = Add(wide, addend)
    twice = Add(once, addend)
    added = Squeeze(twice, last)
    places = Concat<axis = -1>(entry, head, row, column)
    masked = ScatterND(scores, places, added)"""
"""Two sums of a view with more axes, as positions of rows and columns are added (MViT of timm)."""
_TEXT = """<ir_version: 8, opset_import: ["" : 17]>
attention (float[2, 2, 5, 4] q, float[2, 2, 6, 4] k, float[2, 2, 6, 4] v, float[{bias}] bias) => (float[2, 2, 5, 4] out)
<int64[1] one = {{1}}, int64[1] end = {{99}}, int64[1] rows = {{2}}, int64[1] columns = {{3}}, int64[2] both = {{2, 3}},
 int64[2] ones = {{1, 1}}, int64[2] ends = {{99, 99}}, int64 zero = {{0}}, int64 unit = {{1}}, int64 two = {{2}},
 int64 five = {{5}}, int64 six = {{6}}, int64[2] key_table = {{4, 5}},
 int64[5] table = {{2, 2, 4, 5, 1}}, int64[5] b = {{-1, 1, 1, 1, 1}},
 int64[5] n = {{1, -1, 1, 1, 1}}, int64[5] i = {{1, 1, -1, 1, 1}}, int64[5] j = {{1, 1, 1, -1, 1}}, int64[1] last = {{-1}}>
{{
    keys = ConstantOfShape<value = float[1] {{0.5}}>(key_table)
    kt = Transpose<perm = [0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    entries = Range(zero, two, unit)
    row_places = Range(unit, five, unit)
    column_places = Range(unit, six, unit)
    behind_first_row = Unsqueeze(row_places, last)
    behind_first_column = Unsqueeze(column_places, last)
    entry_alone = Reshape(entries, b) entry = Expand(entry_alone, table)
    head_alone = Reshape(entries, n) head = Expand(head_alone, table)
    row_alone = Reshape(row_places, i) row = Expand(row_alone, table)
    column_alone = Reshape(column_places, j) column = Expand(column_alone, table)
    none = Sub(one, one)
    five_keys = Unsqueeze(five, none)
    doubled = Add(scores, scores)
    column_before = Sub(column, unit)
    {written}
    weights = Softmax<axis = -1>(masked)
    out = MatMul(weights, v)
}}"""
NEAR_MISSES = {
    "of another part": BY_AXES.replace("Slice(part, one, end,", "Slice(part, none, five_keys,"),
    "of another tensor": AT_ONCE.replace("Slice(scores,", "Slice(doubled,"),
    "twice, where one may mask": TWICE.replace("Add(once, addend)", "Add(once, other)"),
    "multiplied": AT_ONCE.replace("Add(part, bias)", "Mul(part, bias)"),
    "written one column before": AT_ONCE.replace("row, column)", "row, column_before)"),
    "added to what is there": AT_ONCE.replace("ScatterND(", 'ScatterND<reduction = "add">('),
}


def optimized(written: str, bias: str = "1, 2, 4, 5") -> tuple[onnx.ModelProto, onnx_attnfuse.Result]:
    """A model with a way to write the bias, and what became of it, unverified."""
    model = onnx.parser.parse_model(_TEXT.format(written=written, bias=bias))
    return model, onnx_attnfuse.optimize(model, verify="none")


@pytest.mark.parametrize("written", [BY_AXES, AT_ONCE, TWICE], ids=["by axes", "at once", "twice"])
@pytest.mark.parametrize("bias", ["1, 2, 4, 5", "2, 1, 4, 1", "5"])
def test_a_part_with_something_added_is_a_sum_with_a_bias(written: str, bias: str) -> None:
    model, result = optimized(written, bias)
    assert result.report.fused == 1
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 2, 5, 4), "k": (2, 2, 6, 4), "v": (2, 2, 6, 4), "bias": tuple(map(int, bias.split(",")))}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(result.model, feeds)["out"], run(model, feeds)["out"], rtol=1e-5, atol=1e-6)


def test_a_part_that_is_written_back_as_it_is_changes_nothing() -> None:
    _, result = optimized(BY_AXES.replace("Add(smaller, bias)", "Identity(smaller)"))
    assert result.report.fused == 1


@pytest.mark.parametrize("written", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_stay(written: str) -> None:
    _, result = optimized(written)
    assert [site.reasons[0].code for site in result.report.sites] == ["unreadable-score-step"]
