"""Symbolic sizes: the terms of an axis length.

A dimension is an `int` or a `Size`, a monomial `coefficient · atom · atom · …`. An atom is a symbol (`batch`), a sum
(`past + seq`), a quotient that does not come out even (`(h // 4)`), or the larger or smaller of two sizes. The normal form is
unique enough that equal lengths compare equal whichever arithmetic an exporter wrote, and products divide, which is
all that Reshape needs.

Sizes of axes are never negative; a `Size` that is a difference may be, so nothing here assumes a sign.
"""

from __future__ import annotations

import ast
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Union

Dim = Union[int, "Size"]
"""The length of an axis."""


class Atom:
    """An indivisible part of a `Size`; atoms are equal when their keys are."""

    __slots__ = ("evaluate", "key", "parts")

    def __init__(self, key: str, parts: tuple[Dim, ...], evaluate: Callable[[list[int]], int] | None) -> None:
        self.key = key
        self.parts = parts
        """The sizes it is computed from; empty for a symbol."""
        self.evaluate = evaluate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __lt__(self, other: Atom) -> bool:
        return self.key < other.key

    def __str__(self) -> str:
        return self.key


class Size:
    """A product of an integer and atoms; build with `symbol` and arithmetic, never directly."""

    __slots__ = ("_hash", "atoms", "factor")

    def __init__(self, factor: int, atoms: tuple[Atom, ...]) -> None:
        self.factor = factor
        self.atoms = atoms
        self._hash = hash((factor, atoms))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self._hash == other._hash and self.factor == other.factor and self.atoms == other.atoms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        names = [atom.key for atom in self.atoms]
        return "*".join(names if self.factor == 1 else [str(self.factor), *names])

    __repr__ = __str__

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return _monomial(self.factor * other, self.atoms)
        return _monomial(self.factor * other.factor, tuple(sorted(self.atoms + other.atoms)))

    __rmul__ = __mul__

    def __add__(self, other: Dim) -> Dim:
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return add(self, other * -1)

    def __rsub__(self, other: Dim) -> Dim:
        return add(other, self * -1)


def _monomial(factor: int, atoms: tuple[Atom, ...]) -> Dim:
    return Size(factor, atoms) if atoms and factor else factor


