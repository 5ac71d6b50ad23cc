"""Sizes of a graph's inputs that follow from others, as the graph does not run where they differ.

solved([(total, past + seq), (past_1, past_0)], ["seq", "past_0", "past_1", "total"])
# {"total": past_0 + seq, "past_1": past_0}
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.constants import attribute, is_standard
from onnx_attnfuse.graph.facts_view import Content
from onnx_attnfuse.graph.sizes import Dim, Size

_RANK = 4
"""The axes of cached keys and values."""


def solved(pairs: Iterable[tuple[Dim, Dim]], names: Sequence[str]) -> dict[str, Dim]:
    """Symbols by the sizes they are equal to, made of symbols that come before them or have no such size.

    Args:
        pairs: Lengths that are equal on every input that the graph runs with.
        names: The symbols of the graph's inputs; of two that are equal the first one is kept.
    """
    found: dict[str, Dim] = {}
    made_of: defaultdict[str, list[str]] = defaultdict(list)
    order = {name: place for place, name in enumerate(names)}
    for left, right in pairs:
        gap = sizes.substituted(left, found) - sizes.substituted(right, found)
        solution = _solution(gap, order)
        if solution is not None:
            name, size = solution
            changed = [name, *made_of.pop(name, ())]
            found[name] = size
            found.update((other, sizes.substituted(found[other], {name: size})) for other in changed)
            for part in sizes.symbols(size):
                made_of[part] += changed
    return found


def _solution(gap: Dim, order: dict[str, int]) -> tuple[str, Dim] | None:
    """The last symbol that is a positive sum of others where `gap` is 0; else an extreme or quotient of symbols that is one."""
    if isinstance(gap, int) or not sizes.symbols(gap) <= order.keys():
        return None
    terms = sizes.summands(gap)
    whole = math.gcd(*(term if isinstance(term, int) else term.factor for term in terms))
    lone = [sizes.symbol(name) for name in sorted(sizes.symbols(gap), key=order.__getitem__, reverse=True)]
    lone += [Size(1, term.atoms) for term in terms if isinstance(term, Size) and len(term.atoms) == 1 and term.atoms[0].parts]
    for size in lone:
        (name,) = (atom.key for atom in size.atoms)
        own = [term for term in terms if sizes.mentions(term, {name})]
        if len(own) != 1 or own[0] not in {size * whole, size * -whole}:
            continue
        sign = 1 if own[0] == size * whole else -1
        rest = [term for term in terms if term is not own[0]]
        parts = [_divided(term, -sign * whole) for term in rest]
        if parts and all((isinstance(part, Size) and part.factor > 0) or (isinstance(part, int) and part > 0) for part in parts):
            total: Dim = 0
            for part in parts:
                total = total + part
            return name, total
    return None


def _divided(term: Dim, divisor: int) -> Dim:
    quotient = sizes.exact_quotient(term, divisor)
    assert quotient is not None
    return quotient


def said(same: Iterable[Sequence[str]], names: Sequence[str]) -> Iterator[tuple[Dim, Dim]]:
    """The sizes of inputs that the caller says are equal, by patterns of their names."""
    for patterns in same:
        equal = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        yield from itertools.pairwise(map(sizes.symbol, equal))


def pasts(pairs: Iterable[tuple[Dim, Dim]]) -> Iterator[tuple[Dim, Dim]]:
    """The pairs of earlier and new positions that meet, one of them perhaps cut where the other ends, as a mask to its keys."""
    for left, right in pairs:
        yield from filter(have_new_positions, itertools.product(sizes.alternatives(left, min), sizes.alternatives(right, min)))


def appended(graph: ir.Graph, dims: Mapping[ir.Value, Sequence[Dim]]) -> Iterator[tuple[Dim, Dim]]:
    """The lengths of keys and values that a graph takes, and gives out with new ones, in pairs."""
    totals: list[Dim] = []
    for node in (value.producer() for value in graph.outputs):
        if is_standard(node, "Concat") and node.inputs[0] in graph.inputs:
            shape: Sequence[Dim] = dims.get(node.outputs[0], ())
            totals += [shape[attribute(node, "axis", 0)]] if len(shape) == _RANK else []
    yield from itertools.pairwise(totals)


def have_new_positions(pair: tuple[Dim, Dim]) -> bool:
    """Whether two lengths are both sums of sizes, and have one of these in common, as earlier and new positions together do."""
    one, other = (sizes.summands(dim) for dim in pair)
    sums = all(len(terms) > 1 and all(isinstance(term, Size) for term in terms) for terms in (one, other))
    return sums and not set(one).isdisjoint(other)


def with_equal(numbers: Mapping[str, int], equal: Mapping[str, Dim]) -> dict[str, int]:
    """Numbers of symbols, and those of the symbols that are left where some of these are equal to others."""
    known = dict(numbers)
    for name, dim in equal.items():
        unknown = sizes.symbols(dim) - known.keys()
        if name not in known or len(unknown) != 1:
            continue
        (last,) = unknown
        first, second = (sizes.evaluate(dim, {**known, last: number}) for number in (1, 2))
        number, rest = divmod(known[name] - first, second - first)
        if not rest and number >= 0:
            known[last] = 1 + number
    return known


def in_equal_sizes(content: Content, equal: Mapping[str, Dim]) -> Content:
    """The elements of a tensor, those that are sizes written in the sizes that they are equal to."""
    if isinstance(content, tuple):
        return tuple(sizes.substituted(item, equal) if isinstance(item, Size) else item for item in content)
    return sizes.substituted(content, equal) if isinstance(content, Size) else content
