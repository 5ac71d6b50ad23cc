"""The fuzzer's command: judges many graphs, shrinks what fails, and counts."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import sys
import time

import numpy as np

from tests.fuzz.judging import CLASSES, FAILURES, Outcome, Subject
from tests.fuzz.pool import Job, Pool
from tests.fuzz.recipe import Recipe, draw, read
from tests.fuzz.shrinking import shrink

_LEVELS = {"none": ("none",), "sites": ("sites",), "both": ("none", "sites")}
_SHRUNK = 40
"""Failures that are shrunk; of the others only the recipe is printed."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A graph that must not come out as it does."""

    seed: int
    level: str
    outcome: Outcome
    recipe: Recipe


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 if anything failed."""
    options = _parser().parse_args(arguments)
    levels = _LEVELS[options.verify]
    if options.recipe:
        jobs = [Job(0, read(options.recipe), levels)]
    else:
        jobs = (Job(seed, draw(seed), levels) for seed in range(options.seed, options.seed + options.graphs))
    os.chdir(_made(options.out))
    counts = {level: collections.Counter[str]() for level in levels}
    codes = collections.Counter[str]()
    failures: list[Failure] = []
    start, done = time.monotonic(), 0
    with Pool(options.jobs) as pool:
        for job, found in pool.judged(jobs):
            done += 1
            for level, outcome in found.items():
                counts[level][outcome.kind] += 1
                codes.update(f"{level} {code}" for code in outcome.codes)
                if outcome.bad or outcome.kind in options.show:
                    failures.append(Failure(job.seed, level, outcome, job.recipe))
            told = {outcome.kind: (level, outcome.detail) for level, outcome in found.items() if outcome.bad}
            for kind, (level, detail) in told.items():
                print(f"{kind} seed {job.seed} --verify {level}: {detail[:200]}", flush=True)
            if done % 1000 == 0:
                print(f"{done} graphs, {done / (time.monotonic() - start):.1f} a second", flush=True)
        seconds = time.monotonic() - start
        if not options.no_shrink:
            _shrink_all(pool, failures)
    print(_table(counts, done, seconds))
    if options.codes:
        print("\n".join(f"{count:7} {code}" for code, count in sorted(codes.items())))
    return int(any(failure.outcome.bad for failure in failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--verify", choices=list(_LEVELS), default="both", help="what the library itself verifies")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/fuzz"), help="folder for what fails")
    parser.add_argument("--recipe", help="one graph, as a failure was printed")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as they are")
    parser.add_argument("--show", nargs="*", default=[], choices=CLASSES, help="treat outcomes of these kinds as failures too")
    parser.add_argument("--codes", action="store_true", help="count the reasons of all refusals")
    return parser


def _made(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _shrink_all(pool: Pool, failures: list[Failure]) -> None:
    """Shrinks failures and writes them down; equal ones once."""
    known = collections.Counter[str]()
    strongest = {(failure.seed, failure.outcome.kind): failure for failure in failures}
    for failure in list(strongest.values())[:_SHRUNK]:

        def same(candidate: Recipe, failure: Failure = failure) -> bool:
            ((_, found),) = pool.judged([Job(0, candidate, (failure.level,))])
            return found[failure.level].kind == failure.outcome.kind

        smallest = shrink(failure.recipe, same)
        line = f"{failure.outcome.kind} {dataclasses.replace(smallest, numbers=0).line()}"
        known[line] += 1
        if known[line] > 1:
            continue
        name = f"{failure.outcome.kind}_{failure.seed}_{failure.level}"
        ((_, found),) = pool.judged([Job(0, smallest, (failure.level,))])
        outcome = found[failure.level]
        _save(name, smallest, outcome)
        print(f"{name}: {outcome.detail}\n    {smallest.line()}", flush=True)


def _save(name: str, recipe: Recipe, outcome: Outcome) -> None:
    """The model as NAME.onnx, and the inputs on which it fails as NAME.npz."""
    pathlib.Path(f"{name}.onnx").write_bytes(Subject(recipe).model.SerializeToString())
    if outcome.feeds is not None:
        np.savez(f"{name}.npz", **outcome.feeds)  # type: ignore[arg-type]


def _table(counts: dict[str, collections.Counter[str]], done: int, seconds: float) -> str:
    """Graphs by outcome, one column for each level of verification."""
    lines = [
        f"{done} graphs, {done / seconds:.1f} a second",
        f"{'':12}" + "".join(f"{f'--verify {level}':>16}" for level in counts),
    ]
    for kind in CLASSES:
        numbers = [count[kind] for count in counts.values()]
        if any(numbers) or kind in FAILURES:
            lines.append(f"{kind:12}" + "".join(f"{number:16}" for number in numbers))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