@functools.cache
def symbol(name: str) -> Size:
    """The size called `name`."""
    return Size(1, (Atom(name, (), None),))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of all `dims`; 1 for none."""
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def _terms(dim: Dim) -> dict[tuple[Atom, ...], int]:
    """`dim` as a polynomial, sums opened."""
    if isinstance(dim, int):
        return {(): dim} if dim else {}
    if len(dim.atoms) == 1 and dim.atoms[0].evaluate is sum:
        inner: Counter[tuple[Atom, ...]] = Counter()
        for part in dim.atoms[0].parts:
            for atoms, factor in _terms(part).items():
                inner[atoms] += factor * dim.factor
        return dict(inner)
    return {dim.atoms: dim.factor}


def add(left: Dim, right: Dim) -> Dim:
    """The sum, with common factors of all terms taken out, also a sign: `b·p + b·s` is `b·(s + p)`, `1 - s` is `-1·(s + -1)`."""
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    terms = Counter(_terms(left))
    for atoms, factor in _terms(right).items():
        terms[atoms] += factor
    kept = {atoms: factor for atoms, factor in terms.items() if factor}
    if len(kept) <= 1:
        return next((_monomial(factor, atoms) for atoms, factor in kept.items()), 0)
    shared = functools.reduce(lambda a, b: a & b, (Counter(atoms) for atoms in kept))
    common = tuple(sorted(shared.elements()))
    if common:
        inner = (_monomial(factor, _without(atoms, common)) for atoms, factor in kept.items())
        return _monomial(1, common) * functools.reduce(add, inner)
    ordered = sorted(kept.items(), reverse=True)
    factor = math.gcd(*kept.values()) * (1 if ordered[0][1] > 0 else -1)
    parts = [_monomial(coefficient // factor, atoms) for atoms, coefficient in ordered]
    total = Atom("(" + " + ".join(map(str, parts)) + ")", tuple(parts), sum)
    return Size(factor, (total,))


def least(dim: Dim, empty: Set[str] = frozenset()) -> float:
    """A lower bound of a size, every symbol being at least 1, or 0 if it is one of `empty`; -inf if none is known."""
    if isinstance(dim, int):
        return dim
    if len(dim.atoms) == 1 and dim.factor > 0 and dim.atoms[0].evaluate is sum:
        return dim.factor * sum(least(part, empty) for part in dim.atoms[0].parts)
    lows = [_least_atom(atom, empty) for atom in dim.atoms]
    return -math.inf if dim.factor < 0 or min(lows) < 0 else dim.factor * math.prod(lows)


def _least_atom(atom: Atom, empty: Set[str]) -> float:
    if atom.evaluate is None:
        return 0.0 if atom.key in empty else 1.0
    return sum(least(part, empty) for part in atom.parts) if atom.evaluate is sum else -math.inf


def summands(dim: Dim) -> list[Dim]:
    """The terms whose sum `dim` is; none for 0."""
    return [_monomial(factor, atoms) for atoms, factor in _terms(dim).items()]


def _without(atoms: tuple[Atom, ...], taken: tuple[Atom, ...]) -> tuple[Atom, ...]:
    rest = Counter(atoms)
    rest.subtract(taken)
    return tuple(sorted(rest.elements()))


def exact_quotient(dim: Dim, divisor: Dim) -> Dim | None:
    """`dim / divisor` where it is a whole size whatever the symbols are, else None."""
    if isinstance(divisor, int):
        if divisor == 0:
            return None
        if isinstance(dim, int):
            return dim // divisor if dim % divisor == 0 else None
        return _monomial(dim.factor // divisor, dim.atoms) if dim.factor % divisor == 0 else None
    if isinstance(dim, int):
        return 0 if dim == 0 else None
    if Counter(divisor.atoms) - Counter(dim.atoms) or dim.factor % divisor.factor:
        return None
    return _monomial(dim.factor // divisor.factor, _without(dim.atoms, divisor.atoms))


def floor_quotient(dim: Dim, divisor: Dim) -> Dim:
    """`dim // divisor`, as an atom where it does not come out even; the summands that do stand beside it."""
    exact = exact_quotient(dim, divisor)
    if exact is not None:
        return exact
    if isinstance(divisor, int):
        if isinstance(dim, int) or not divisor:
            return dim // divisor if divisor and isinstance(dim, int) else 0
        whole = sum((part for item in summands(dim) if (part := exact_quotient(item, divisor)) is not None), 0)
        if whole != 0:
            return whole + floor_quotient(dim - whole * divisor, divisor)
    return _function(f"({dim} // {divisor})", (dim, divisor), lambda v: v[0] // v[1] if v[1] else 0)


def maximum(left: Dim, right: Dim) -> Dim:
    """The larger of two sizes; the same size in whatever order several are compared."""
    kept: list[Dim] = []
    for dim in (*alternatives(left), *alternatives(right)):
        if not any(_is_at_least(other, dim) for other in kept):
            kept = [*(other for other in kept if not _is_at_least(dim, other)), dim]
    return _largest(kept)


def broadcast(dims: Iterable[Dim]) -> Dim:
    """The length that several come to where each is that or 1: a number if there is one, the only symbol, else the largest.

    It is exact as long as none of them is 0.
    """
    flat: dict[Dim, None] = {}
    for dim in dims:
        parts = alternatives(dim)
        flat.update(dict.fromkeys((dim,) if any(isinstance(part, int) for part in parts) else parts))
    flat.pop(1, None)
    number = next((dim for dim in flat if isinstance(dim, int)), None)
    if number is not None:
        return number
    return _largest(flat) if flat else 1


def alternatives(dim: Dim, of: Callable[[list[int]], int] = max) -> tuple[Dim, ...]:
    """The sizes that `dim` is the largest of, or the smallest."""
    lone = lone_atom(dim)
    return lone.parts if lone is not None and lone.evaluate is of else (dim,)


def _is_at_least(one: Dim, other: Dim) -> bool:
    gap = one - other
    return isinstance(gap, int) and gap >= 0


def _largest(dims: Iterable[Dim]) -> Dim:
    """The largest of sizes of which none is a largest itself."""
    parts = tuple(sorted(dims, key=str))
    return parts[0] if len(parts) == 1 else _function(f"max({', '.join(map(str, parts))})", parts, max)


def minimum(left: Dim, right: Dim) -> Dim:
    """The smaller of two sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    gap = right - left
    if isinstance(gap, int):
        return left if gap >= 0 else right
    return _function(f"min({left}, {right})", (left, right), min)


