"""What all parts of one graph share: its lengths, and positions of queries and keys."""

from __future__ import annotations

from tests.fuzz.recipe import Recipe
from tests.fuzz.writer import Operand, Writer

GROWING = frozenset(["concat", "concat_flat", "stacked", "transposed"])


def capacity(recipe: Recipe) -> int:
    """Keys of a cache of one length."""
    return max(9, recipe.window + 4)


class Frame:
    """Lengths as values of the graph, each computed once."""

    def __init__(self, g: Writer) -> None:
        self.g = g
        self.recipe = g.recipe
        self._found: dict[str, str] = {}
        self._spots: dict[str, tuple[str, int]] = {}
        self.shared: dict[object, str] = {}
        """Masks that layers share."""
        self.stored: dict[str, str] = {}
        """Keys of the layer at hand, (b, heads, t, size), before and after they are repeated."""

    def spot(self, dim: str, value: str, axis: int) -> None:
        """Says where a length can be read, unless that is known."""
        self._spots.setdefault(dim, (value, axis))

    def length(self, dim: str) -> Operand:
        """b, s, t or p, as a scalar; a number where it is static and written so."""
        if dim == "t" and self.recipe.cache.startswith("static"):
            return capacity(self.recipe)
        if self.g.is_static(dim) and self.recipe.reshapes == "literal":
            return self.g.sizes.of(dim)
        if dim not in self._found:
            self._found[dim] = self._length(dim)
        return self._found[dim]

    def _length(self, dim: str) -> str:
        if dim == "t" and self.recipe.cache in GROWING:
            return self.g.op("Add", self.length("p"), self.length("s"))
        if dim == "t" and not self.recipe.cross:
            value, axis = self._spots.get("t", self._spots["s"])
            return self.g.length(value, axis)
        value, axis = self._spots[dim]
        return self.g.length(value, axis)

    @property
    def first_row(self) -> Operand:
        """The position of the first query: the length of the past, or where a cache of one length is written."""
        if self.recipe.cache in GROWING:
            return self.length("p")
        if self.recipe.cache.startswith("static"):
            return self.g.op("Squeeze", self.g.feed("start", (1,), "start", "int64"))
        return 0

    @property
    def long(self) -> str:
        """The axis of keys."""
        return "t" if self.recipe.cross or self.recipe.cache != "none" else "s"

    @property
    def keys(self) -> str | int:
        """The axis of keys as inputs declare it."""
        return capacity(self.recipe) if self.recipe.cache.startswith("static") else self.long

    @property
    def new(self) -> str:
        """The axis of keys that are computed, not taken from a cache."""
        return "t" if self.recipe.cross else "s"
