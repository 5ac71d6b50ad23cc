"""Measures one subject: `python -m benchmarks.on_gpu SUBJECT [--to PAGE]`."""

from __future__ import annotations

import functools
import importlib
import pathlib

from benchmarks.harness import Benchmark, command

SUBJECTS = sorted(path.stem for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem[0] != "_")


def benchmark(subject: str) -> Benchmark:
    """The benchmark of a module."""
    return importlib.import_module(f"benchmarks.on_gpu.{subject}").BENCHMARK


main = command("benchmarks.on_gpu", {name: functools.partial(benchmark, name) for name in SUBJECTS})

if __name__ == "__main__":
    main()