def not_empty(dim: Dim, present: Set[Dim]) -> Dim:
    """The size where those of `present` are at least 1: the smaller of one of them and 1 is 1."""
    if isinstance(dim, int):
        return dim
    result: Dim = dim.factor
    for atom in dim.atoms:
        if atom.evaluate is min and 1 in atom.parts and set(atom.parts) <= {1, *present}:
            continue
        parts = [not_empty(part, present) for part in atom.parts] if atom.evaluate is sum else [Size(1, (atom,))]
        result = result * functools.reduce(add, parts)
    return result


def _function(key: str, parts: tuple[Dim, ...], evaluate: Callable[[list[int]], int]) -> Size:
    return Size(1, (Atom(key, parts, evaluate),))


def resolved(dim: Dim, values: Mapping[str, int]) -> Dim:
    """The number `dim` is under `values`, or `dim` where one of its symbols has none."""
    return evaluate(dim, values) if symbols(dim) <= values.keys() else dim


def substituted(dim: Dim, values: Mapping[str, Dim]) -> Dim:
    """`dim` with other sizes in the place of some atoms, by their keys, which for symbols are their names."""
    if isinstance(dim, int) or not values or not mentions(dim, values.keys()):
        return dim
    result: Dim = dim.factor
    for atom in dim.atoms:
        if atom.key in values or atom.evaluate is None:
            result = result * values.get(atom.key, Size(1, (atom,)))
        else:
            evaluated = atom.evaluate
            join = add if evaluated is sum else maximum if evaluated is max else minimum if evaluated is min else floor_quotient
            result = result * functools.reduce(join, (substituted(part, values) for part in atom.parts))
    return result


def mentions(dim: Dim, keys: Set[str]) -> bool:
    """Whether one of some atoms is in a size, by their keys."""
    atoms = () if isinstance(dim, int) else dim.atoms
    return any(atom.key in keys or any(mentions(part, keys) for part in atom.parts) for atom in atoms)


def evaluate(dim: Dim, values: Mapping[str, int]) -> int:
    """The number `dim` is under `values`.

    Raises:
        KeyError: A symbol has no value.
    """
    if isinstance(dim, int):
        return dim
    result = dim.factor
    for atom in dim.atoms:
        parts = [evaluate(part, values) for part in atom.parts]
        result *= values[atom.key] if atom.evaluate is None else atom.evaluate(parts)
    return result


def lone_atom(dim: Dim | None) -> Atom | None:
    """A symbol, sum, quotient or extreme that is all of a size."""
    return dim.atoms[0] if isinstance(dim, Size) and dim.factor == 1 and len(dim.atoms) == 1 else None


def lone_symbol(dim: Dim | None) -> str | None:
    """The name of a size that is one symbol and nothing else; None for any other."""
    atom = lone_atom(dim)
    return None if atom is None or atom.evaluate is not None else atom.key


def symbols(dim: Dim) -> set[str]:
    """Names of all symbols that `dim` is made of."""
    if isinstance(dim, int):
        return set()
    found: set[str] = set()
    for atom in dim.atoms:
        if atom.evaluate is None:
            found.add(atom.key)
        for part in atom.parts:
            found |= symbols(part)
    return found


_OPERATORS: dict[type[ast.operator], Callable[[Dim, Dim], Dim]] = {
    ast.Add: add,
    ast.Sub: lambda a, b: add(a, b * -1),
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: floor_quotient,
}
_EXTREMES: dict[str, Callable[[Dim, Dim], Dim]] = {"max": maximum, "min": minimum}


@functools.cache
def parse(text: str) -> Dim | None:
    """Reads a dimension name: exporters write expressions such as `past + seq`, or numbers. None if it is no length in form."""
    try:
        dim = _parse(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return symbol(text)
    return dim if isinstance(dim, Size) or dim > 0 else None


def _parse(node: ast.expr) -> Dim:
    match node:
        case ast.Name(name):
            return symbol(name)
        case ast.Constant(int(number)):
            return number
        case ast.UnaryOp(ast.USub(), operand):
            return _parse(operand) * -1
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_parse(left), _parse(right))
        case ast.Call(ast.Name(name), [_, _, *_] as dims, []) if name.lower() in _EXTREMES:
            return functools.reduce(_EXTREMES[name.lower()], map(_parse, dims))
        case _:
            raise ValueError(ast.dump(node))
