"""The products of a decode step of a Llama of 1.1 B alone, as one CUDA graph: what no step can be faster than."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import Benchmark, Race, Setting

_LAYERS, _WIDTH, _KEYS, _INNER, _TOKENS = 22, 2048, 256, 5632, 32000
_TIMES = 10


def step(x: torch.Tensor, layers: list[list[torch.Tensor]], table: torch.Tensor) -> torch.Tensor:
    """All products, each of what the one before gave, cut to its width."""
    for joined, output, gate, up, down in layers:
        mixed = (x @ joined)[:, :_WIDTH] @ output
        opened = [mixed @ weight for weight in (gate, up)]
        x = opened[0] @ down
    return x @ table


def captured(rows: int, library: str, setting: Setting, *, turned: bool) -> Callable[[], None]:
    """So many steps of a graph; on a CPU one step of one layer."""
    dtype = torch.float16 if setting.cuda else torch.float32

    def weight(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, device=setting.provider, dtype=dtype) * 0.02
        return made.t().contiguous().t() if turned else made

    shapes = ((_WIDTH, _WIDTH + 2 * _KEYS), (_WIDTH, _WIDTH), (_WIDTH, _INNER), (_WIDTH, _INNER), (_INNER, _WIDTH))
    layers = [[weight(*shape) for shape in shapes] for _ in range(_LAYERS if setting.cuda else 1)]
    table, x = weight(_WIDTH, _TOKENS), torch.randn(rows, _WIDTH, device=setting.provider, dtype=dtype)
    if not setting.cuda:
        return lambda: [step(x, layers, table) for _ in range(_TIMES)] and None
    torch.backends.cuda.preferred_blas_library(library)
    for _ in range(3):
        step(x, layers, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, layers, table)

    def run() -> None:
        for _ in range(_TIMES):
            graph.replay()
        torch.cuda.synchronize()

    return run


def races(setting: Setting) -> Iterator[Race]:
    """A row for one token and for eight."""
    for rows in (1, 8):
        variants = {
            f"{library}, {'transposed' if turned else 'as (in, out)'}": functools.partial(
                captured, rows, library, setting, turned=turned
            )
            for turned, library in itertools.product((False, True), ("cublas", "cublaslt") if setting.cuda else ("cublas",))
        }
        yield Race(f"{rows} rows", variants, each=_TIMES)


BENCHMARK = Benchmark("The products of a decode step", races)
