"""Axes as ordered products of factors: the arithmetic under every layout.

`x[b, s, n·h]` has three axes; the last is a product of two factors. Reshape regroups factors, Transpose permutes axes, Expand
adds a factor that the source lacks, a slice of a packed axis fixes one. Factors are compared by identity: two axes share a
factor if they run over the same index.

A factor that turns out to be a product itself is split in place, and everything that holds it sees the parts: so a view read late
refines what was read before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.sizes import Dim

Axis = tuple["Factor", ...]
"""The factors of one axis, outermost first; none for an axis of length 1."""
Axes = tuple[Axis, ...]


class Factor:
    """One index that a tensor runs over."""

    __slots__ = ("_parts", "position", "serial", "size")
    _count = itertools.count()

    def __init__(self, size: Dim, position: int | None = None) -> None:
        self.size = size
        self.position = position
        """The fixed index, if there is one: the part of a packed axis that is taken."""
        self.serial = next(Factor._count)
        """Order of creation, for sorting."""
        self._parts: tuple[Factor, Factor] | None = None

    def split(self, outer: Dim, inner: Dim) -> tuple[Factor, Factor]:
        """Makes this factor the product of two new ones."""
        if self.position is None:
            self._parts = Factor(outer), Factor(inner)
        elif isinstance(inner, int):
            self._parts = Factor(outer, self.position // inner), Factor(inner, self.position % inner)
        else:
            raise ValueError("a fixed index splits at a known length only")
        return self._parts

    @property
    def is_split(self) -> bool:
        """Whether the factor is a product of others by now."""
        return self._parts is not None

    def leaves(self) -> Iterable[Factor]:
        """The factor itself, or the factors that it was split into."""
        if self._parts is None:
            yield self
        else:
            for part in self._parts:
                yield from part.leaves()


def leaves(axis: Iterable[Factor]) -> Axis:
    """The axis in terms of factors that are not split (yet)."""
    factors = tuple(axis)
    for factor in factors:
        if factor.is_split:
            return tuple(leaf for factor in factors for leaf in factor.leaves())
    return factors


def refined(axes: Iterable[Iterable[Factor]]) -> Axes:
    """All axes in terms of factors that are not split (yet)."""
    return tuple(map(leaves, axes))


def replaced(axes: Axes, index: int, axis: Axis) -> Axes:
    """The axes with another in one place."""
    return (*axes[:index], axis, *axes[index + 1 :])


def length(axis: Iterable[Factor]) -> Dim:
    """The number of positions along the axis."""
    return sizes.product(factor.size for factor in leaves(axis))


def count_of(axis: Iterable[Factor]) -> int:
    """The number of positions along an axis of heads or channels, which is known."""
    count = length(axis)
    assert isinstance(count, int)
    return count


def new_axes(dims: Sequence[Dim]) -> Axes:
    """One new factor for every axis that is not of length 1."""
    return tuple(() if dim == 1 else (Factor(dim),) for dim in dims)


def regroup(axes: Iterable[Axis], dims: Sequence[Dim]) -> Axes | None:
    """Distributes the factors of `axes` over axes of lengths `dims`, as Reshape does; splits factors where it must.

    Works inwards from both ends; an axis whose length no arithmetic explains takes the rest if it is the only one.

    Returns:
        The new axes, or None if the lengths do not tell where the borders are.
    """
    rest = [leaf for axis in axes for leaf in leaves(axis)]
    front, wanted = _take(rest, list(dims), outermost_first=True)
    back, wanted = _take(rest, wanted, outermost_first=False)
    middle: list[Axis] = []
    if wanted:
        unexplained = [index for index, dim in enumerate(wanted) if dim != 1]
        if len(unexplained) != 1:
            return None
        middle = [tuple(rest) if index == unexplained[0] else () for index in range(len(wanted))]
    elif rest:
        return None
    return (*front, *middle, *reversed(back))


def _take(rest: list[Factor], dims: list[Dim], outermost_first: bool) -> tuple[list[Axis], list[Dim]]:
    """Takes axes off one end of `rest` while lengths explain them; returns them and the lengths that remain."""
    taken: list[Axis] = []
    dims = dims if outermost_first else dims[::-1]
    for count, dim in enumerate(dims):
        axis = _take_one(rest, dim, outermost_first)
        if axis is None:
            remaining = dims[count:]
            return taken, remaining if outermost_first else remaining[::-1]
        taken.append(axis)
    return taken, []


def _take_one(rest: list[Factor], dim: Dim, outermost_first: bool) -> Axis | None:
    trial = list(rest)
    axis: list[Factor] = []
    missing = dim
    while missing != 1:
        if not trial:
            return None
        leaf = trial.pop(0 if outermost_first else -1)
        quotient = sizes.exact_quotient(missing, leaf.size)
        if quotient is None:
            quotient = _split_off(trial, leaf, missing, outermost_first)
            if quotient is None:
                return None
            leaf = quotient
            missing = 1
        else:
            missing = quotient
        axis.append(leaf)
    rest[:] = trial
    return tuple(axis if outermost_first else axis[::-1])


def _split_off(trial: list[Factor], leaf: Factor, size: Dim, outermost_first: bool) -> Factor | None:
    """Splits `size` off one end of `leaf`, puts the rest back, and returns the part; None if it does not divide."""
    other = sizes.exact_quotient(leaf.size, size)
    if other is None or (leaf.position is not None and not isinstance(other if outermost_first else size, int)):
        return None
    if outermost_first:
        part, remainder = leaf.split(size, other)
        trial.insert(0, remainder)
    else:
        remainder, part = leaf.split(other, size)
        trial.append(remainder)
    return part


def named(letters: str, axes: Iterable[Axis]) -> dict[Factor, str]:
    """A letter for each axis, numbered where the axis is several factors."""
    names: dict[Factor, str] = {}
    for letter, axis in zip(letters, axes, strict=True):
        parts = leaves(axis)
        for count, part in enumerate(parts, 1):
            names[part] = letter if len(parts) == 1 else f"{letter}{count}"
    return names
