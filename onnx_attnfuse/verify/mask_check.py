"""Check of a mask's reading: the reading and the mask are computed on adversarial inputs and compared element by element.

    refutation = refute(spec, meaning, facts, opsets, functions)

Compared is where keys are allowed, and where nothing is said to be added, that nothing is. `samples` evaluates the same at
friendly sizes, for pictures. Masks are evaluated on numbers by an `Evaluator`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnx_attnfuse.attention.axes.factors import Factor, leaves, length, refined
from onnx_attnfuse.attention.axes.views import IndexedValue
from onnx_attnfuse.attention.masks.classify import Meaning
from onnx_attnfuse.attention.masks.mask_terms import (
    bare,
    constant_of,
    elements_of,
    factor_of,
    linear,
    parts_of,
    position,
    value_of,
)
from onnx_attnfuse.attention.masks.operators import NUMBERS, RELATIONS
from onnx_attnfuse.attention.spec import Added, AttentionSpec, Floored, Mask, Replaced, Scaled, mask_values
from onnx_attnfuse.certify.terms import Term
from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.thresholds import MASKS
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.inputs import Encoding, InputCase, Pattern, feeds
from onnx_attnfuse.verify.runtime import RuntimeRefusal, available, is_dangerous
from onnx_attnfuse.verify.shape_solver import PROFILES, Equalities, Profile, Values
from onnx_attnfuse.verify.subgraph import extract, is_fresh
from onnx_attnfuse.verify.submodel import Functions, Runnable, Submodel
from onnx_attnfuse.verify.subprocess_runner import ProcessDied

_PATTERNS: tuple[Pattern, ...] = ("full", "right", "left", "holes", "index")
_ENCODINGS: tuple[Encoding, ...] = ("plain", "lowest")
"""How a float input may say which keys count; a mask that is read right for one of these is read right."""
_CHOICES = 3
_SHOWN_PATTERNS: tuple[Pattern, ...] = ("full", "right", "left")
_FRIENDLY = (Profile(3, (12, 16, 28, 20)), Profile(3, (16,)), *PROFILES)
"""Sizes that are easy to look at, then any: keys of earlier positions and new ones make 28."""
_MAX_COMPARED_SCORES = 1 << 22
"""Scores that are still compared."""


def refute(spec: AttentionSpec, meaning: Meaning, facts: Facts, opsets: Mapping[str, int], functions: Functions) -> str | None:
    """The place where the mask differs from its reading, in words; None if no such place was found."""
    if not spec.mask or spec.causal:
        return None
    read = dict.fromkeys([*mask_values(spec.mask), *map(value_of, elements_of(meaning.allowed))])
    try:
        source = _Source(list(read), facts, opsets, functions)
    except (Refused, RuntimeRefusal):
        return None
    check = _Check(spec, meaning, source, facts)
    every = [*source.dims, tuple(leaf.size for leaf in _factors(spec))]
    for lengths in itertools.islice(_lengths(facts, every), _CHOICES):
        found = [check.difference(lengths, encoding) for encoding in _ENCODINGS]
        if None not in found:
            return found[0]
    return None


@dataclasses.dataclass(frozen=True)
class MaskSample:
    """A mask as it comes out for one set of inputs."""

    allowed: npt.NDArray[np.bool_]
    """(batch, heads, rows, keys): where a key is seen."""
    added: npt.NDArray[np.float64]
    """(batch, heads, rows, keys): the additive bias."""


def samples(
    spec: AttentionSpec, meaning: Meaning, facts: Facts, opsets: Mapping[str, int], functions: Functions
) -> dict[str, MaskSample]:
    """Small tables of a mask as it was read, by pattern of padding; none if it cannot be evaluated."""
    elements = [item for part in (meaning.allowed, *meaning.biases) for item in elements_of(part)]
    read = dict.fromkeys(map(value_of, elements))
    if read and not available():
        return {}
    shape = tuple(leaf.size for leaf in _factors(spec))
    found: dict[str, MaskSample] = {}
    try:
        source = _Source(list(read), facts, opsets, functions) if read else None
        every = [*(source.dims if source else ()), shape]
        lengths = next(_lengths(facts, every, _FRIENDLY), None)
        if lengths is None:
            return {}
        for encoding in _ENCODINGS:
            found = {
                pattern: _sample(spec, meaning, lengths, source, InputCase(pattern, encoding, 1.0)) for pattern in _SHOWN_PATTERNS
            }
            if any(not np.array_equal(sample.allowed, found["full"].allowed) for sample in found.values()):
                break
    except (Refused, RuntimeRefusal, ProcessDied, NotEvaluated, IndexError):
        return {}
    return found


def _sample(spec: AttentionSpec, meaning: Meaning, lengths: Values, source: _Source | None, case: InputCase) -> MaskSample:
    evaluator, counts = _evaluator(spec, lengths, source.values(lengths, case) if source else {})
    allowed = np.broadcast_to(evaluator.evaluate(meaning.allowed), counts)
    added = sum(
        (np.broadcast_to(evaluator.evaluate(bias), counts).astype(np.float64) for bias in meaning.biases), np.zeros(counts)
    )
    axes = spec.axes
    places = {leaf: place for place, leaf in enumerate(_factors(spec))}
    order = [places[leaf] for axis in (axes.b, axes.n, axes.i, axes.j) for leaf in leaves(axis)]
    shape = tuple(sizes.evaluate(length(axis), lengths) for axis in (axes.b, axes.n, axes.i, axes.j))
    allowed, added = (array.transpose(order).reshape(shape) for array in (allowed, added))
    return MaskSample(allowed & np.tri(*shape[2:], dtype=np.bool_) if spec.causal else allowed, added)


class _Source:
    """A session that computes the values that a mask is read from."""

    def __init__(self, read: Sequence[ir.Value], facts: Facts, opsets: Mapping[str, int], functions: Functions) -> None:
        """Cuts out the nodes that compute the values.

        Raises:
            Refused: They cannot be cut out.
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        self._piece = extract(tuple(read), (), facts)
        self._read, self._facts = read, facts
        self._part = Runnable(Submodel(self._piece, opsets, functions, widened=False))
        assert self._part.session
        self.dims = [item.dims for item in self._piece.inputs]

    def values(self, lengths: Values, case: InputCase) -> dict[ir.Value, Array]:
        """The values for one case.

        Raises:
            RuntimeRefusal: ONNX Runtime ended with an error.
        """
        shapes = [tuple(sizes.evaluate(dim, lengths) for dim in shape) for shape in self.dims]
        apart = is_dangerous(self._piece.nodes, self._facts, lengths)
        arrays = self._part.run(feeds(self._part.model.slots, shapes, case), apart=apart)
        return {value: array.copy() for value, array in zip(self._read, arrays, strict=True)}  # old runtimes give out what is fed


