"""The products of a decode step of a Llama of 1.1 B alone, as one CUDA graph: ``python benchmarks/decode_products_on_gpu.py``.

What no step can be faster than whose products are cuBLAS's: no attention, normalization or launch between them. Float16, one row
and eight, by cuBLAS and cuBLASLt, weights stored as (in, out) and transposed.
"""

from __future__ import annotations

import itertools

import torch

_LAYERS, _WIDTH, _KEYS, _INNER, _TOKENS = 22, 2048, 256, 5632, 32000
_WARM, _RUNS, _TIMES = 3, 20, 10

Weights = list[list[torch.Tensor]]


def weights(*, turned: bool) -> Weights:
    """Queries, keys and values as one, output, gate, up and down of each layer; then the table of tokens."""
    shapes = [
        (_WIDTH, _WIDTH + 2 * _KEYS),
        (_WIDTH, _WIDTH),
        (_WIDTH, _INNER),
        (_WIDTH, _INNER),
        (_INNER, _WIDTH),
    ]

    def made(rows: int, columns: int) -> torch.Tensor:
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.float16) * 0.02
        return weight.t().contiguous().t() if turned else weight

    return [*([made(*shape) for shape in shapes] for _ in range(_LAYERS)), [made(_WIDTH, _TOKENS)]]


def step(x: torch.Tensor, found: Weights) -> torch.Tensor:
    """All products, each of what the one before gave, cut to its width."""
    for joined, output, gate, up, down in found[:-1]:
        mixed = (x @ joined)[:, :_WIDTH] @ output
        opened = [mixed @ weight for weight in (gate, up)]
        x = opened[0] @ down
    return x @ found[-1][0]


def milliseconds(rows: int, found: Weights) -> float:
    """The fastest of some runs of the captured step."""
    x = torch.randn(rows, _WIDTH, device="cuda", dtype=torch.float16)
    for _ in range(_WARM):
        step(x, found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, found)
    times: list[float] = []
    for _ in range(_RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_TIMES):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / _TIMES)
    return min(times)


def main() -> None:
    """Prints a line for each way."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for turned in (False, True):
        found = weights(turned=turned)
        for library, rows in itertools.product(("cublas", "cublaslt"), (1, 8)):
            torch.backends.cuda.preferred_blas_library(library)
            stored = "transposed" if turned else "as (in, out)"
            print(f"{rows} rows, {library}, weights stored {stored}: {milliseconds(rows, found):.3f} ms", flush=True)


if __name__ == "__main__":
    main()
