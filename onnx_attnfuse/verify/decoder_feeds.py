"""Decoders that are run in a loop, as a caller who generates does: the names of the loop, its inputs, and a session."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.errors import ModelError, OptionError
from onnx_attnfuse.graph import io, sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.verify.float32_copy import is_large
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.model_session import session
from onnx_attnfuse.verify.runtime import Operators, PieceSession, Reference, RuntimeRefusal
from onnx_attnfuse.verify.shape_solver import Equalities

SPARE = 3
"""Positions of a buffer after its text."""
_PROMPT, _SINGLE = 16, 8
_ENTRIES = (1, 2)
_LARGE_SINGLE, _LARGE_ENTRIES = 4, (2,)
"""Steps and entries of models with many weights."""
_OTHER = 5
"""The length of axes that have nothing to do with the cache."""
_FEW_TOKENS = 10
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
class OwnCache:
    """A source's cache from which the keys and values of the result are computed, so that both begin without a past."""

    parts: tuple[tuple[str, str, int], ...]
    """Inputs and outputs, and the axis along which they grow."""
    widths: Mapping[str, tuple[int, int]]
    """Heads and channels of the result's past keys and values, by the first of their names."""


@dataclasses.dataclass(frozen=True)
class Pages:
    """The inputs of a decoder with a cache in pages that tell requests apart, int32."""

    cumulative_lengths: str
    """(b + 1): where the new tokens of each request begin, and where the last end."""
    past_lengths: str
    """(b): the cached positions of each request."""
    block_table: str
    """(b, most blocks): the pages of each request in the order of positions; -1 where there are no more."""


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
    windows: tuple[int | None, ...] = ()
    """For each past the window that the result keeps no more than; None: it keeps all positions."""
    takes_chunks: bool = False
    """Whether several entries take several new tokens each on top of a cache."""
    rotates_each_token: bool = False
    """Whether the provider rotates each token by its own position; the CPU does not in a prompt, so there it is done in front."""
    filled: FilledSource | None = None
    """The source's own buffer; None: its past grows."""
    branch: DecoderBranch | None = None
    """The source's input that selects its branch for a prompt; None: it has one graph for all."""
    own: OwnCache | None = None
    """The source's cache where it is another one; None: it has keys and values too."""
    pages: Pages | None = None
    """The result's inputs where its cache is in pages; None: it is one buffer."""


@dataclasses.dataclass(frozen=True)
class DecoderRun:
    """One run of the loop: how many entries, the new positions of each step, and which of them are tokens."""

    batch: int
    steps: tuple[int, ...]
    """The new positions of each step; where it is negative, so many are taken back, and others come in their place."""
    pattern: Pattern = "none"
    warm: bool = False
    """Whether the loop begins with a past of random numbers."""
    at_beginning: bool = False
    """The mask of the result is as long as the buffer, with zeros after the text."""

    def __str__(self) -> str:
        padding = "without padding" if self.pattern == "none" else f"with padding in '{self.pattern}'"
        where = "a mask as long as the buffer, " if self.at_beginning else ""
        return f"{self.batch} entries, {padding}, {where}{'after a past, ' if self.warm else ''}steps of {list(self.steps)}"


