"""Judging a decoder whose cache became pages: requests that come and go in one loop, each beside the source run by itself.

Pages begin as NaN and are handed out in no order, those of a request that has ended to the next one. Requests have prompts of
different lengths, of which some come in parts, so that several tokens on top of a cache are beside single ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_attnfuse.bodies.paged_attention import put_in_place
from onnx_attnfuse.graph.build import builder_for
from onnx_attnfuse.graph.ops import is_contrib
from onnx_attnfuse.graph.scopes import all_names, scopes
from onnx_attnfuse.verify.decoder_loop import Judge
from onnx_attnfuse.verify.inputs import Array
from onnx_attnfuse.verify.verdict import compare

BLOCK, _BLOCKS = 4, 23
"""Positions of a page, and pages."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Requests that are run together."""

    name: str
    requests: tuple[tuple[int, ...], ...]
    """The new tokens of each in each step; it is not there before its first ones, and has ended after the last step."""

    def __str__(self) -> str:
        return self.name


SCHEDULES = (
    Schedule("requests of several lengths", ((5, 1, 1, 1), (1, 1, 1, 1), (9, 1, 1))),
    Schedule("prompts in parts", ((3, 4, 1, 1), (6, 0, 1, 1), (0, 7, 1, 1, 1), (2, 2, 2, 5, 1))),
    Schedule("requests in the pages of others", ((6, 1), (0, 0, 5, 1, 1), (4, 3, 0, 1), (0, 0, 0, 9, 1))),
)


def decomposed(model: ir.Model) -> ir.Model:
    """The model with operators of the standard in the place of PagedAttention, which has no kernel on the CPU."""
    nodes = [node for node in model.graph if is_contrib(node, "PagedAttention")]
    if not nodes:
        return model
    alone = model.clone()
    scope = next(iter(scopes(alone)))
    builder = builder_for(scope, all_names(alone))
    for node in [node for node in scope.graph if is_contrib(node, "PagedAttention")]:
        put_in_place(builder, node)
    return alone


@dataclasses.dataclass
class _Request:
    """A request on its way."""

    steps: tuple[int, ...]
    cache: list[Array]
    """The past of the source that runs this request alone."""
    seen: int = 0
    pages: list[int] = dataclasses.field(default_factory=list[int])

    def is_there(self, step: int) -> bool:
        """Whether it has begun and not ended; it may have no new token all the same."""
        return step < len(self.steps) and any(self.steps[: step + 1])


class PagedJudge(Judge):
    """A source that runs one request at a time, and a decoder that runs all of them."""

    def _cases(self, *, warm: bool) -> Iterator[Schedule]:
        yield from () if warm else SCHEDULES[-1:] if self._feeds.is_large else SCHEDULES

    def _run(self, case: Schedule) -> tuple[float, str]:
        """The largest error of one loop, and where both differ beyond the tolerance."""
        free, largest = list(map(int, self._rng.permutation(_BLOCKS))), 0.0
        shapes = [(self._feeds.cache_shape(name, 1, 0), self._feeds.dtype(name)) for name, _ in self._loop.pasts]
        self._result.cache = [np.full((_BLOCKS, BLOCK, dims[1], dims[3]), np.nan).astype(dtype) for dims, dtype in shapes]
        fitting = [steps for steps in case.requests if not self._too_long(sum(steps))]
        requests = [_Request(steps, self._first(1, np.ones((1, 0), bool), sum(steps))[0]) for steps in fitting]
        for step in range(max(map(len, fitting), default=0)):
            for ended in (request for request in requests if not request.is_there(step)):
                free += ended.pages
                ended.pages = []
            there = [request for request in requests if request.is_there(step)]
            for request in there:
                while len(request.pages) * BLOCK < request.seen + request.steps[step]:
                    request.pages.append(free.pop())
            fed, wanted = self._tables(there, step), list[dict[str, Array]]()
            tokens = list[Array]()
            for request in there:
                own, old = self._alone(request, request.steps[step])
                tokens.append(own)
                wanted.append(old)
            got = self._result.step(fed | {self._loop.tokens: np.concatenate(tokens)})
            for name, rows in got.items():
                left = np.concatenate([old[name][0] for old in wanted if old])
                found = compare(left, rows, self._tolerance)
                largest = max(largest, found.max_abs_error)
                if not found.equal:
                    return largest, f"'{name}' differs in step {step}: {found.detail}"
        return largest, ""

    def _alone(self, request: _Request, new: int) -> tuple[Array, dict[str, Array]]:
        """The new tokens of a request, and what the source gives for them, nothing where there are none.

        Raises:
            SourceRefusal: It does not run with sizes that were tried.
        """
        now = np.ones((1, request.seen + new), bool)
        fed = self._feeds.step(now, new, self._rng)
        found = dict[str, Array]()
        if new:
            self._source.cache = request.cache
            found = self._of_source(fed, now, new)
            request.cache = self._source.cache
        request.seen += new
        return fed[self._loop.tokens][0], found

    def _tables(self, there: Sequence[_Request], step: int) -> dict[str, Array]:
        """The inputs that tell requests apart."""
        pages = self._loop.pages
        assert pages is not None
        table = np.full((len(there), 1 + max(len(request.pages) for request in there)), -1, np.int32)
        for row, request in zip(table, there, strict=True):
            row[: len(request.pages)] = request.pages
        return {
            pages.cumulative_lengths: np.cumsum([0, *(request.steps[step] for request in there)], dtype=np.int32),
            pages.past_lengths: np.array([request.seen for request in there], np.int32),
            pages.block_table: table,
        }
