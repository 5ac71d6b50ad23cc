"""Measures one subject: `PYTHONPATH=.:patterns:cli python -m benchmarks.on_torch SUBJECT [--to PAGE]`."""

from __future__ import annotations

import functools
import importlib
import pathlib

from benchmarks.harness import Benchmark, command

SUBJECTS = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem[0] != "_")


def benchmark(subject: str) -> Benchmark:
    """The benchmark of a module."""
    return importlib.import_module(f"benchmarks.on_torch.{subject}").BENCHMARK


main = command("benchmarks.on_torch", {name: functools.partial(benchmark, name) for name in SUBJECTS})

if __name__ == "__main__":
    main()