class Decoder:
    """A decoder that is run step by step, each with the cache that the one before left."""

    def __init__(self, model: ir.Model, loop: Loop, side: Literal[0, 1], path: pathlib.Path, operators: Operators = ()) -> None:
        """Loads a decoder.

        Args:
            model: The decoder.
            loop: The names of its inputs and outputs.
            side: Which names it has, 0 for those of the source.
            path: Where it is written if it is too large to be passed.
            operators: Operators of other domains in NumPy.

        Raises:
            RuntimeRefusal: ONNX Runtime does not take it.
        """
        self._session = _started(model, path, operators)
        self.cache: list[Array] = []
        """In the order of the loop's pasts."""
        self._outputs, self._names = loop.outputs, frozenset(self._session.inputs())
        self._pasts, self._presents = ([pair[side] for pair in pairs] for pairs in (loop.pasts, loop.presents))
        if side == 0 and loop.own is not None:
            self._pasts, self._presents = [name for name, _, _ in loop.own.parts], [name for _, name, _ in loop.own.parts]

    def step(self, fed: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one step by their names; inputs that the decoder lacks are left out.

        Raises:
            RuntimeRefusal: ONNX Runtime ended with an error.
        """
        taken = {name: array for name, array in fed.items() if name in self._names}
        past = dict(zip(self._pasts, self.cache, strict=True))
        found = self._session.run([*self._outputs, *self._presents], taken | past)
        self.cache = found[len(self._outputs) :]
        return dict(zip(self._outputs, found, strict=False))


def _started(model: ir.Model, path: pathlib.Path, operators: Operators) -> PieceSession | Reference:
    """A model in ONNX Runtime; by way of files where it is too large to be passed."""
    try:
        return session(model, operators=operators)
    except ModelError:
        try:
            io.save(model, path, is_result=False)
        except (ModelError, OptionError) as error:  # there is no room
            raise RuntimeRefusal(str(error)) from error
        return session(str(path), operators=operators)


class Feeds:
    """The inputs of a decoder, whatever its cache is."""

    def __init__(self, source: ir.Model, loop: Loop, most: int | None = None) -> None:
        """Reads the inputs of a decoder.

        Args:
            source: The decoder whose cache grows.
            loop: The names of its inputs and outputs.
            most: The most positions that it takes; None: that is not known.
        """
        facts = Facts(source.graph)
        self._loop, self._most = loop, most
        self.dims: dict[str, Dims] = {value.name or "": facts.dims(value) or () for value in source.graph.inputs}
        """The shapes of the source's inputs."""
        self._dtypes = {value.name or "": (facts.dtype(value) or ir.DataType.INT64).numpy() for value in source.graph.inputs}
        self.is_large = is_large(source)
        """Whether it is run as little as possible."""
        self._kinds = kinds(source.graph, facts)
        self._equalities = Equalities(facts.equalities)
        self.batch, self.new = (sizes.resolved(self.dims[loop.tokens][axis], loop.numbers) for axis in (0, 1))
        """How many entries and new tokens there are, numbers where they are always the same."""

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """The element type of an input; that of a mask that the source lacks is int64."""
        return self._dtypes.get(name, np.dtype(np.int64))

    def cache_shape(self, name: str, batch: int, length: int) -> tuple[int, int, int, int]:
        """The shape of a past, (b, m, t, h)."""
        if self._loop.own is not None:
            heads, channels = self._loop.own.widths[name]
        else:
            heads, channels = (self._size(self.dims[name][axis]) for axis in (1, 3))
        return batch, heads, length, channels

    def empty(self, batch: int) -> list[Array]:
        """The past of the source before the first token."""
        if self._loop.own is not None:
            parts = [(name, axis, self.dims[name]) for name, _, axis in self._loop.own.parts]
            shapes = [
                [0 if place == axis else dim if isinstance(dim, int) else batch for place, dim in enumerate(dims)]
                for _, axis, dims in parts
            ]
            return [np.zeros(shape, self.dtype(name)) for (name, _, _), shape in zip(parts, shapes, strict=True)]
        return [np.zeros(self.cache_shape(name, batch, 0), self.dtype(name)) for name, _ in self._loop.pasts]

    def run(self, batch: int, prompt: int, single: int = 0) -> DecoderRun:
        """A loop of a prompt and single tokens, as far as sizes that are fixed allow."""
        batch = self.batch if isinstance(self.batch, int) else batch
        steps = [prompt, *[1] * single]
        if isinstance(self.new, int):
            steps = [self.new] * (-(-(prompt + single) // self.new) if batch == 1 or self.new == 1 else 1)
        while self._most is not None and len(steps) > 1 and sum(steps) > self._most:
            steps.pop()
        if self._most is not None and not isinstance(self.new, int):
            steps[0] = min(steps[0], self._most)
        return DecoderRun(batch, tuple(steps))

    def runs(self) -> Iterator[DecoderRun]:
        """The loops that a decoder is judged in without padding."""
        entries, single = (_LARGE_ENTRIES, _LARGE_SINGLE) if self.is_large else (_ENTRIES, _SINGLE)
        yield from dict.fromkeys(self.run(batch, _PROMPT, single) for batch in entries)

    def steps(self, run: DecoderRun, seed: int, given: Mapping[str, Array] | None = None) -> Iterator[dict[str, Array]]:
        """The inputs of each step but the cache, without padding; `given` has arrays of a prompt in place of random ones."""
        rng, seen = np.random.default_rng(seed), 0
        for new in run.steps:
            seen += new
            yield {**self.step(np.ones((run.batch, seen), bool), new, rng), **(given or {})}

    def step(self, keep: Array, new: int, rng: np.random.Generator) -> dict[str, Array]:
        """The inputs of one step but the cache: new tokens, positions counted over tokens, a mask, and others by their shapes.

        Args:
            keep: Where tokens are, (b, all positions).
            new: How many positions are new.
            rng: Draws the tokens; other inputs are the same in each step where their sizes are.
        """
        loop, dims = self._loop, self.dims[self._loop.tokens]
        counted = np.maximum(keep.astype(np.int64).cumsum(1) - 1, 0)[:, keep.shape[1] - new :]
        fed = self._others(keep, new, counted)
        if len(dims) == 2:
            below = min(self._kinds[loop.tokens].below or _FEW_TOKENS, np.iinfo(np.int32).max)
            tokens = rng.integers(0, below, (keep.shape[0], new))
        else:
            tokens = rng.standard_normal((keep.shape[0], new, *(self._size(dim) for dim in dims[2:])))
        fed |= {loop.tokens: tokens.astype(self.dtype(loop.tokens)), loop.mask: keep.astype(self.dtype(loop.mask))}
        return fed if loop.positions is None else {**fed, loop.positions: counted.astype(self.dtype(loop.positions))}

    def _others(self, keep: Array, new: int, counted: Array) -> dict[str, Array]:
        """Inputs that are neither tokens, positions, mask nor cache."""
        loop, found = self._loop, dict[str, Array]()
        first, along = (loop.pasts[0][0], 2) if loop.own is None else (loop.own.parts[0][0], loop.own.parts[0][2])
        own = {loop.tokens, loop.mask, loop.positions, *(name for name, _ in loop.pasts)}
        own |= {name for name, _, _ in (loop.own.parts if loop.own is not None else ())}
        own |= {None if loop.filled is None else loop.filled.position, None if loop.branch is None else loop.branch.name}
        total, past = self.dims.get(loop.mask, (0, 0))[1], self.dims[first][along]
        axes = (*self.dims[loop.tokens][:2], past, total)
        lengths = zip(axes, (keep.shape[0], new, keep.shape[1] - new, keep.shape[1]), strict=True)
        known = {self._equalities.root(str(axis)): length for axis, length in lengths if not isinstance(axis, int)}
        for name in self._kinds.keys() - own:
            shape, dtype = [self._size(dim, known) for dim in self.dims[name]], self.dtype(name)
            if dtype.kind in "fV":
                found[name] = np.random.default_rng([*name.encode()]).standard_normal(shape).astype(dtype)
            elif self._kinds[name].name == "positions" and shape[-1:] == [new]:
                found[name] = np.broadcast_to(counted if shape[:-1] == [len(counted)] else counted[0], shape).astype(dtype)
            else:
                found[name] = np.ones(shape, dtype)
        return found

    def _size(self, dim: sizes.Dim, known: Mapping[str, int] | None = None) -> int:
        known = {**self._equalities.pins, **(known or {})}
        return sizes.evaluate(dim, {name: known.get(self._equalities.root(name), _OTHER) for name in sizes.symbols(dim)})
