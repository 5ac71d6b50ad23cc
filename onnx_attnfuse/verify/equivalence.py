"""Equivalence of a rewrite: the nodes of before and after, extracted together and run on the same hostile inputs.

    checker = EquivalenceChecker()
    verdict = checker.check([(old, new)], frontier, facts, model.opset_imports)

Both results come from one session of ONNX Runtime with its optimisations off. Equal subgraphs, as the layers of a model are, are
checked once. Float16 is checked twice: as it is, loosely, and again in float32, where small differences show.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.reasons import Refused
from onnx_attnfuse.verify.inputs import InputCase, Pattern, feeds
from onnx_attnfuse.verify.run_cases import FIRST_CHOICES, CaseChoice, Trial, is_too_large
from onnx_attnfuse.verify.runtime import Operators, RuntimeRefusal, available, is_dangerous
from onnx_attnfuse.verify.shape_solver import PROFILES, Equalities, Values, are_at_least
from onnx_attnfuse.verify.subgraph import Subgraph, extract, is_fresh, reach_of, with_factors
from onnx_attnfuse.verify.submodel import Functions, Keys, Runnable, Submodel, smaller
from onnx_attnfuse.verify.subprocess_runner import ProcessDied
from onnx_attnfuse.verify.verdict import LOOSE, TIGHT, Verdict, by_this_runtime, undecided

_MAX_TRACED_ELEMENTS = 1 << 22
"""Elements of the largest tensor that is made to find a length."""
_MILD = InputCase("full", "normal", 1.0)
_MAX_WEIGHT_ELEMENTS = 1 << 28
"""Elements of all weights of a piece that is still run."""


class _Graph:
    """Equalities and traced lengths of one graph, from which sizes for its pieces are chosen."""

    def __init__(self, facts: Facts, opsets: Mapping[str, int], lengths: Mapping[str, int]) -> None:
        self._facts = facts
        given = [(sizes.symbol(name), number) for name, number in facts.numbers(lengths).items()]
        self._free, self._given = (
            Equalities([*pairs, *facts.equalities], lambda name: is_fresh(name, facts)) for pairs in ((), given)
        )
        self._has_lengths = bool(given)
        self._tracer = Tracer(facts, opsets)

    def choices(self, subgraph: Subgraph, empty: frozenset[str]) -> Iterator[CaseChoice]:
        """Sizes for the inputs of a piece, best first; those of `empty` may be 0."""
        dims = [item.dims for item in subgraph.inputs]
        names = frozenset(name for shape in dims for dim in shape for name in sizes.symbols(dim))
        seen: set[tuple[tuple[int, ...], ...]] = set()
        reach = reach_of(subgraph.nodes)
        for place, values in enumerate(self._assignments(dims, sorted(empty & names), reach)):
            self._tracer.complete(values, dims)
            shapes = tuple(tuple(sizes.evaluate(dim, values) for dim in shape) for shape in dims)
            least = 0 if any(values[name] == 0 for name in empty & names) else 1
            if shapes in seen or not are_at_least(least, dims, shapes):
                continue
            seen.add(shapes)
            apart = is_dangerous(subgraph.nodes, self._facts, values)
            yield CaseChoice(
                shapes, largest(subgraph, self._facts, values), values, names, apart, is_far=bool(reach) and place == 1
            )

    def _assignments(self, dims: Sequence[Dims], empty: Sequence[str], reach: int) -> Iterator[Values]:
        """Numbers for all symbols; those that a caller gave come after the first ones, for models that run with no others."""
        first = self._free.assignments(dims, PROFILES[:FIRST_CHOICES], empty, reach)
        given = self._given.assignments(dims, PROFILES[:FIRST_CHOICES]) if self._has_lengths else ()
        return itertools.chain(first, given, self._free.assignments(dims, PROFILES[FIRST_CHOICES:]))


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The graph of a piece, and the requirements on the piece."""

    pairs: int
    """How many results there are of either side."""
    facts: Facts
    opsets: Mapping[str, int]
    functions: Functions
    empty: frozenset[str]