@dataclasses.dataclass(frozen=True)
class _Check:
    """One mask and its reading."""

    spec: AttentionSpec
    meaning: Meaning
    source: _Source
    facts: Facts

    def difference(self, lengths: Values, encoding: Encoding) -> str | None:
        """The first difference on any pattern of padding; masks that cannot be run or evaluated show none."""
        for pattern in _PATTERNS:
            case = InputCase(pattern, encoding, 1.0)
            try:
                values = self.source.values(lengths, case)
                if not all(self._fits(value, array, lengths) for value, array in values.items()):
                    return None
                found = _difference(
                    self.spec, self.meaning, lengths, values, self.facts.assumed.masked_from, truths=pattern != "index"
                )
            except ProcessDied:
                return None
            except (RuntimeRefusal, NotEvaluated, IndexError):
                continue
            if found is not None:
                return f"{found}; case: {case}"
        return None

    def _fits(self, value: ir.Value, array: Array, lengths: Values) -> bool:
        """Whether a value came out as long as it is known to be; if not, the sizes do not occur together."""
        dims = self.facts.dims(value)
        return dims is None or array.shape == tuple(sizes.evaluate(dim, lengths) for dim in dims)


def _factors(spec: AttentionSpec) -> list[Factor]:
    return [leaf for axis in spec.axes.scores for leaf in leaves(axis)]


def _lengths(facts: Facts, shapes: Sequence[Sequence[sizes.Dim]], profiles: Iterable[Profile] = PROFILES) -> Iterator[Values]:
    equalities = Equalities(facts.equalities, lambda name: is_fresh(name, facts))
    for values in equalities.assignments([tuple(shape) for shape in shapes], profiles):
        numbers = [sizes.evaluate(dim, values) for shape in shapes for dim in shape]
        scores = math.prod(sizes.evaluate(dim, values) for dim in shapes[-1])
        if all(number > 0 for number in numbers) and scores <= _MAX_COMPARED_SCORES:
            yield values


def _difference(
    spec: AttentionSpec, meaning: Meaning, lengths: Values, values: Mapping[ir.Value, Array], masked_from: float, *, truths: bool
) -> str | None:
    """The difference of a mask and its reading; that nothing is added is only asked of inputs that are `truths`, 0 or 1."""
    evaluator, counts = _evaluator(spec, lengths, values)
    actual = np.broadcast_to(_Actual(evaluator).of(spec.mask), counts)
    allowed = np.broadcast_to(evaluator.evaluate(meaning.allowed), counts)
    wrong = ~allowed & (actual > masked_from)
    if not meaning.biases:
        wrong |= allowed & ~(actual > masked_from)
    if truths and not meaning.biases and not _by_amount(meaning.allowed):
        wrong |= allowed & (actual != 0)
    if not wrong.any():
        return None
    place = tuple(int(item) for item in np.argwhere(wrong)[0])
    return (
        f"at {place} of {tuple(counts)} the mask is {actual[place]:g}, and was read as {'seen' if allowed[place] else 'not seen'}"
    )


