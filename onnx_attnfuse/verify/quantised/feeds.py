"""Inputs of decoders that are run in a loop without padding: tokens that are drawn or given, and the inputs that go with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.graph import sizes
from onnx_attnfuse.graph.facts import Facts
from onnx_attnfuse.graph.facts_view import Dims
from onnx_attnfuse.verify.decoder_loop import Loop
from onnx_attnfuse.verify.float32_copy import is_large
from onnx_attnfuse.verify.input_kinds import kinds
from onnx_attnfuse.verify.inputs import Array

_PROMPT, _SINGLE = 16, 8
_ENTRIES = (1, 2)
_LARGE_SINGLE, _LARGE_ENTRIES = 4, (2,)
"""Steps and entries of models with many weights."""
_OTHER = 5
"""The length of axes that have nothing to do with the cache."""
_FEW_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class DecoderRun:
    """One loop: how many entries, and how many new tokens in each step."""

    batch: int
    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.batch} entries, steps of {list(self.steps)}"


class Feeds:
    """The inputs of a decoder, whatever its cache is."""

    def __init__(self, source: ir.Model, loop: Loop, most: int | None) -> None:
        """Reads the inputs of a decoder.

        Args:
            source: The decoder whose cache grows.
            loop: The names of its inputs and outputs.
            most: The most positions that it takes; None: that is not known.
        """
        facts = Facts(source.graph)
        self._loop, self._most = loop, most
        self._dims: dict[str, Dims] = {value.name or "": facts.dims(value) or () for value in source.graph.inputs}
        self._dtypes = {value.name or "": (facts.dtype(value) or ir.DataType.INT64).numpy() for value in source.graph.inputs}
        self.is_large = is_large(source)
        """Whether it is run as little as possible."""
        self._kinds = kinds(source.graph, facts)
        self._batch, self._new = (sizes.resolved(self._dims[loop.tokens][axis], loop.numbers) for axis in (0, 1))

    @property
    def names(self) -> frozenset[str]:
        """The inputs of the source."""
        return frozenset(self._dims)

    def rank(self, name: str) -> int:
        """How many axes an input has."""
        return len(self._dims[name])

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """The element type of an input; that of a mask that the source lacks is int64."""
        return self._dtypes.get(name, np.dtype(np.int64))

    def cache(self, name: str, batch: int) -> Array:
        """The past of the source before the first token, (b, m, 0, h)."""
        dims = self._dims[name]
        return np.zeros((batch, self._size(dims[1], {}), 0, self._size(dims[3], {})), self._dtypes[name])

    def run(self, batch: int, prompt: int, single: int = 0) -> DecoderRun:
        """A loop of a prompt and single tokens, as far as sizes that are fixed allow."""
        batch = self._batch if isinstance(self._batch, int) else batch
        steps = [prompt, *[1] * single]
        if isinstance(self._new, int):
            steps = [self._new] * (-(-(prompt + single) // self._new) if batch == 1 or self._new == 1 else 1)
        while self._most is not None and len(steps) > 1 and sum(steps) > self._most:
            steps.pop()
        if self._most is not None and not isinstance(self._new, int):
            steps[0] = min(steps[0], self._most)
        return DecoderRun(batch, tuple(steps))

    def runs(self) -> Iterator[DecoderRun]:
        """The loops that a decoder is judged in."""
        entries, single = (_LARGE_ENTRIES, _LARGE_SINGLE) if self.is_large else (_ENTRIES, _SINGLE)
        yield from dict.fromkeys(self.run(batch, _PROMPT, single) for batch in entries)

    def steps(self, run: DecoderRun, seed: int, given: Mapping[str, Array] | None = None) -> Iterator[dict[str, Array]]:
        """The inputs of each step but the cache; `given` has arrays of a prompt in place of random ones."""
        rng, seen, loop = np.random.default_rng(seed), 0, self._loop
        known = dict(given or {})
        for new in run.steps:
            seen += new
            mask = np.ones((run.batch, seen), self._dtypes.get(loop.mask, np.dtype(np.int64)))
            fed = {loop.tokens: self._tokens(rng, run.batch, new), loop.mask: mask}
            if loop.positions is not None:
                places = np.broadcast_to(np.arange(seen - new, seen), (run.batch, new))
                fed[loop.positions] = places.astype(self._dtypes[loop.positions])
            others = self._others(run.batch, new, seen, known)
            yield {**others, **fed, **known}

    def _tokens(self, rng: np.random.Generator, batch: int, new: int) -> Array:
        dims, dtype = self._dims[self._loop.tokens], self._dtypes[self._loop.tokens]
        if len(dims) == 2:
            below = min(self._kinds[self._loop.tokens].below or _FEW_TOKENS, np.iinfo(np.int32).max)
            return rng.integers(0, below, (batch, new)).astype(dtype)
        return rng.standard_normal((batch, new, *(self._size(dim, {}) for dim in dims[2:]))).astype(dtype)

    def _others(self, batch: int, new: int, seen: int, known: Mapping[str, Array]) -> dict[str, Array]:
        """Inputs that are neither tokens, positions nor cache, drawn by their shapes; the same in each step where sizes are."""
        loop, found = self._loop, dict[str, Array]()
        own = {loop.tokens, loop.mask, loop.positions, *(name for name, _ in loop.pasts), *known}
        axes = {self._dims[loop.tokens][0]: batch, self._dims[loop.tokens][1]: new, self._dims[loop.pasts[0][0]][2]: seen - new}
        lengths = {str(axis): length for axis, length in axes.items() if not isinstance(axis, int)}
        for name in sorted(self._dims.keys() - own):
            shape, dtype = [self._size(dim, lengths) for dim in self._dims[name]], self._dtypes[name]
            drawn = np.random.default_rng(len(name)).standard_normal(shape) if dtype.kind in "fV" else np.ones(shape)
            places = np.broadcast_to(np.arange(seen - new, seen), shape) if shape[-1:] == [new] else drawn
            found[name] = (places if self._kinds[name].name == "positions" else drawn).astype(dtype)
        return found

    @staticmethod
    def _size(dim: sizes.Dim, known: Mapping[str, int]) -> int:
        return sizes.evaluate(dim, {**dict.fromkeys(sizes.symbols(dim), _OTHER), **known})


def taken(fed: Mapping[str, Array], names: Sequence[str] | frozenset[str]) -> dict[str, Array]:
    """The inputs that a model has."""
    return {name: array for name, array in fed.items() if name in names}
