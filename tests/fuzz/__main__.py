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

_EVERY = 1000
"""Graphs between two lines about speed."""
_WIDTH = 200
"""Characters of a message that are printed."""


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
        recipes = ((seed, draw(seed)) for seed in range(options.seed, options.seed + options.graphs))
        jobs = (Job(seed, planned_for(recipe, options.ep), levels) for seed, recipe in recipes)
    options.out.mkdir(parents=True, exist_ok=True)
    os.chdir(options.out)
    tally = Tally(levels, frozenset(options.show))
    with Pool(options.jobs) as pool, pathlib.Path("failures.txt").open("w", buffering=1) as file:
        for job, found in pool.judged(jobs):
            for failure in tally.count(job, found):
                outcome, level = failure.outcome, failure.level
                file.write(f"{outcome.kind} seed {job.seed} --verify {level} --recipe '{job.recipe.line()}'\n")
                print(f"{outcome.kind} seed {job.seed} --verify {level}: {outcome.detail[:_WIDTH]}", flush=True)
        print(tally)
        if not options.no_shrink:
            _shrink_all(pool, tally.failures)
    if options.codes:
        print("\n".join(f"{count:7} {code}" for code, count in sorted(tally.codes.items())))
    return int(any(failure.outcome.bad for failure in tally.failures))


def planned_for(recipe: Recipe, ep: str | None) -> Recipe:
    """A recipe for an execution provider; without a target, which it may lack, and a length, which some fix for good."""
    return recipe if ep is None else dataclasses.replace(recipe, ep=ep, target="auto", hint=0)


class Tally:
    """Counts what becomes of graphs."""

    def __init__(self, levels: tuple[str, ...], shown: frozenset[str]) -> None:
        self.failures: list[Failure] = []
        self.codes = collections.Counter[str]()
        """Reasons of refusals, by level."""
        self._counts = {level: collections.Counter[str]() for level in levels}
        self._shown = shown
        self._start, self._done = time.monotonic(), 0

    def count(self, job: Job, found: dict[str, Outcome]) -> list[Failure]:
        """Counts one graph; what failed, once for levels that fail alike."""
        self._done += 1
        failed: dict[str, Failure] = {}
        for level, outcome in found.items():
            self._counts[level][outcome.kind] += 1
            self.codes.update(f"{level} {code}" for code in outcome.codes)
            if outcome.bad or outcome.kind in self._shown:
                failed[outcome.kind] = Failure(job.seed, level, outcome, job.recipe)
        if self._done % _EVERY == 0:
            print(f"{self._done} graphs, {self._done / (time.monotonic() - self._start):.1f} a second", flush=True)
        self.failures += failed.values()
        return list(failed.values())

    def __str__(self) -> str:
        speed = self._done / (time.monotonic() - self._start)
        lines = [f"{self._done} graphs, {speed:.1f} a second"]
        lines.append(f"{'':12}" + "".join(f"{f'--verify {level}':>16}" for level in self._counts))
        for kind in CLASSES:
            numbers = [count[kind] for count in self._counts.values()]
            if any(numbers) or kind in FAILURES:
                lines.append(f"{kind:12}" + "".join(f"{number:16}" for number in numbers))
        return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--ep", help="the execution provider that every graph is planned for, instead of cpu or cuda")
    parser.add_argument("--verify", choices=list(_LEVELS), default="both", help="what the library itself verifies")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/fuzz"), help="folder for what fails")
    parser.add_argument("--recipe", help="one graph, as a failure was printed")
    parser.add_argument("--no-shrink", action="store_true", help="leave failures as they are")
    parser.add_argument("--show", nargs="*", default=[], choices=CLASSES, help="treat outcomes of these kinds as failures too")
    parser.add_argument("--codes", action="store_true", help="count the reasons of all refusals")
    return parser


def _shrink_all(pool: Pool, failures: list[Failure]) -> None:
    """Shrinks failures and writes them down; equal ones once."""
    known = collections.Counter[str]()
    for failure in failures[:_SHRUNK]:

        def same(candidate: Recipe, failure: Failure = failure) -> bool:
            ((_, found),) = pool.judged([Job(0, candidate, (failure.level,))])
            return found[failure.level].signature == failure.outcome.signature

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


if __name__ == "__main__":
    sys.exit(main())
