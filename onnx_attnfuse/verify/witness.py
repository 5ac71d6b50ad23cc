"""Counterexamples: a claim that is not proved is tried on concrete inputs, the smallest sizes first.

Both pieces are run by ONNX Runtime with its optimisations off. The sizes for which the solver found the open obligation to fail
are among those tried. The witness is an input on which the two differ; finding none proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.certify import terms
from onnx_attnfuse.certify.claims import Piece, Proof, prove
from onnx_attnfuse.certify.pairing import Claim, Pair, Side
from onnx_attnfuse.certify.solvers import Solver
from onnx_attnfuse.certify.terms import Term, number, substitute, walk
from onnx_attnfuse.graph.constants import Array, constant_tensor
from onnx_attnfuse.graph.uses import sources
from onnx_attnfuse.verify.runtime import PieceSession, RuntimeRefusal
from onnx_attnfuse.verify.subgraph import Input, Subgraph
from onnx_attnfuse.verify.submodel import Submodel
from onnx_attnfuse.verify.verdict import ErrorBounds, compare

_SECONDS = 10.0
_LARGEST = 7
_MANY = 260
"""A size that a byte does not hold."""
_DRAWS = 6
_SCALARS = (-1.0, 1e-3, 1e4, 1e7)
"""Numbers that are given alone, as a temperature is."""
_LARGE = 30
"""The factor of ordinary numbers in the last draw: scores for which exponentials overflow."""
_ELEMENTS = 1 << 18
_TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1}


@dataclasses.dataclass(frozen=True)
class Counterexample:
    """An input on which the value before and the value after differ."""

    sizes: Mapping[str, int]
    arrays: Mapping[str, Array]
    """The inputs of the piece, by the names of values in the model before."""
    before: Array
    after: Array
    error: float
    """The largest difference; NaN where only one of the two is a number, infinite where one has another shape or is refused."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in sorted(self.sizes.items())) or "any sizes"
        return f"with {sizes} the two differ by {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class _Given:
    """An input of the pieces."""

    name: str
    shape: tuple[Term, ...]
    dtype: ir.DataType
    names: tuple[str | None, str | None]
    """Its name in either piece, None where that does not read it."""


def _pieces(pair: Pair, claim: Claim, found: Piece) -> list[tuple[Submodel, Sequence[ir.Value]]]:
    """Both pieces with their inputs. An input of one is not computed by the other: it would be another array."""
    sides, given = ((pair.before, claim.before), (pair.after, claim.after)), set[str]()

    def ends(side: Side) -> Callable[[ir.Value], bool]:
        return lambda item: found.ends(side, item) or side.identity_of(item) in given

    while True:
        made = [_piece(side, value, ends(side)) for side, value in sides]
        wanted = {side.identity_of(item) for (side, _), (_, items) in zip(sides, made, strict=True) for item in items}
        if wanted <= given:
            return made
        given |= wanted


class _Runner:
    """Both pieces of one claim."""

    def __init__(self, pair: Pair, proof: Proof, level: int) -> None:
        claim = proof.claim
        found = Piece(pair, claim, level)
        (before, first), (after, second) = _pieces(pair, claim, found)
        self.sessions = [PieceSession(before.proto.SerializeToString())]
        with contextlib.suppress(RuntimeRefusal):  # ONNX Runtime takes the piece after for no model, which is a difference
            self.sessions.append(PieceSession(after.proto.SerializeToString()))
        self.inputs: list[_Given] = []
        names: dict[str, list[str | None]] = {}
        originals: dict[str, ir.Value] = {}
        for place, (side, model, given) in enumerate(((pair.before, before, first), (pair.after, after, second))):
            for item, slot in zip(given, model.slots, strict=True):
                identity = side.identity_of(item)
                names.setdefault(identity, [None, None])[place] = slot.name
                originals.setdefault(identity, item)
        for identity, both in names.items():
            array = found.given(pair.before if both[0] is not None else pair.after, originals[identity])
            self.inputs.append(_Given(originals[identity].name or "", array.shape, array.dtype, (both[0], both[1])))

    def symbols(self) -> list[Term]:
        """The sizes that inputs are made of."""
        found = {item for given in self.inputs for length in given.shape for item in walk(length) if item.op == "size"}
        return sorted(found, key=lambda item: str(item.data))

    def run(self, sizes: Mapping[Term, int], draw: int) -> Counterexample | None:
        """A counterexample of these sizes, if this draw is one."""
        generator = np.random.default_rng(draw)
        arrays: dict[str, Array] = {}
        for given in self.inputs:
            shape = [_value(length, sizes) for length in given.shape]
            if any(length is None or length < 0 for length in shape) or np.prod([length or 0 for length in shape]) > _ELEMENTS:
                return None
            arrays[given.name] = _drawn([length or 0 for length in shape], given.dtype, generator, draw)
        outputs: list[Array] = []
        for place, session in enumerate(self.sessions):
            feed = {name: arrays[item.name] for item in self.inputs if (name := item.names[place]) in session.inputs()}
            try:
                outputs += session.run(None, feed)[:1]
            except RuntimeRefusal:
                break
        if not outputs:  # an input that the model before refuses says nothing
            return None
        outputs += [np.zeros(0, outputs[0].dtype)] * (2 - len(outputs))
        error = _difference(outputs[0], outputs[1])
        if error is None:
            return None
        plain = {str(symbol.data): value for symbol, value in sizes.items()}
        return Counterexample(plain, arrays, outputs[0], outputs[1], error)


def _value(length: Term, sizes: Mapping[Term, int]) -> int | None:
    found = substitute(length, {symbol: number(value) for symbol, value in sizes.items()})
    return int(found.data) if found.op == "const" else None