def _evaluator(spec: AttentionSpec, lengths: Values, values: Mapping[ir.Value, Array]) -> tuple[Evaluator, list[int]]:
    """An evaluator over all scores of an attention, and how many there are along each factor."""
    factors = _factors(spec)
    counts = [sizes.evaluate(factor.size, lengths) for factor in factors]
    indices = {
        factor: np.arange(count).reshape([count if other == place else 1 for other in range(len(factors))])
        for place, (factor, count) in enumerate(zip(factors, counts, strict=True))
    }
    return Evaluator(lengths, indices, values), counts


def _by_amount(part: Term) -> bool:
    """Whether keys are allowed by how much something unread adds, which then may be anything."""
    return part.op == "apply" or any(_by_amount(inner) for inner in parts_of(part))


class _Actual:
    """The numbers that a mask adds, computed from values of the graph and not from its reading."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator

    def of(self, mask: Mask) -> Array:
        """The mask at all indices; scores are taken as zero."""
        total = np.asarray(0.0)
        with np.errstate(all="ignore"):
            for step in mask:
                match step:
                    case Added(indexed, negative):
                        added = self._laid(indexed).astype(np.float64)
                        total = total - added if negative else total + added
                    case Scaled(factor, divide):
                        number = self._laid(factor) if isinstance(factor, IndexedValue) else np.asarray(factor)
                        total = total / number if divide else total * number
                    case Replaced(condition, keep_where, fill):
                        total = np.where(self._laid(condition).astype(bool) == keep_where, total, fill)
                    case Floored(low):
                        total = np.maximum(total, low)
        return total

    def _laid(self, indexed: IndexedValue) -> Array:
        value = self._evaluator.values[indexed.value]
        places = tuple(self._evaluator.evaluate(position(axis)) for axis in refined(indexed.axes))
        return np.asarray(value[places])


Array = npt.NDArray[Any]


class NotEvaluated(Exception):
    """The term applies an operator that has no meaning here."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Numbers for all that masks are made of."""

    lengths: Mapping[str, int]
    """By symbol."""
    indices: Mapping[Factor, Array]
    """The indices, shaped to broadcast against each other."""
    values: Mapping[ir.Value, Array]
    """The values that elements are read from."""

    def evaluate(self, part: Term) -> Array:
        """The term at all indices.

        Raises:
            NotEvaluated: It cannot be evaluated.
        """
        value = constant_of(part)
        if value is not None:
            return np.asarray(value if part.sort == "Real" else part.data)
        match part.op:
            case "const":
                return np.asarray(part.data)
            case "index":
                return self.indices[factor_of(part)]
            case "element":
                return self._element(part)
            case "apply" | "and" | "or" | "not" | "ite" | "eq0" | "le0":
                return self._applied(part.data if part.op == "apply" else part.op, *map(self.evaluate, part.args))
            case _:
                return self._sum(bare(part))

    def _sum(self, form: Term) -> Array:
        parts, rest = linear(form)
        total = np.asarray(sizes.evaluate(rest, self.lengths))
        for atom, coefficient in parts:
            with np.errstate(invalid="ignore"):  # NaN becomes some integer, as it does in the model
                total = total + self.evaluate(atom).astype(np.int64) * sizes.evaluate(coefficient, self.lengths)
        return total

    def _element(self, element: Term) -> Array:
        """Places outside of the value are those of branches that are not taken."""
        value = self.values[value_of(element)]
        places = [self.evaluate(item) for item in element.args]
        inside = tuple(
            np.clip(place, -length, length - 1).astype(np.int64) for place, length in zip(places, value.shape, strict=True)
        )
        return np.asarray(value[inside])

    def _applied(self, op: str, *items: Array) -> Array:
        function = _FUNCTIONS.get(op)
        if function is None:
            raise NotEvaluated(op)
        with np.errstate(all="ignore"):
            return np.asarray(function(*items))


def _all(*items: Array) -> Array:
    return functools.reduce(np.logical_and, items)


def _any(*items: Array) -> Array:
    return functools.reduce(np.logical_or, items)


def _quotient(one: Array, other: Array) -> Array:
    """ONNX's Div, which rounds integers to zero."""
    found = np.divide(one, other)
    return np.trunc(found) if np.issubdtype(np.result_type(one, other), np.integer) else found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **NUMBERS,
    **{op: function for op, (function, _) in RELATIONS.items()},
    "Abs": np.abs,
    "Complement": functools.partial(np.subtract, 1),
    "Div": _quotient,
    "Exp": np.exp,
    "Neg": np.negative,
    "Unmasked": functools.partial(np.less, MASKS),
    "and": _all,
    "eq0": np.logical_not,
    "ite": np.where,
    "le0": functools.partial(np.greater_equal, 0),
    "not": np.logical_not,
    "or": _any,
}
