"""Products whose columns are no multiple of eight, plain and padded: whether `padded-columns` pays, and to which multiple.

`cut` slices the result. `tied` is a Transpose of a table that is gathered from too, `turned` reads the table by `transB`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, model, numbers

SIZES = ((4096, 1024, 50257), (1024, 1024, 50257), (8, 2048, 50257), (1024, 768, 51865), (4096, 768, 30522), (4, 64, 1001))
FORMS = (
    *("plain", *(f"to {number}{end}" for number in (8, 64, 128) for end in (", cut", ""))),
    *("tied", "tied, to 8, cut", "turned", "turned, to 8, cut"),
    *("Gemm", "Gemm, to 8, cut", "Gemm, to 8", "Gemm, turned", "Gemm, turned, to 8, cut", "Gemm, turned, to 8"),
)


class Columns(Bound):
    """A product of which the columns that are no padding are compared, in some rows."""

    columns: int

    def output(self) -> np.ndarray:
        return super().output()[:8, : self.columns]


def product(form: str, size: tuple[int, int, int], setting: Setting) -> Bound:
    """One form."""
    rows, shared, columns = size
    multiple = next((number for number in (128, 64, 8) if f"to {number}" in form), 1)
    wide = -(-columns // multiple) * multiple
    weight = numbers((columns, shared), setting.dtype, shared**-0.5)
    zeros = np.zeros((wide - columns, shared), setting.dtype)
    padded = np.concatenate([weight, zeros])
    arrays = {"w": padded if "turned" in form else np.ascontiguousarray(padded.T)}
    lines, more = "", ""
    if "tied" in form:
        arrays = {"table": weight, **({"zeros": zeros} if wide != columns else {})}
        lines = "rows = Gather(table, ids) whole = " + (
            "Concat<axis = 0>(table, zeros)" if wide != columns else "Identity(table)"
        )
        lines, more = f"{lines} w = Transpose<perm = [1, 0]>(whole)", f", {setting.type}[1, {shared}] rows"
    turned = int("turned" in form)
    op = f"Gemm<transB = {turned}>" if "Gemm" in form else f"com.microsoft.FusedMatMul<transB = {turned}>" if turned else "MatMul"
    if form.endswith("cut"):
        arrays |= {"start": np.asarray([0]), "end": np.asarray([columns]), "axis": np.asarray([1])}
        lines += f" product = {op}(x, w) y = Slice(product, start, end, axis)"
    else:
        lines += f" y = {op}(x, w)"
    given = columns if form.endswith("cut") else wide
    ends = f"({setting.type}[{rows}, {shared}] x, int64[1] ids) => ({setting.type}[{rows}, {given}] y{more})"
    feeds = {"x": numbers((rows, shared), setting.dtype), "ids": np.asarray([1])}
    bound = Columns(model(lines, ends, arrays), setting, feeds)
    bound.columns = columns
    return bound


def by_torch(size: tuple[int, int, int]) -> Callable[[], None]:
    """Torch's product with a weight that lies by columns."""
    import torch

    rows, shared, columns = size
    x, w = (torch.from_numpy(numbers((count, shared), np.float16)).cuda() for count in (rows, columns))

    def run() -> None:
        torch.nn.functional.linear(x, w)
        torch.cuda.synchronize()

    return run


def races(setting: Setting) -> Iterator[Race]:
    """A row for each size."""
    for size in setting.sizes(SIZES):
        variants: dict[str, Callable[[], object]] = {form: functools.partial(product, form, size, setting) for form in FORMS}
        if setting.cuda:
            variants["torch linear"] = functools.partial(by_torch, size)
        yield Race("x".join(map(str, size)), variants)


BENCHMARK = Benchmark("Products whose columns are no multiple of eight", races)