class EquivalenceChecker:
    """Judges pieces, equal ones once."""

    def __init__(
        self, *, rounds_float16: bool = False, operators: Operators = (), lengths: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """A judge for one device.

        Args:
            rounds_float16: Whether the device rounds float16 sums to float16; ONNX Runtime's CPU provider does not.
            operators: Operators of other domains in NumPy, for originals that have such.
            lengths: Numbers that a caller tells for symbolic sizes, which are tried besides others.
        """
        self._lengths = lengths
        self._operators = operators
        self._rounds = rounds_float16
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self._keys = Keys()
        self._graphs: dict[Facts, _Graph] = {}

    def check(
        self,
        pairs: Sequence[tuple[ir.Value, ir.Value]],
        frontier: Iterable[ir.Value],
        facts: Facts,
        opsets: Mapping[str, int],
        functions: Functions | None = None,
        given: ir.Value | None = None,
        empty: frozenset[str] = frozenset(),
    ) -> Verdict:
        """Whether new results equal old ones, whatever the stops and all other inputs of their piece are.

        Args:
            pairs: Results of the source, each with its replacement, computed by nodes of the same graph.
            frontier: The values all are computed from; nothing above them is run.
            facts: Shapes and types of the graph.
            opsets: Opset imports of the graph.
            functions: The model's own functions.
            given: One truth value of the graph; where it does not hold, nothing is claimed.
            empty: Symbols that may be 0.

        Returns:
            The verdict, with evidence if they differ.
        """
        if not available():
            return undecided("onnxruntime is not installed")
        try:
            results = [value for side in zip(*pairs, strict=True) for value in side]
            subgraph = extract([*results, *([] if given is None else [given])], frontier, facts)
            subgraph = with_factors(subgraph, results[: len(pairs)])
            weights = sum(sizes.evaluate(sizes.product(item.dims), {}) for item in subgraph.inputs if item.role == "weight")
            if weights > _MAX_WEIGHT_ELEMENTS:
                return undecided(f"weights of {weights} elements are too large to run")
            return self._judged(subgraph, _Origin(len(pairs), facts, opsets, functions or {}, empty))
        except Refused as refused:
            return undecided(str(refused.reason))
        except ProcessDied as died:
            return undecided(str(died))

    def _judged(self, subgraph: Subgraph, origin: _Origin) -> Verdict:
        graph = self._graphs.get(origin.facts)
        if graph is None:
            graph = self._graphs[origin.facts] = _Graph(origin.facts, origin.opsets, self._lengths)
        choices = graph.choices(subgraph, origin.empty)
        first = list(itertools.islice(choices, FIRST_CHOICES))
        key = origin.pairs, *self._keys.key(subgraph, [choice.shapes for choice in first], origin.opsets)
        if key not in self._verdicts and first and all(map(is_too_large, first)):
            self._verdicts[key] = self._on_less(subgraph, origin)
        if key not in self._verdicts:
            examiner = _Examiner(subgraph, origin, self._operators, rounded=self._rounds)
            self._verdicts[key] = by_this_runtime(examiner.verdict(itertools.chain(first, choices)))
        return self._verdicts[key]

    def _on_less(self, subgraph: Subgraph, origin: _Origin) -> Verdict:
        """The verdict on a piece that is too large to be run, by one of the same structure with shorter axes."""
        lengths: list[int] = []
        for length, piece, known in smaller(subgraph, origin.facts.assumed):
            lengths.append(length)
            graph = _Graph(known, origin.opsets, self._lengths)
            choices = list(itertools.islice(graph.choices(piece, origin.empty), FIRST_CHOICES))
            if not choices or all(map(is_too_large, choices)):
                continue
            examiner = _Examiner(piece, dataclasses.replace(origin, facts=known), self._operators, rounded=self._rounds)
            verdict = by_this_runtime(examiner.verdict(choices))
            shorter = f"axes of {', '.join(map(str, lengths))} verified at a shorter length"
            if not verdict.equal and verdict.undecided is None:
                return undecided(f"it differs where {shorter}: {verdict.detail}")
            if verdict.equal:
                return dataclasses.replace(verdict, detail=f"{verdict.detail}; {shorter}")
        return undecided("a tensor of the piece is too large to run, and shorter axes do not make it small enough")


class _Examiner:
    """Judges one piece in every precision it takes."""

    def __init__(self, subgraph: Subgraph, origin: _Origin, operators: Operators, *, rounded: bool) -> None:
        self._rounded = rounded
        self._without_rows: tuple[Pattern, ...] = ("empty", "apart", "left", *(("holes", "index") if rounded else ()))
        """Patterns with rows that float32 and float16 may differ in, as they have no key."""
        inner = {origin.facts.dtype(value) for node in subgraph.nodes for value in node.outputs}
        self._dtypes = inner | {item.dtype for item in subgraph.inputs}
        fixed = origin.pairs, origin.facts, {**origin.opsets, CONTRIB: 1}, origin.functions
        self._trial = functools.partial(Trial, subgraph, *fixed, operators=operators)

    def verdict(self, choices: Iterable[CaseChoice]) -> Verdict:
        """The verdict; of `choices` no more are made than needed."""
        if ir.DataType.BFLOAT16 in self._dtypes:
            verdict = self._trial(tolerance=TIGHT, widened=True).verdict(choices)
            return dataclasses.replace(verdict, detail=f"{verdict.detail}; bfloat16 verified as float32")
        if ir.DataType.FLOAT16 not in self._dtypes:
            return self._trial(tolerance=TIGHT).verdict(choices)
        loosely = self._trial(tolerance=LOOSE, rounded=self._rounded)
        verdict = loosely.verdict(choices)
        if not verdict.equal:
            return verdict
        again = self._trial(tolerance=TIGHT, widened=True).verdict(loosely.fitting, without=self._without_rows)
        if again.undecided is None and not again.equal:
            return dataclasses.replace(again, detail=f"{again.detail}; equal within the precision of float16, not in float32")
        return verdict


class Tracer:
    """Finds lengths that no rule finds, by running their nodes; runs each value's part once per sizes.

    Where a shape hangs on content that cannot be read (padding up to a multiple, say), `Facts` only have a fresh symbol for it,
    which may not be chosen freely: it follows from the sizes that may. So the light operators above the value that the symbol is
    an axis of are cut out and run, which costs a session per symbol and model.
    """

    def __init__(self, facts: Facts, opsets: Mapping[str, int]) -> None:
        self._facts = facts
        self._opsets = opsets
        self._parts: dict[ir.Value, tuple[Subgraph, Runnable] | None] = {}
        self._found: dict[tuple[ir.Value, tuple[tuple[int, ...], ...]], list[int]] = {}

    def complete(self, values: Values, shapes: Sequence[Dims], done: set[str] | None = None) -> None:
        """Replaces the numbers of fresh symbols in `shapes` by those that follow from the others, but for those `done`."""
        done = set() if done is None else done
        for name in sorted({values.root(name) for shape in shapes for dim in shape for name in sizes.symbols(dim)} - done):
            origin = self._facts.origins.get(name)
            done.add(name)
            if origin is None or not is_fresh(name, self._facts):
                continue
            value, axis = origin
            if value not in self._parts:
                self._parts[value] = self._part(value)
            part = self._parts[value]
            if part is None:
                continue
            self.complete(values, [item.dims for item in part[0].inputs], done)
            shape = self._shape(value, *part, values)
            if axis < len(shape):
                values[name] = shape[axis]

    def _shape(self, value: ir.Value, subgraph: Subgraph, part: Runnable, values: Values) -> Sequence[int]:
        """The shape of a value; empty where it does not run, as the original then refuses sizes that do not fit here."""
        lengths = tuple(tuple(sizes.evaluate(dim, values) for dim in item.dims) for item in subgraph.inputs)
        negative = any(length < 0 for shape in lengths for length in shape)
        if negative or largest(subgraph, self._facts, values) > _MAX_TRACED_ELEMENTS:
            return ()
        if (value, lengths) not in self._found:
            try:
                apart = is_dangerous(subgraph.nodes, self._facts, values)
                (found,) = part.run(feeds(part.model.slots, lengths, _MILD), apart=apart)
            except (RuntimeRefusal, ProcessDied):
                return ()
            self._found[value, lengths] = found.tolist()
        return self._found[value, lengths]

    def _part(self, value: ir.Value) -> tuple[Subgraph, Runnable] | None:
        """The nodes that compute a value, made to give its shape; None if they cannot be cut out or run."""
        try:
            subgraph = extract((value,), (), self._facts)
            if not subgraph.nodes:
                return None
            made = {self._facts.dtype(output) for node in subgraph.nodes for output in node.outputs}
            widened = ir.DataType.BFLOAT16 in made.union(item.dtype for item in subgraph.inputs)
            part = Runnable(Submodel(subgraph, self._opsets, {}, widened=widened, shapes=True))
            assert part.session
        except (Refused, RuntimeRefusal):
            return None
        return subgraph, part


def largest(subgraph: Subgraph, facts: Facts, values: Values) -> int:
    """Elements of the largest tensor in a piece, as far as shapes are known, weights left out."""
    prepared, read = subgraph.prepared(), subgraph.read()
    made = [value for node in subgraph.nodes for value in node.outputs if value not in prepared]
    inner = [found for value in made if (found := facts.dims(value)) is not None]
    shapes = [*(item.dims for item in subgraph.inputs if item.value in read - prepared), *inner]
    return max((sizes.evaluate(sizes.product(shape), values) for shape in shapes), default=0)
