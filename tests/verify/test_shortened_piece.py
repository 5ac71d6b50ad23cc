"""Pieces that are too large to be run are judged with shorter axes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.support.pairs import PADDED, PADDED_FUSED, PLAIN, PLAIN_FUSED, graph, judged

_FIXED = "{type}[2, 8192, 32] q, {type}[2, 8193, 32] k, {type}[2, 8193, 32] v"
_WITH_MASK = _FIXED + ", int64[2, 8193] mask"


@pytest.mark.parametrize(
    ("nodes", "inputs"), [(PLAIN + PLAIN_FUSED, _FIXED), (PADDED + PADDED_FUSED, _WITH_MASK)], ids=["plain", "padded"]
)
def test_what_is_equal_is_equal_with_shorter_axes(nodes: str, inputs: str) -> None:
    verdict = judged(graph(nodes, inputs=inputs))
    assert verdict.equal, verdict.detail
    assert "verified at a shorter length" in verdict.detail


@pytest.mark.parametrize(
    ("right", "wrong"), [("scale = 0.25", "scale = 0.5"), ("(q, k, v)", "(q, k, k)"), ("num_heads = 4", "num_heads = 2")]
)
def test_what_differs_is_not_called_equal(right: str, wrong: str) -> None:
    verdict = judged(graph(PLAIN + PLAIN_FUSED.replace(right, wrong), inputs=_FIXED))
    assert not verdict.equal
    assert "verified at a shorter length" in verdict.detail


@pytest.mark.parametrize(("bound", "equal"), [(300, True), (301, False)])
def test_an_axis_stays_longer_than_what_it_is_compared_with(bound: int, equal: bool) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    g (float[20000, 8192] x) => (float[20000, 8192] old, float[20000, 8192] new)
    <int64 zero = {{0}}, int64 one = {{1}}, int64 first = {{300}}, int64 second = {{{bound}}}, float none = {{0.0}}> {{
        shape = Shape<start = 1>(x) length = Squeeze(shape) index = Range(zero, length, one)
        near = Less(index, first) old = Where(near, x, none)
        near2 = Less(index, second) new = Where(near2, x, none)
    }}"""
    verdict = judged(ir.from_onnx_text(text), frontier=("x",))
    assert verdict.equal == equal, verdict.detail
    assert "verified at a shorter length" in verdict.detail


GRID = """
    grid = Reshape(q, split_grid)
    moved = Add(grid, cells)
    flat_grid = Reshape(moved, all_cells)
    split_grid = Constant<value_ints = [2, 128, 128, 32]>()
    all_cells = Constant<value_ints = [2, 16384, 32]>()
"""
"""Queries of a square of 128 by 128 cells, each with a number of its own."""
_SQUARE = "{type}[2, 16384, 32] q, {type}[2, 16384, 32] k, {type}[2, 16384, 32] v, {type}[128, 128, 1] cells"


@pytest.mark.parametrize(("scale", "equal"), [("0.25", True), ("0.26", False)])
def test_a_square_of_cells_is_shortened_by_its_sides(scale: str, equal: bool) -> None:
    fused = PLAIN_FUSED.replace("0.25", scale).replace("(q, k, v)", "(flat_grid, k, v)")
    nodes = GRID + PLAIN.replace("(q, split)", "(flat_grid, split)") + fused
    verdict = judged(graph(nodes, inputs=_SQUARE), frontier=("q", "k", "v", "cells"))
    assert verdict.equal == equal, verdict.detail
    assert "verified at a shorter length" in verdict.detail
