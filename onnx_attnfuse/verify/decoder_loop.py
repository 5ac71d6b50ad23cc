"""Judging a decoder whose cache became one buffer: source and result are run in a loop, as a caller who generates does.

    verdict = check_decoder(before, after, loop)

A prompt and some steps, for one entry and for several, without padding and with padding on either side or in between. The source
gets a past that grows by its outputs, the result a buffer longer than its contents, with other numbers after them. At
every token that is no padding both must give the same. Nothing is known here of how either was built.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import io, sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.verify.float32_copy import is_half, is_large, weight_bytes, widened
from onnx_attnfuse.verify.gqa_prologue import in_front
from onnx_attnfuse.verify.input_kinds import InputKind, kinds
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import session
from onnx_attnfuse.verify.runtime import Operators, PieceSession, Reference, RuntimeRefusal, available
from onnx_attnfuse.verify.shape_solver import Equalities
from onnx_attnfuse.verify.tolerance import compare
from onnx_attnfuse.verify.verdict import Verdict, by_this_runtime, undecided

_TOLERANCES = {ir.DataType.FLOAT: 1e-3, ir.DataType.FLOAT16: 5e-2}
"""How far whole models may be apart, as a part of the magnitude of an output."""
_PROMPT, _CHUNK, _STEPS, _WARM, _SPARE = 6, 3, 3, 4, 3
_OTHER = 5
"""The length of axes that have nothing to do with the cache."""
_FEW_TOKENS = 10
_MOST_WEIGHTS = 1 << 33
"""Bytes of weights in a half type that are still widened."""
Pattern = Literal["none", "left", "right", "holes"]


@dataclasses.dataclass(frozen=True)
class FilledSource:
    """A source with a buffer of its own, of a fixed length, which it writes into at positions given to it."""

    position: str
    """The input that says where new keys go: the first place, or that of each, (), (1) or (s)."""
    length: sizes.Dim
    """How many positions the buffer has; a symbol where a caller chooses."""
    masks_buffer: bool
    """Whether the mask is as long as the buffer; else it is as long as the positions so far."""


@dataclasses.dataclass(frozen=True)
class DecoderBranch:
    """The input of a source that chooses between a decoder with a past and one without."""

    name: str
    with_past: bool
    """Its value where there is a past; it is the opposite where there is none."""
    rank: int
    """Its axes, of length 1."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a decoder is run in a loop: names of inputs and outputs, where they differ first those of the source."""

    tokens: str
    """The input with the new tokens or their embeddings, (b, s, ...)."""
    mask: str
    """The input (b, past + s); the source may have none."""
    ends_anywhere: bool
    """Whether zeros may follow the text of the mask, up to the length of the buffer."""
    is_padded: bool
    """Whether the mask tells tokens from padding; else it only tells lengths."""
    positions: str | None
    pasts: tuple[tuple[str, str], ...]
    presents: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    """The outputs besides the cache."""
    any_padding: bool
    """Padding may lie anywhere; else nowhere but after the tokens of a prompt."""
    only_ends: bool
    """Nothing is claimed of padding that lies between tokens."""
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Numbers that symbolic sizes will always have; no other number of entries or new tokens is run then."""
    rotates_each_token: bool = False
    """Whether the provider rotates each token by its own position; the CPU does not in a prompt, so there it is done in front."""
    filled: FilledSource | None = None
    """The source's own buffer; None: its past grows."""
    branch: DecoderBranch | None = None
    """The source's input that selects its branch for a prompt; None: it has one graph for all."""


def check_decoder(before: ir.Model, after: ir.Model, loop: Loop, operators: Operators = ()) -> Verdict:
    """Whether a decoder with a buffer gives the results of the source with a cache that grows.

    Args:
        before: The source.
        after: The decoder with the buffer.
        loop: How both are run.
        operators: Operators of other domains in NumPy.
    """
    if not available():
        return undecided("onnxruntime is not installed")
    after = in_front(after) if loop.rotates_each_token else after
    if not is_half(before):
        return by_this_runtime(_judged(before, after, loop, operators))
    wide = undecided("its weights are too many to judge it in float32")
    if weight_bytes(before) <= _MOST_WEIGHTS:
        wide = _judged(widened(before), widened(after), loop, operators)
    if _computes_in(before, ir.DataType.BFLOAT16) or (wide.undecided is None and not wide.equal):
        return by_this_runtime(wide)
    return by_this_runtime(_judged(before, after, loop, operators))


def _computes_in(model: ir.Model, dtype: ir.DataType) -> bool:
    return any(value.dtype == dtype for value in (*model.graph.inputs, *model.graph.initializers.values()))


