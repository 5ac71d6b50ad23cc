"""Rotary position embedding, read by its result, whatever nodes compute it.

    found = read_rotary(indexed, channels, facts)      # the value that is rotated, and its angles

    result[first]  = cos · x[first]  - sin · x[second]
    result[second] = cos · x[second] + sin · x[first]

The result is executed (`channel_terms`) from some value above it; the nearest in which it is this rotation of pairs is the one.
Both channels of a pair must have the same cosine and the same sine, each of which is one term; nothing is asked of cos² + sin².
A rotation of some rows only, or of pairs in another order, is none.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Axes, Axis, Factor, leaves, length, refined, replaced
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.mask_terms import Name, size, value_of
from onnx_attnfuse.attention.match.channel_terms import ChannelExecution, Layout, is_pair, pair_of, step_of
from onnx_attnfuse.attention.spec import Rotary, Table
from onnx_attnfuse.certify import arithmetic
from onnx_attnfuse.certify.arrays import Unsupported
from onnx_attnfuse.certify.execution import UNKNOWN
from onnx_attnfuse.certify.interned import aside
from onnx_attnfuse.certify.terms import ONE, ZERO, Term, add, free, index, multiply, number, polynomial, subtract
from onnx_attnfuse.graph.constants import attribute, is_constant, is_standard
from onnx_attnfuse.graph.dtypes import FLOATS_TO_32
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CASTS, REARRANGES, REPEATS, SLICES
from onnx_attnfuse.graph.sizes import Dim

_MAX_REGION_VALUES = 96
"""Values looked at."""
_SUMS = frozenset(["Add", "Sub"])
_OF_ALL = _SUMS | {"Concat", "Mul"}
_OF_FIRST = REARRANGES | REPEATS | SLICES | CASTS | {"Gather", "Neg", "RotaryEmbedding"}
_CUTS = SLICES | {"Concat", "Gather"}
_MOVES = REARRANGES | REPEATS | CASTS | _CUTS
_Region = dict[ir.Value, list[ir.Value]]
"""Values above an operand, nearest first, each with those it may be a linear form of."""
_Place = tuple[Term, ...]
_Factor = tuple[int, Term]
_Forms = dict[_Place, _Factor]
"""Elements by their places, each with its sign and its factor."""


def read_rotary(indexed: IndexedValue, channels: Axis, facts: Facts) -> tuple[IndexedValue, Rotary] | None:
    """The value that `indexed` is a rotation of, laid out in the same factors, and the rotation; None if it is none.

    Args:
        indexed: A value and its axes.
        channels: The channels of a head.
        facts: Shapes and types.
    """
    size = length(channels)
    if not isinstance(size, int) or any(leaf.position is not None for leaf in leaves(channels)):
        return None
    if not _may_be_one(indexed, channels, facts):
        return None
    region = _region_above(indexed.value)
    for root in _candidates(region):
        inside = _below(root, region)
        if not all(_is_linear(value, inside) for value in inside if value is not root):
            continue
        try:
            with aside():
                base, rotary = _Rotated(indexed, channels, size, root, inside, facts).read()
        except UNKNOWN:
            continue
        if _is_repeated(base, rotary, facts):
            return None
        nodes = dict.fromkeys(value.producer() for value in region if value in inside and value is not root)
        return base, dataclasses.replace(rotary, nodes=tuple(node for node in nodes if node is not None))
    return None


def _region_above(start: ir.Value) -> _Region:
    """The values that `start` may be a linear form of, and those between."""
    found: _Region = {start: []}
    pending = [start]
    for value in pending:
        node = value.producer()
        if not is_standard(node) or len(found) > _MAX_REGION_VALUES:
            continue
        sources = node.inputs if node.op_type in _OF_ALL else node.inputs[:1] if node.op_type in _OF_FIRST else ()
        found[value] = [source for source in sources if source is not None and not is_constant(source)]
        fresh = [source for source in dict.fromkeys(found[value]) if source not in found]
        found.update((source, []) for source in fresh)
        pending += fresh
    return found


def _candidates(region: _Region) -> Iterator[ir.Value]:
    """Values that are used more than once, or rotated by an operator, nearest first, each with those that it is a view of."""
    uses = Counter(source for sources in region.values() for source in sources)
    turned = {sources[0] for value, sources in region.items() if sources and is_standard(value.producer(), "RotaryEmbedding")}
    for value in region:
        if uses[value] < 2 and value not in turned:
            continue
        yield value
        above = value
        while is_standard(above.producer(), *REARRANGES) and region[above]:
            (above,) = region[above]
            yield above


def _below(root: ir.Value, region: _Region) -> set[ir.Value]:
    """The values that are computed from `root`, itself among them."""
    found = {root}
    while fresh := {value for value, sources in region.items() if value not in found and not found.isdisjoint(sources)}:
        found |= fresh
    return found


def _is_linear(value: ir.Value, inside: set[ir.Value]) -> bool:
    """Whether a sum is one of values inside, and a product one of such a value with another."""
    node = value.producer()
    count = 0 if node is None else sum(item in inside for item in node.inputs)
    return count == {"Add": 2, "Sub": 2, "Mul": 1}.get(node.op_type if node is not None else "", count)


def _is_repeated(base: IndexedValue, rotary: Rotary, facts: Facts) -> bool:
    """Whether a table may be longer than the rotated value, which the source then repeats."""
    lengths = {axis: dim for dim, axis in zip(facts.dims(base.value) or (), refined(base.axes), strict=False)}
    for table in (rotary.cos, rotary.sin):
        for dim, axis in zip(facts.dims(table.indexed.value) or (), refined(table.indexed.axes), strict=False):
            if axis and axis in lengths and facts.may_exceed(lengths[axis], dim):
                return True
    return False


def _may_be_one(indexed: IndexedValue, channels: Axis, facts: Facts) -> bool:
    """Whether the last operator leaves a chance, which that of most operands does not."""
    node = indexed.value.producer()
    if not is_standard(node) or facts.dtype(indexed.value) not in FLOATS_TO_32:
        return False
    if node.op_type == "Concat":
        axis: int = attribute(node, "axis", 0)
        return not set(leaves(channels)).isdisjoint(leaves(indexed.axes[axis]))
    return node.op_type in {"Cast", "RotaryEmbedding"} or (node.op_type in _SUMS and not any(map(is_constant, node.inputs)))


class _Rotated:
    """A value as a rotation of another.

    Its methods raise one of `UNKNOWN` where it is none.
    """

    def __init__(
        self, indexed: IndexedValue, channels: Axis, size: int, root: ir.Value, inside: set[ir.Value], facts: Facts
    ) -> None:
        self._indexed, self._channels, self._size, self._root, self._facts = indexed, leaves(channels), size, root, facts
        if any(facts.dtype(value) not in FLOATS_TO_32 for value in inside):
            raise Unsupported("channels in other types")
        self._others = [leaf for axis in refined(indexed.axes) for leaf in axis if leaf not in self._channels]
        self._lengths = frozenset[Dim](leaf.size for leaf in (*self._others, *self._channels))
        self._run = ChannelExecution(facts, self._lengths, inside - {root})
        self._layout = Layout(self._run, self._others)
        self._array = self._run.array(indexed.value)
        self._name = self._run.name(root)
        self._base: _Place = ()
        self._axis = 0

    def read(self) -> tuple[IndexedValue, Rotary]:
        """The value that is rotated, and the rotation."""
        gap = self._begin(self._forms(ZERO))
        width = 2 * gap if gap > 1 else 2 * self._pairs()
        interleaved, half, rest = gap == 1 and width > 2, width // 2, pair_of(self._size - width)
        pair = pair_of(half)
        first = multiply(number(2), pair) if interleaved else pair
        second = add(first, number(gap))
        if width > self._size:
            raise Unsupported("no pairs of channels")
        one, two = self._forms(first), self._forms(second)
        cos, sin, own, other = (form[self._at(item)] for form, item in ((one, first), (one, second), (two, second), (two, first)))
        if len(one) != 2 or len(two) != 2 or not self._same(cos, own, 1) or not self._same(sin, other, -1):
            raise Unsupported("other angles")
        kept = add(number(width), rest)
        if width < self._size and self._forms(kept) != {self._at(kept): (1, ONE)}:
            raise Unsupported("channels that do not stay")
        tables = self._table(cos[1], cos[0], half), self._table(sin[1], -sin[0], half)
        return self._rotated(), Rotary(*tables, self._channels, width, interleaved)

    def _forms(self, channel: Term) -> _Forms:
        """A channel as a sum of elements of the root, by their places, each with a sign and a factor besides."""
        terms, rest = dict(self._layout.terms), channel
        for leaf in reversed(self._channels):
            terms[leaf] = rest if leaf is self._channels[0] else arithmetic.modulo(rest, size(leaf.size))
            rest = arithmetic.divide(rest, size(leaf.size))
        term = self._array.at(*(self._layout.at(axis, terms) for axis in refined(self._indexed.axes)))
        found: _Forms = {}
        for atoms, factor in polynomial(term).items():
            own = [atom for atom in atoms if atom.op == "element" and atom.data == self._name]
            others = [atom for atom in atoms if atom not in own]
            if len(own) != 1 or len(others) > 1 or abs(factor) != 1 or own[0].args in found:
                raise Unsupported("no rotation")
            found[own[0].args] = int(factor), others[0] if others else ONE
        return found

    def _begin(self, forms: _Forms) -> int:
        """Takes down where the first channel lies; how far its partner is from there."""
        (one, other) = forms
        (self._axis,) = [axis for axis, pair in enumerate(zip(one, other, strict=True)) if pair[0] is not pair[1]]
        gap = subtract(other[self._axis], one[self._axis])
        if gap.op != "const":
            raise Unsupported("partners at a distance that varies")
        self._base = one if gap.data > 0 else other
        return abs(int(gap.data))

    def _at(self, channel: Term) -> _Place:
        """The place of a channel in the root."""
        return tuple(add(item, channel) if axis == self._axis else item for axis, item in enumerate(self._base))

    def _pairs(self) -> int:
        """How many pairs of channels side by side are rotated."""
        others = range(1, self._size // 2)
        return 1 + bisect.bisect_left(others, True, key=lambda pair: len(self._forms(number(2 * pair))) != 2)

    def _same(self, one: _Factor, other: _Factor, sign: int) -> bool:
        """Whether two factors are the same floats, but for a sign."""
        runs = self._facts.once("channels", dict[frozenset[Dim], ChannelExecution])
        run = runs.setdefault(self._lengths, ChannelExecution(self._facts, self._lengths))
        first, second = (multiply(number(own, "Real"), run.array(value_of(term)).at(*term.args)) for own, term in (one, other))
        return first is multiply(number(sign, "Real"), second)

    def _rotated(self) -> IndexedValue:
        """The root, in the factors of the result."""
        channel = index("channel", number(self._size))
        self._layout.name(channel, self._channels)
        axes = self._axes(self._at(channel), self._facts.dims(self._root), may_repeat=False)
        kept = {leaf for axis in axes or () for leaf in axis if leaf.position is None}
        if axes is None or kept != {*self._channels, *(leaf for leaf in self._others if leaf.position is None)}:
            raise Unsupported("another layout")
        return IndexedValue(self._root, axes)

    def _axes(self, place: _Place, dims: Dims | None, *, may_repeat: bool) -> Axes | None:
        """The factors of a place in a value; None if it is not made of them."""
        found: list[Axis] = []
        with contextlib.suppress(ValueError, TypeError):
            for item, dim in zip(place, dims or (), strict=True):
                found += [self._layout.axis(item, dim, may_repeat=may_repeat)]
        factors = [leaf for axis in found for leaf in axis]
        return tuple(found) if len(found) == len(place) and len(set(factors)) == len(factors) else None

    def _table(self, term: Term, sign: int, pairs: int) -> Table:
        """A factor as columns of a value, as far up as they can be had, so that all layers share it."""
        best: Table | None = None
        above: tuple[ir.Value, _Place] | None = value_of(term), term.args
        while above is not None:
            found = self._columns(*above, pairs)
            if found is not None and (best is None or found.axis == len(found.indexed.axes) - 1):
                best = found
            above = self._moved(*above)
        if best is None:
            raise Unsupported("no table")
        return dataclasses.replace(best, negative=sign < 0)

    def _moved(self, value: ir.Value, place: _Place) -> tuple[ir.Value, _Place] | None:
        """The element that the node of a value takes from one of its inputs; None where it does more than that."""
        node, facts = value.producer(), self._facts
        source = None if node is None or not node.inputs else node.inputs[0]
        if not is_standard(node, *_MOVES) or source is None or is_constant(value):
            return None
        if (node.op_type == "Gather" and not is_constant(node.inputs[1])) or facts.dtype(source) != facts.dtype(value):
            return None
        known, key = facts.once("moved", dict[tuple[ir.Value, _Place, frozenset[Dim]], Term]), (value, place, self._lengths)
        if key not in known:
            known[key] = ChannelExecution(facts, self._lengths, {value}, reads_floats=False).array(value).at(*place)
        term = known[key]
        above = term.data.of if term.op == "element" and isinstance(term.data, Name) else None
        if not isinstance(above, ir.Value) or above is value:
            return None
        is_cut = (
            node.op_type in _CUTS and not self._lengths_of(above, term.args).items() <= self._lengths_of(value, place).items()
        )
        return None if is_cut else (above, term.args)

    def _lengths_of(self, value: ir.Value, place: _Place) -> dict[Term, Dim]:
        """The lengths of a value's axes that other indices than that of a pair run over."""
        items = zip(place, self._facts.dims(value) or (), strict=True)
        return {item: dim for item, dim in items if free(item) and not any(map(is_pair, free(item)))}

    def _columns(self, value: ir.Value, place: _Place, pairs: int) -> Table | None:
        """Pairs that are columns at equal distances."""
        dims = self._facts.dims(value)
        if dims is None or self._facts.dtype(value) not in FLOATS_TO_32:
            return None
        held = [axis for axis, item in enumerate(place) if any(map(is_pair, free(item)))]
        if not held and pairs == 1:
            held = [axis for axis, item in enumerate(place) if item.op == "const"][-1:]
        if len(held) != 1:
            return None
        (axis,) = held
        size, step = dims[axis], step_of(place[axis]) if pairs > 1 else (ZERO, 1, int(place[axis].data))
        others = tuple(ZERO if at == axis else item for at, item in enumerate(place))
        axes = self._axes(others, (*dims[:axis], 1, *dims[axis + 1 :]), may_repeat=True)
        if not isinstance(size, int) or axes is None or step is None or step[1] < 1:
            return None
        return Table(IndexedValue(value, replaced(axes, axis, (Factor(size),))), axis, step[2], step[1])
