"""Axes as products of factors: what Reshape does to them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_attnfuse.attention.axes.factors import Axes, Factor, leaves, length, new_axes, refined, regroup
from onnx_attnfuse.graph.sizes import Dim, symbol

lengths = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes with the same number of elements and borders in common, as exporters' reshapes have."""
    before, after = [], []
    for size in draw(lengths):
        parts = draw(st.sampled_from([[size], *([outer, size // outer] for outer in range(1, size + 1) if size % outer == 0)]))
        split_before, split_after = draw(st.tuples(st.booleans(), st.booleans()))
        before += parts if split_before else [size]
        after += parts if split_after else [size]
    return before, after


def flat(axes: Axes) -> list[Factor]:
    return [leaf for axis in refined(axes) for leaf in axis]


@given(reshapes())
def test_regrouping_keeps_all_factors_in_order_and_gives_the_lengths_asked_for(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    axes = new_axes(before)
    found = regroup(axes, after)
    assert found is not None
    assert [length(axis) for axis in found] == after
    assert flat(found) == flat(axes)


@given(reshapes())
def test_regrouping_back_gives_the_axes_one_began_with(shapes: tuple[list[int], list[int]]) -> None:
    before, after = shapes
    axes = new_axes(before)
    there = regroup(axes, after)
    assert there is not None
    assert regroup(there, before) == refined(axes)


@given(lengths, lengths)
def test_shapes_of_different_size_have_no_regrouping(before: list[int], after: list[int]) -> None:
    if math.prod(before) != math.prod(after) and sum(size != 1 for size in after) > 1:
        found = regroup(new_axes(before), after)
        assert found is None or [length(axis) for axis in found] != after


def test_symbolic_axes_are_regrouped_from_both_ends() -> None:
    batch, seq = symbol("batch"), symbol("seq")
    axes = new_axes([batch, seq, 768])
    found = regroup(axes, [batch, seq, 12, 64])
    assert found is not None
    assert [length(axis) for axis in found] == [batch, seq, 12, 64]
    assert leaves(axes[2]) == (*found[2], *found[3])


def test_the_one_length_that_nothing_explains_takes_what_is_left() -> None:
    batch, unknown = symbol("batch"), symbol("unknown")
    axes = new_axes([batch, symbol("seq"), 8])
    found = regroup(axes, [batch, unknown, 8])
    assert found == axes
    assert regroup(new_axes([batch, symbol("seq"), 8]), [unknown, symbol("other"), 8]) is None


def test_axes_that_merge_across_a_border_are_not_told_apart() -> None:
    assert regroup(new_axes([symbol("a"), symbol("b")]), [symbol("b"), symbol("a")]) is None


def test_a_split_is_seen_by_everything_that_holds_the_factor() -> None:
    before: tuple[Axes, list[Dim]] = new_axes([6, 4]), [2, 3, 4]
    transposed = (before[0][1], before[0][0])
    assert regroup(before[0], before[1]) is not None
    assert [leaf.size for leaf in leaves(transposed[1])] == [2, 3]


def test_a_fixed_index_splits_into_the_indices_of_its_parts() -> None:
    outer, inner = Factor(6, position=4).split(2, 3)
    assert (outer.position, inner.position) == (1, 1)
    with pytest.raises(ValueError, match="known length"):
        Factor(6, position=4).split(2, symbol("n"))