def _judged(before: ir.Model, after: ir.Model, loop: Loop, operators: Operators) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="attnfuse-") as folder:
        try:
            source = started(before, pathlib.Path(folder, "before.onnx"), operators)
        except (RuntimeRefusal, ModelError) as refusal:
            return undecided(f"the original does not load: {refusal}")
        try:
            result = started(after, pathlib.Path(folder, "after.onnx"), operators)
        except (RuntimeRefusal, ModelError) as refusal:
            return Verdict(False, 0.0, 0, f"with a buffer the model does not load: {refusal}")
        return _Judge(before, source, result, loop).verdict()


def started(model: ir.Model, path: pathlib.Path, operators: Operators) -> PieceSession | Reference:
    """A model in ONNX Runtime; by way of files where it is too large to be passed."""
    try:
        return session(model, operators=operators)
    except ModelError:
        try:
            io.save(model, path, is_result=False)
        except OptionError as error:  # there is no room
            raise RuntimeRefusal(str(error)) from error
        return session(str(path), operators=operators)


@dataclasses.dataclass(frozen=True)
class _Case:
    """One run of the loop: the new positions of each step, and which of them are tokens."""

    batch: int
    pattern: Pattern
    warm: bool
    """Whether the loop begins with a past of random numbers."""
    steps: tuple[int, ...]
    at_beginning: bool = False
    """The mask of the result is as long as the buffer, with zeros after the text."""

    def __str__(self) -> str:
        padding = "without padding" if self.pattern == "none" else f"with padding in '{self.pattern}'"
        where = "a mask as long as the buffer, " if self.at_beginning else ""
        return f"{self.batch} entries, {padding}, {where}{'after a past, ' if self.warm else ''}steps of {list(self.steps)}"