def _drawn(shape: Sequence[int], dtype: ir.DataType, generator: np.random.Generator, draw: int) -> Array:
    if dtype.is_floating_point() and np.prod(shape) == 1 and draw > 1:
        return np.full(shape, _SCALARS[draw % len(_SCALARS)], dtype.numpy())
    if dtype.is_floating_point():
        is_last = draw == _DRAWS - 1 and dtype.itemsize > 2  # in 16 bits products of such numbers overflow by themselves
        return (generator.standard_normal(shape) * (_LARGE if is_last else 1 + draw % 3)).astype(dtype.numpy())
    if draw < 2:
        return np.full(shape, 1 - draw, dtype.numpy())
    lowest, highest = (-3, 4) if draw == _DRAWS - 2 and dtype.is_signed() else (0, 2)
    return generator.integers(lowest, highest, shape).astype(dtype.numpy())


def _difference(one: Array, other: Array) -> float | None:
    """The difference of two results, NaN where only one is a number; None where it is no more than rounding."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    magnitude = float(np.nan_to_num(np.abs(first), posinf=0, neginf=0).max(initial=0.0))
    bounds = ErrorBounds(_TOLERANCE.get(str(one.dtype), 1e-3) * (0.05 + magnitude), 0.0)
    found = compare(first, second, bounds)
    if found.equal:
        return None
    return float("nan") if found.nan_lost or found.nan_found else found.max_abs_error or float(np.finfo(np.float64).max)


def _sizes(symbols: Sequence[Term], proof: Proof, solver: Solver | None) -> Iterator[Mapping[Term, int]]:
    """Sizes to try: small ones by their sum, and those that the solver found."""
    counted = sorted(itertools.product(range(1, _LARGEST + 1), repeat=min(len(symbols), 4)), key=lambda item: (sum(item), item))
    asked = [dict(zip(symbols, (*item, *[2] * len(symbols)), strict=False)) for item in counted]
    yield from asked[:12]
    for symbol in (item for item in symbols if not item.args):  # one that may be 0
        yield from ({**dict.fromkeys(symbols, size), symbol: 0} for size in (1, 2, 3))
    yield from asked[12:40]
    for _, obligation in proof.open if solver is not None else ():
        names = {name: term for name, term in obligation.names.items() if term.op == "size"}
        values = solver.values(obligation.text, list(names)) if solver is not None else None
        if values is not None:
            known = {term: values.get(name, 1) for name, term in names.items()}
            yield {symbol: known.get(symbol, 1) for symbol in symbols}
    yield from asked[40::3]
    if symbols:
        yield {symbol: 16 + place for place, symbol in enumerate(symbols)}
    for symbol in symbols:
        yield {**dict.fromkeys(symbols, 1), symbol: _MANY}


def counterexample(before: ir.Model, after: ir.Model, name: str, solver: Solver) -> Counterexample | None:
    """An input on which the value of a name differs in two models; None if it is proved equal, or none was found.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    pair = Pair(before, after)
    for claim in pair.claims:
        if claim.name == name:
            terms.restart()
            proof = prove(pair, claim, solver.proves)
            return None if proof.proved else refute(pair, proof, solver if solver.name == "z3" else None)
    return None


def refute(pair: Pair, proof: Proof, solver: Solver | None = None, seconds: float = _SECONDS) -> Counterexample | None:
    """An input on which a claim that is not proved does not hold, the smallest found; None if none was.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    end = time.monotonic() + seconds
    refused: Counterexample | None = None
    for level in (1, 2):
        try:
            runner = _Runner(pair, proof, level)
        except RuntimeRefusal:  # a piece that ONNX Runtime does not take refutes nothing
            continue
        for sizes in _sizes(runner.symbols(), proof, solver):
            for draw in range(_DRAWS):
                if time.monotonic() > end:
                    return refused
                found = runner.run(sizes, draw)
                if found is not None and found.error != np.inf:
                    return found
                refused = refused or found  # a refusal of the model after says less than another number
    return refused


def _piece(side: Side, result: ir.Value, ends: Callable[[ir.Value], bool]) -> tuple[Submodel, Sequence[ir.Value]]:
    """The model that computes `result`, and the values that are its inputs.

    Args:
        side: The model that it is a part of.
        result: The value that it computes.
        ends: Whether it is given a value.

    Raises:
        RuntimeRefusal: The shape or the type of an input is unknown.
    """
    facts, graph, constants, given = side.scope.facts, side.scope.graph, list[ir.Value](), list[Input]()
    made = set[ir.Node | None]()

    def is_constant(value: ir.Value) -> bool:
        node = value.producer()
        return constant_tensor(value) is not None and (node is None or node.op_type == "Constant")

    def is_end(value: ir.Value) -> bool:
        return is_constant(value) or value.producer() is None or (ends(value) and value is not result)

    for value in sources([result], lambda value, _: not is_end(value)):
        if value.graph is not graph:
            continue
        dims, dtype = facts.dims(value), facts.dtype(value)
        if not is_end(value):
            made.add(value.producer())
        elif is_constant(value):
            constants.append(value)
        elif dims is None or dtype is None:
            raise RuntimeRefusal(f"the shape or the element type of '{value.name}' is unknown")
        else:
            given.append(Input(value, "given", dims, dtype))
    nodes = tuple(node for node in graph if node in made)
    subgraph = Subgraph(nodes, tuple(given), tuple(constants), (result,))
    return Submodel(subgraph, side.model.opset_imports, side.model.functions, widened=False), [item.value for item in given]
