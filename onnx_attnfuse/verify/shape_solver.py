"""Numbers for symbolic sizes, such that lengths which have to agree do.

    for values in Equalities(facts.equalities).assignments(dims): ...

Operators that broadcast give equal lengths (`Facts.equalities`). A symbol that is alone takes the other side's
place; a number wins over a symbol; the rest (`total = past + seq`) is solved for one of its symbols after the others have
numbers. A length that would come out too small, as after strided convolutions, makes its symbols larger. The equalities are soft:
an assignment that breaks one is still offered, and the original decides whether it runs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.sizes import Atom, Dim, Size

_MAX_SOLVER_ROUNDS = 4
_MAX_TRIED_VALUES = 64
_MAX_LENGTH = 1 << 15
_MIN_TELLING_KEYS = 3
"""A softmax over fewer says little."""
_MOST_SYMBOLS = 64


@dataclasses.dataclass(frozen=True)
class Profile:
    """Numbers to take for symbols, in order."""

    batch: int
    others: tuple[int, ...]
    whole: bool = False
    """Whether rows of a length that nothing ties are as long as all else together, as a mask that is read element by element."""


_APART = (
    Profile(2, (5, 7, 12, 13, 15, 14, 16)),
    Profile(1, (7, 4, 11, 12, 13, 15, 14)),
    Profile(3, (1, 6, 7, 8, 9, 10, 11)),
)
PROFILES = (
    *_APART,
    *(dataclasses.replace(profile, whole=True) for profile in _APART),
    *(Profile(2, (number,)) for number in (4, 8, 16, 14, 12, 7, 2, 24, 32, 64, 1, 224)),
    Profile(1, (1,)),
)
"""Unequal ones first, all from the third at least the sum of the first two, as the length of a mask is; one row of queries among
them; these with masks that are long enough for all; then the same number throughout, for windows and patches that must divide."""


class Values(dict[str, int]):
    """Numbers by symbol; symbols that were found equal share one, any other symbol has a number that suits most."""

    def __init__(self, roots: Callable[[str], str], default: int) -> None:
        super().__init__()
        self.root = roots
        self._default = default

    def __missing__(self, name: str) -> int:
        return self.get(self.root(name), self._default)


class Equalities:
    """Pairs of lengths that have to agree, made ready to choose numbers under."""

    def __init__(self, pairs: Iterable[tuple[Dim, Dim]], is_fresh: Callable[[str], bool] = lambda name: False) -> None:
        """Reads the pairs; of symbols found equal, one that is not fresh represents all."""
        self._is_fresh = is_fresh
        self._parents: dict[str, str] = {}
        self._pins: dict[str, int] = {}
        compound: list[tuple[Dim, Dim]] = []
        for left, right in itertools.chain.from_iterable(itertools.starmap(_reduced, pairs)):
            one, other = sizes.lone_symbol(left), sizes.lone_symbol(right)
            if one is not None and other is not None:
                self._join(one, other)
            elif one is not None and isinstance(right, int):
                self._pins.setdefault(self.root(one), right)
            elif other is not None and isinstance(left, int):
                self._pins.setdefault(self.root(other), left)
            else:
                compound.append((left, right))
        self._compound = [
            (left, right, sorted({self.root(name) for name in sizes.symbols(left) | sizes.symbols(right)}))
            for left, right in compound
        ]

    @property
    def pins(self) -> dict[str, int]:
        """Numbers that symbols are equal to, by the symbol that represents them."""
        return dict(self._pins)

    def assignments(
        self, shapes: Sequence[Dims], profiles: Iterable[Profile] = PROFILES, empty: Iterable[str] = (), reach: int = 0
    ) -> Iterator[Values]:
        """Numbers for all symbols of `shapes`, one assignment per profile; 0 for those of `empty` in the second.

        With a `reach`, how far constants count positions, there is one more before the second, in which lengths are beyond it.
        """
        names = self._closure(shapes)
        nothing = dict.fromkeys(map(self.root, empty), 0)
        batches = {self.root(name) for shape in shapes if len(shape) > 1 and (name := sizes.lone_symbol(shape[0])) is not None}
        batches |= {name for name in names if "batch" in name}
        for index, profile in enumerate(profiles):
            if index == 1 and reach:
                far = Profile(1, tuple(number + reach for number in profile.others))
                yield self._solved(names, batches, far, shapes)
            if index == 1 and nothing:
                pins, self._pins = self._pins, self._pins | nothing
                yield self._solved(names, batches, profile, shapes)
                self._pins = pins
            yield self._solved(names, batches, profile, shapes)

    def _closure(self, shapes: Sequence[Dims]) -> list[str]:
        """The symbols of `shapes`, parts of longer lengths first, then those that equalities tie to them."""
        dims = sorted((dim for shape in shapes for dim in shape), key=lambda dim: sizes.lone_symbol(dim) is not None)
        names = {self.root(name): None for dim in dims for name in sorted(sizes.symbols(dim))}
        grown = True
        while grown and len(names) < _MOST_SYMBOLS:
            before = len(names)
            for _, _, tied in self._compound:
                if any(name in names for name in tied):
                    names.update(dict.fromkeys(tied))
            grown = len(names) > before
        return list(names)

    def _solved(self, names: Sequence[str], batches: set[str], profile: Profile, shapes: Sequence[Dims]) -> Values:
        values = Values(self.root, profile.others[0])
        count = 0
        for name in names:
            if name in self._pins:
                values[name] = self._pins[name]
            elif name in batches:
                values[name] = profile.batch
            else:
                values[name] = profile.others[count % len(profile.others)]
                count += 1
        repaired_names: set[str] = set()
        longer = [dim for shape in shapes for dim in shape if not isinstance(dim, int) and sizes.lone_symbol(dim) is None]
        enlarged = False
        for _ in range(_MAX_SOLVER_ROUNDS):
            repaired = [
                self._repair(*item, values, repaired_names) for item in self._compound if any(name in values for name in item[2])
            ]
            lifted = [self._lift(dim, values, profile.others[0]) for dim in longer]
            enlarged |= any(lifted)
            if not any(repaired) and not any(lifted):
                break
        if profile.whole:
            self._lengthen(names, batches, shapes, values)
        if enlarged:
            tied = {name for item in self._compound for name in item[2]} | {name for dim in longer for name in sizes.symbols(dim)}
            self._raise(set(names) - batches - tied, values)
        return values

    def _raise(self, free: set[str], values: Values) -> None:
        """Gives symbols that nothing ties the largest number of all: the mask of long inputs is as long as they are."""
        largest = max(values.values())
        values.update(dict.fromkeys(free - self._pins.keys(), largest))

    def _lengthen(self, names: Sequence[str], batches: set[str], shapes: Sequence[Dims], values: Values) -> None:
        """Makes rows of a length that nothing else has as long as all other lengths together."""
        counts = Counter(self.root(name) for shape in shapes for dim in shape for name in sizes.symbols(dim))
        tied = batches.union(self._pins, *(item[2] for item in self._compound))
        ends = [self.root(name) for shape in shapes if len(shape) == 2 and (name := sizes.lone_symbol(shape[-1])) is not None]
        rows = [name for name in ends if counts[name] == 1 and name not in tied]
        whole = sum(values[name] for name in names if name in counts.keys() - batches.union(rows))
        values.update({name: max(whole, values[name]) for name in rows})

    def _repair(self, left: Dim, right: Dim, names: list[str], values: Values, repaired_names: set[str]) -> bool:
        """Makes one equality hold by changing one symbol; whether it did."""

        def gap() -> int:
            return sizes.evaluate(left, values) - sizes.evaluate(right, values)

        fresh = [name for name in names if self._is_fresh(name)]
        if gap() == 0 or len(fresh) > 1:
            return False
        alone = [self.root(name) for name in (sizes.lone_symbol(left), sizes.lone_symbol(right)) if name is not None]
        for name in sorted(set(fresh or names) - repaired_names, key=lambda name: (name not in alone, name)):
            if name in self._pins or name not in values:
                continue
            before = values[name]
            if any(_closes(gap, values, name, number) for number in _candidates(gap, values, name)):
                repaired_names.add(name)
                return True
            values[name] = before
        return False

    def _lift(self, dim: Size, values: Values, wanted: int) -> bool:
        """Makes a length that came out below 1, or too small to tell much, `wanted` by enlarging one symbol; whether it did."""
        if sizes.evaluate(dim, values) >= min(wanted, _MIN_TELLING_KEYS):
            return False
        roots = {self.root(name) for name in sizes.symbols(dim)} - self._pins.keys()
        return any(_enlarged(dim, values, root, wanted) for root in sorted(roots, key=lambda root: (self._is_fresh(root), root)))

    def root(self, name: str) -> str:
        """The symbol that represents all equal to one."""
        while name in self._parents:
            name = self._parents[name]
        return name

    def _join(self, one: str, other: str) -> None:
        one, other = self.root(one), self.root(other)
        if one == other:
            return
        if self._is_fresh(one):
            one, other = other, one
        self._parents[other] = one
        if other in self._pins:
            self._pins.setdefault(one, self._pins.pop(other))


def _reduced(left: Dim, right: Dim) -> Iterator[tuple[Dim, Dim]]:
    """Pairs that agree where two lengths do: of each size that one may be the largest of, without common factors."""
    for one, other in itertools.product(sizes.alternatives(left), sizes.alternatives(right)):
        shared: Dim = 1
        if isinstance(one, Size) and isinstance(other, Size):
            shared = sizes.product([math.gcd(one.factor, other.factor), *_each(Counter(one.atoms) & Counter(other.atoms))])
        yield sizes.exact_quotient(one, shared) or one, sizes.exact_quotient(other, shared) or other


def _each(atoms: Counter[Atom]) -> Iterator[Dim]:
    return (Size(1, (atom,)) for atom in atoms.elements())


def _enlarged(dim: Dim, values: Values, name: str, wanted: int) -> bool:
    """Gives one symbol the smallest number that makes a length `wanted` or more; whether there is one within bounds."""
    low = high = before = values[name]
    while high < _MAX_LENGTH and sizes.evaluate(dim, values) < wanted:
        low, high = high, 2 * high
        values[name] = high
    if sizes.evaluate(dim, values) < wanted:
        values[name] = before
        return False
    while high - low > 1:
        middle = values[name] = (low + high) // 2
        low, high = (low, middle) if sizes.evaluate(dim, values) >= wanted else (middle, high)
    values[name] = high
    return True


def _closes(gap: Callable[[], int], values: Values, name: str, number: int) -> bool:
    values[name] = number
    return gap() == 0


def _candidates(gap: Callable[[], int], values: Values, name: str) -> Iterator[int]:
    """The number that solves the equality if it is linear in the symbol, or grows with it; then small ones."""

    def at(number: int) -> int:
        values[name] = number
        return gap()

    first = at(1)
    slope = at(2) - first
    if slope and first % slope == 0 and 1 - first // slope >= 1:
        yield 1 - first // slope
    lengths = [1 << bits for bits in range(_MAX_LENGTH.bit_length())]
    crossed = next((length for length in lengths if at(length) * first <= 0), None)
    if crossed is not None:
        yield bisect.bisect_left(range(crossed), True, lo=max(1, crossed // 2), key=lambda number: at(number) * first <= 0)
    if slope:
        yield from range(1, _MAX_TRIED_VALUES + 1)


def are_at_least(least: int, dims: Iterable[Dims], shapes: Iterable[Sequence[int]]) -> bool:
    """Whether chosen lengths are no less than a number; one that the model fixes may be 0, as an empty past has it."""
    pairs = itertools.chain.from_iterable(zip(*pair, strict=True) for pair in zip(dims, shapes, strict=True))
    return all(length >= least or length == dim for dim, length in pairs)