class _Judge:
    """Two decoders, and their inputs."""

    def __init__(self, before: ir.Model, source: PieceSession | Reference, result: PieceSession | Reference, loop: Loop) -> None:
        self._source, self._result, self._loop = source, result, loop
        facts = Facts(before.graph)
        self._dims: dict[str, Dims] = {value.name or "": facts.dims(value) or () for value in before.graph.inputs}
        self._dtypes = {value.name or "": facts.dtype(value) for value in before.graph.inputs}
        self._kinds: Mapping[str, InputKind] = kinds(before.graph, facts)
        self._axes = {name: self._dims[loop.tokens][axis] for axis, name in enumerate(("batch", "new"))}
        self._equalities = Equalities(facts.equalities)
        self._root = self._equalities.root
        self._fixed = {name: sizes.resolved(dim, loop.numbers) for name, dim in self._axes.items()}
        self._rng = np.random.default_rng(0)
        self._is_large = is_large(before)
        dtype = self._dtypes[loop.pasts[0][0]]
        self._tolerance = _TOLERANCES.get(dtype or ir.DataType.FLOAT, min(_TOLERANCES.values()))

    def verdict(self) -> Verdict:
        largest, count, refused = 0.0, 0, ""
        for warm in (False, True):
            if warm and count and self._is_large:
                break
            for case in self._cases(warm=warm):
                try:
                    error, detail = self._run(case)
                except _SourceRefusal as refusal:
                    refused = str(refusal)
                    continue
                except RuntimeRefusal as refusal:
                    return Verdict(False, largest, count, f"{case}: with a buffer it does not run: {refusal}")
                if detail:
                    return Verdict(False, max(error, largest), count + 1, f"{case}: {detail}")
                largest, count = max(error, largest), count + 1
        if not count:
            return undecided(f"the original does not run: {refused or 'no sizes fit its inputs'}")
        return Verdict(True, largest, count, f"equal in {count} loops")

    def _cases(self, *, warm: bool) -> Iterator[_Case]:
        """Loops that the sizes of the source allow; on top of a past several entries get one token each at a time."""
        fixed_batch, fixed_new = self._fixed["batch"], self._fixed["new"]
        batches = [fixed_batch] if isinstance(fixed_batch, int) else [1, 3]
        patterns = tuple(self._patterns())
        for batch, pattern in itertools.product(batches, patterns):
            if self._is_large and batch == 1 and pattern != patterns[-1]:
                continue
            prompt = [] if warm else [_PROMPT]
            steps = [*([_CHUNK] if batch == 1 else []), *[1] * _STEPS]
            if isinstance(fixed_new, int):
                prompt = [] if warm else [fixed_new]
                steps = [fixed_new] * _STEPS if batch == 1 or fixed_new == 1 else []
            if self._loop.only_ends and pattern == "right":  # later tokens would have it in between
                steps = []
            while prompt and steps and self._too_long(sum((*prompt, *steps))):
                steps = steps[:-1]
            if (prompt or steps) and not self._too_long(sum((*prompt, *steps)) + _WARM * warm):
                yield _Case(batch, pattern, warm, (*prompt, *steps))
            if self._loop.ends_anywhere and steps and (batch == 1 or fixed_new == 1 or warm):
                yield _Case(batch, pattern, warm, (*prompt, *steps), at_beginning=True)

    def _too_long(self, total: int) -> bool:
        """Whether a source with a buffer has no place for that many positions."""
        filled = self._loop.filled
        return filled is not None and isinstance(filled.length, int) and total > filled.length

    def _patterns(self) -> Iterator[Pattern]:
        """Where padding may lie."""
        yield "none"
        if self._loop.is_padded:
            yield "right"
        if self._loop.is_padded and self._loop.any_padding:
            yield "left"
        if self._loop.is_padded and self._loop.any_padding and not self._loop.only_ends:
            yield "holes"

    def _run(self, case: _Case) -> tuple[float, str]:
        """The largest error of one loop, and where both differ beyond the tolerance."""
        loop, past = self._loop, _WARM if case.warm else 0
        keep = self._kept(case, past)
        others: dict[str, Array] = {}
        grown, buffer = self._first(case.batch, keep[:, :past], sum(case.steps))
        largest, seen = 0.0, past
        for new in case.steps:
            now = keep[:, : seen + new]
            fed = {**self._others(now, new, others), **self._new(now, new)}
            mask = {loop.mask: now.astype(self._numpy(loop.mask))}
            given = {**dict(zip((old for old, _ in loop.pasts), grown, strict=True)), **self._inputs(now, new, grown[0].shape[2])}
            try:
                old = self._source.run([*loop.outputs, *(name for name, _ in loop.presents)], self._taken(fed | mask | given))
            except RuntimeRefusal as refusal:
                raise _SourceRefusal(str(refusal)) from refusal
            given = dict(zip((name for _, name in loop.pasts), buffer, strict=True))
            if case.at_beginning:
                mask[loop.mask] = np.pad(mask[loop.mask], ((0, 0), (0, buffer[0].shape[2] - now.shape[1])))
            got = self._result.run([*loop.outputs, *(name for _, name in loop.presents)], fed | mask | given)
            grown, buffer = old[len(loop.outputs) :], got[len(loop.outputs) :]
            for name, left, right in zip(loop.outputs, old, got, strict=False):
                found = compare(*_of_tokens(left, right, now[:, seen:]), self._tolerance)
                largest = max(largest, found.max_abs_error)
                if not found.equal:
                    return largest, f"'{name}' differs in step {[seen, seen + new]}: {found.detail}"
            seen += new
        return largest, ""

    def _taken(self, fed: Mapping[str, Array]) -> dict[str, Array]:
        """The part of a step that the source has inputs for."""
        return {name: array for name, array in fed.items() if name in self._dims}

    def _inputs(self, now: Array, new: int, length: int) -> dict[str, Array]:
        """Further inputs of a source: its branch; with a buffer of its own where new keys go, and a mask as long as that."""
        filled, branch, seen = self._loop.filled, self._loop.branch, now.shape[1] - new
        chosen = {} if branch is None else {branch.name: np.full((1,) * branch.rank, branch.with_past == (seen > 0))}
        if filled is None:
            return chosen
        places = np.arange(seen, seen + new, dtype=self._numpy(filled.position))
        dims = self._dims[filled.position]
        further: dict[str, Array] = chosen | {
            filled.position: places if len(dims) == 1 and dims[0] == self._axes["new"] else places[:1].reshape(len(dims) * [1])
        }
        if filled.masks_buffer:
            mask = np.zeros((now.shape[0], length), bool)
            mask[:, : now.shape[1]] = now
            further[self._loop.mask] = mask.astype(self._numpy(self._loop.mask))
        return further

    def _kept(self, case: _Case, past: int) -> Array:
        """Where tokens are, (b, all positions); rows of a batch differ, and every row begins with one at least."""
        total, first = past + sum(case.steps), past or case.steps[0]
        keep = np.ones((case.batch, total), bool)
        for row in range(case.batch):
            padding = (5 * row + 3) % first  # the first row is not the longest
            if case.pattern == "left":
                keep[row, :padding] = False
            elif case.pattern == "right":
                keep[row, first - padding : first] = False
            elif case.pattern == "holes":
                keep[row, [place for place in range(1, total) if (place * 7 + row) % 3 == 1]] = False
        return keep

    def _first(self, batch: int, keep: Array, more: int) -> tuple[list[Array], list[Array]]:
        """The past that a loop begins with: as it grows, and as a buffer of the tokens, with other numbers after them."""
        grown: list[Array] = []
        buffers: list[Array] = []
        past = keep.shape[1]
        for name, _ in self._loop.pasts:
            heads, channels = (self._size(self._dims[name][axis]) for axis in (1, 3))
            dtype = self._numpy(name)
            numbers = self._rng.standard_normal((batch, heads, past, channels)).astype(dtype)
            buffer = (3 * self._rng.standard_normal((batch, heads, past + more + _SPARE, channels))).astype(dtype)
            for row in range(batch):
                tokens = numbers[row][:, keep[row]]
                buffer[row, :, : tokens.shape[1]] = tokens
            grown.append(self._placed(numbers, past + more))
            buffers.append(buffer)
        return grown, buffers

    def _placed(self, numbers: Array, least: int) -> Array:
        """The past of the source: as it is, or in the source's own buffer, with other numbers after it."""
        filled = self._loop.filled
        if filled is None:
            return numbers
        whole = filled.length if isinstance(filled.length, int) else least + _SPARE
        batch, heads, past, channels = numbers.shape
        buffer = (3 * self._rng.standard_normal((batch, heads, whole, channels))).astype(numbers.dtype)
        buffer[:, :, :past] = numbers
        return buffer

    def _new(self, keep: Array, new: int) -> dict[str, Array]:
        """The new tokens, and their positions counted over tokens as a caller does."""
        loop, batch = self._loop, keep.shape[0]
        dims, kind = self._dims[loop.tokens], self._kinds[loop.tokens]
        if len(dims) == 2:
            below = min(kind.below or _FEW_TOKENS, np.iinfo(np.int32).max)
            tokens = self._rng.integers(0, below, (batch, new)).astype(self._numpy(loop.tokens))
        else:
            shape = (batch, new, *(self._size(dim) for dim in dims[2:]))
            tokens = self._rng.standard_normal(shape).astype(self._numpy(loop.tokens))
        fed = {loop.tokens: tokens}
        if loop.positions is not None:
            fed[loop.positions] = self._counted(keep, new).astype(self._numpy(loop.positions))
        return fed

    def _others(self, keep: Array, new: int, known: dict[str, Array]) -> dict[str, Array]:
        """Other inputs: those that are as long as the new or all positions drawn anew, the rest as in the step before."""
        loop, past = self._loop, keep.shape[1] - new
        own = {loop.tokens, loop.mask, loop.positions, *(name for name, _ in loop.pasts)}
        own |= {loop.filled.position} if loop.filled is not None else set()
        own |= {loop.branch.name} if loop.branch is not None else set()
        lengths = {"batch": keep.shape[0], "new": new, "past": past, "total": past + new}
        axes = {**self._axes, "past": self._dims[loop.pasts[0][0]][2], "total": self._dims.get(loop.mask, (0, 0))[1]}
        sizes_now = {self._root(str(axes[name])): length for name, length in lengths.items() if not isinstance(axes[name], int)}
        for name in [name for name in self._kinds if name not in own]:
            shape, dtype = [self._size(dim, sizes_now) for dim in self._dims[name]], self._numpy(name)
            if name in known and known[name].shape == tuple(shape):
                continue
            if np.issubdtype(dtype, np.floating) or dtype.kind == "V":
                known[name] = self._rng.standard_normal(shape).astype(dtype)
            elif self._kinds[name].name == "positions" and shape[-1:] == [new]:
                counted = self._counted(keep, new)
                known[name] = np.broadcast_to(counted if shape[:-1] == [len(counted)] else counted[0], shape).astype(dtype)
            else:
                known[name] = np.ones(shape, dtype)
        return known

    @staticmethod
    def _counted(keep: Array, new: int) -> Array:
        """The positions of new tokens among all tokens."""
        return np.maximum(keep.astype(np.int64).cumsum(1) - 1, 0)[:, keep.shape[1] - new :]

    def _size(self, dim: sizes.Dim, known: Mapping[str, int] | None = None) -> int:
        known = {**self._equalities.pins, **(known or {})}
        return sizes.evaluate(dim, {name: known.get(self._root(name), _OTHER) for name in sizes.symbols(dim)})

    def _numpy(self, name: str) -> np.dtype[np.generic]:
        dtype = self._dtypes.get(name)
        return np.dtype(np.int64) if dtype is None else dtype.numpy()


class _SourceRefusal(Exception):
    """The source does not run with sizes that were tried."""


def _of_tokens(left: Array, right: Array, keep: Array) -> tuple[Array, Array]:
    """The rows of two outputs that are of tokens: of all new ones, or of the last where an output is of the last only."""
    whole: Sequence[int] = keep.shape
    if left.shape != right.shape or left.ndim < 2 or left.shape[0] != whole[0]:
        return left, right
    if left.shape[1] == whole[1] and (left.ndim > 2 or not np.issubdtype(left.dtype, np.floating)):
        return left[keep], right[keep]
    return left[keep[:, -1]], right[keep[:, -1]]
