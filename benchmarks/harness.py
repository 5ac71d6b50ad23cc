"""What all benchmarks share: variants that take turns, ratios within a run, checks of results, and a page of Markdown.

A benchmark is declared: `Benchmark(title, rows)`, where `rows` yields a `Row`, or a `Race` of variants; others are compared with
the first. `command` makes a command of one benchmark, or of the modules of a folder; its exit status is 1 where a cell begins
with `WRONG`.
"""

# pyright: basic, reportMissingTypeStubs=false
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import logging
import math
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np
import onnxruntime

PROVIDERS = ("cpu", "cuda")
WRONG = "WRONG"
_PACKAGES = (
    "torch",
    "transformers",
    "onnxruntime-gpu",
    "onnxruntime",
    "onnxruntime-genai",
    "onnxscript",
    "openvino",
    "z3-solver",
    "cvc5",
)
_READABLE, _SOME = 160, 5


@contextlib.contextmanager
def quietly(level: int = logging.WARNING) -> Iterator[None]:
    """Drops warnings, and records of a level and below, and lets tools log again afterwards."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _option(default: Any, words: str, kind: Any = None) -> Any:
    """A field that is an option of the command, too."""
    return dataclasses.field(default=default, metadata={"help": words, "type": kind})


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and how long a benchmark runs, as its command is asked."""

    provider: str = _option("cuda", "What models run on.", click.Choice(PROVIDERS))
    quick: bool = _option(False, "The smallest sizes and three rounds, to see that it works.")
    rounds: int = _option(30, "In each of them all variants run once.")
    seconds: float = _option(math.inf, "Rounds of a row end then, after five at the earliest.")
    threads: int = _option(
        0, "Of a CPU, 0 for all; with 1 the time that the process computed counts, so that other work changes little."
    )
    folder: pathlib.Path = _option(pathlib.Path("build/benchmarks"), "For models.", pathlib.Path)  # noqa: RUF009
    kernels: bool = _option(False, "Print the kernels that take longest, too; needs torch with a GPU.")
    arch: str = _option("sm90", "Of the GPU that models are written for.")
    sizes: str = _option("", "Such as 8x512x12x64, with commas; in the place of the benchmark's own.")
    only: str = _option("", "A part of the labels of rows.")
    columns: str = _option("", "Names of variants, with semicolons; others are compared with the first.")

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.provider == "cuda"

    def sizes_or(self, known: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        """The sizes to measure."""
        if self.sizes:
            return [tuple(map(int, size.split("x"))) for size in self.sizes.split(",")]
        return self.some(known[:-1] if not self.quick else known)

    def some(self, values: Sequence[Any]) -> Sequence[Any]:
        """All values, or the last where it is quick."""
        return values[-1:] if self.quick else values


Cells = Mapping[str, str]
"""What a row says, by column."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a page.

    Attributes:
        label: What the row is about; several words are columns.
        measure: Gives its cells.
    """

    label: str | tuple[str, ...]
    measure: Callable[[Setting], Cells]


@dataclasses.dataclass(frozen=True)
class Race:
    """A row of variants that take turns.

    Attributes:
        label: What the row is about.
        variants: A maker for each name; what it gives is run, and has `output` if results are compared.
        truth: What results are compared with, NaN where it is not known; by default the first variant's.
        each: Layers in a run: times are divided by it.
        single: Each number of a result is compared by itself.
    """

    label: str
    variants: Mapping[str, Callable[[], Callable[[], object]]]
    truth: np.ndarray[Any, Any] | None = None
    each: int = 1
    single: bool = False

    def measure(self, setting: Setting) -> Cells:
        """Milliseconds, how many times as fast, and how far the result is from the truth; what fails is a result."""
        ready, shown = dict[str, Any](), dict[str, str]()
        chosen = setting.columns.split(";") if setting.columns else list(self.variants)
        for name in [name for name in chosen if name in self.variants]:
            try:
                ready[name] = self.variants[name]()
                ready[name]()
            except Exception as error:  # noqa: BLE001, PERF203 - a failure is a result
                shown[name] = f"failed: {one_line(error)}"
                ready.pop(name, None)
        results = {name: run.output() if hasattr(run, "output") else None for name, run in ready.items()}
        truth = next(iter(results.values()), None) if self.truth is None else self.truth
        clock = time.process_time if setting.threads == 1 else time.perf_counter
        timed = in_turns(ready, 3 if setting.quick else setting.rounds, clock=clock, seconds=setting.seconds)
        if setting.kernels:
            for name, run in ready.items():
                click.echo(f"{self.label}, {name}: {profiled(run)}", err=True)
        for name, found in timed.items():
            far = apart(results[name], truth, some=self.truth is not None, single=self.single)
            parts = [f"{found.ms / self.each:.4g} ({found.gain:.2f})", "" if far is None else f"{far:.0e}"]
            shown[name] = " ".join(filter(None, [*parts, getattr(ready[name], "words", "")]))
        return {name: shown[name] for name in chosen if name in shown}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A page: its rows.

    Attributes:
        note: A paragraph below the title.
        heads: The columns of labels.
    """

    title: str
    rows: Callable[[Setting], Iterator[Row | Race]]
    note: str = "Milliseconds (times as fast as the first form), and the largest difference as a part of the result."
    heads: tuple[str, ...] = ("",)


@dataclasses.dataclass(frozen=True)
class Timed:
    """Milliseconds of a run, the median, and how many times as fast it is as the first variant in the same round."""

    ms: float
    gain: float


def in_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seconds: float = math.inf,
) -> dict[str, Timed]:
    """Runs all in each round, another one first in each; so many rounds, or some for so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    ends = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn >= _SOME and time.perf_counter() > ends:
            break
        for name in names:
            start = clock()
            runs[name]()
            times[name].append(1e3 * (clock() - start))
        names = names[1:] + names[:1]
    first = next(iter(times.values()), [])
    return {
        name: Timed(statistics.median(taken), statistics.median(a / max(b, 1e-9) for a, b in zip(first, taken, strict=True)))
        for name, taken in times.items()
    }


def apart(found: Any, truth: Any, *, some: bool = False, single: bool = False) -> float | None:
    """The largest difference as a part of the largest number; None where one is not known.

    Args:
        found: What is compared.
        truth: What it should be.
        some: NaN in the truth is what nobody knows, and is left out.
        single: Each number is compared as a part of itself, and not of the largest.
    """
    if found is None or truth is None:
        return None
    wide, other = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    if some and wide.shape == other.shape:
        wide, other = wide[~np.isnan(other)], other[~np.isnan(other)]
    if wide.shape != other.shape or not np.array_equal(np.isfinite(wide), np.isfinite(other)):
        return float("inf")
    if single:
        return float(np.nanmax(np.abs(wide - other) / np.maximum(np.abs(other), 1e-30), initial=0))
    return float(np.nanmax(np.abs(wide - other), initial=0) / max(float(np.nanmax(np.abs(other), initial=0)), 1e-30))


def one_line(error: BaseException | str) -> str:
    """An error for a cell of a table."""
    return " ".join(str(error).split())[:_READABLE].replace("|", "/") or type(error).__name__


def tried(make: Callable[[], object]) -> str:
    """What a call gives, or why it fails, for a cell of a table."""
    try:
        return str(make())
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return one_line(error)


def profiled(run: Callable[[], object]) -> str:
    """How long kernels are busy in a run, and the six that take longest, in milliseconds by torch's profiler."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found = sorted(profile.key_averages(), key=lambda item: -item.device_time_total)
    busy = sum(item.self_device_time_total for item in found) / 1e3
    return "; ".join([f"busy {busy:.3f}", *(f"{item.key[:70]} {item.device_time_total / 1e3:.3f}" for item in found[:6])])


def machine() -> str:
    """What this runs on."""
    there = {item.name.lower(): item.version for item in reversed([*importlib.metadata.distributions()]) if item.name}
    found = [f"python {platform.python_version()}", *(f"{name} {there[name]}" for name in _PACKAGES if name in there)]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        found.append(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        found.append(f"{os.cpu_count()} processors")
    return ", ".join(found)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def page(benchmark: Benchmark, setting: Setting, words: str, to: pathlib.Path | None = None) -> str:
    """Measures all rows, and gives the page; it is written after each row."""
    text, found = "", dict[tuple[str, ...], Cells]()
    for row in benchmark.rows(setting):
        label = (row.label,) if isinstance(row.label, str) else row.label
        if setting.only not in ", ".join(label):
            continue
        found[label] = _measured(row, setting)
        click.echo(f"{', '.join(label)}: {dict(found[label])}", err=True)
        columns = list(dict.fromkeys(name for cells in found.values() for name in cells))
        rows = [[*label, *(cells.get(name, "") for name in columns)] for label, cells in found.items()]
        text = (
            f"# {benchmark.title}\n\n    {words}\n\n{machine()}, {setting.provider}.\n{benchmark.note}\n\n"
            f"{table([*benchmark.heads, *columns], rows)}\n"
        )
        if to is not None:
            to.write_text(text, encoding="utf-8")
    return text


def _measured(row: Row | Race, setting: Setting) -> Cells:
    """The cells of a row; others are measured all the same where it fails."""
    try:
        return row.measure(setting)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        return {"failed": f"{WRONG} {type(error).__name__}: {one_line(error)}"}


def printed(
    module: str,
    *arguments: Any,
    python: pathlib.Path | str = sys.executable,
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a module prints in a process of its own.

    Raises:
        RuntimeError: The process failed.
    """
    command, env = [python, "-W", "ignore", "-m", module, *map(str, arguments)], {**os.environ, **(environment or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, check=False)
    if done.returncode:
        raise RuntimeError(one_line((done.stderr or done.stdout)[-_READABLE:] or f"exit status {done.returncode}"))
    return done.stdout


def subjects(folder: str) -> dict[str, Callable[[], Benchmark]]:
    """The benchmarks of a folder's modules by their names, each imported when it is asked for."""
    names = sorted(path.stem for path in (pathlib.Path(__file__).parent / folder).glob("*.py") if path.stem[0] != "_")
    return {name: lambda name=name: importlib.import_module(f"benchmarks.{folder}.{name}").BENCHMARK for name in names}


def command(where: str, only: Benchmark | None = None, **defaults: Any) -> click.Command:
    """A command that measures one of the benchmarks of a folder, or the only one of a module.

    Args:
        where: The folder or the module.
        only: The benchmark of a module.
        defaults: Settings in the place of those of `Setting`.
    """
    benchmarks = subjects(where) if only is None else {"": lambda: only}
    known = Setting(**defaults)

    @click.command(context_settings={"show_default": True})
    @click.option("--to", type=pathlib.Path, help="The page; by default it is printed.")
    @click.pass_context
    def run(context: click.Context, to: pathlib.Path | None, name: str = "", **chosen: Any) -> None:
        """Measures a benchmark, and writes its page."""
        setting = Setting(**chosen)
        if setting.cuda and hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        setting.folder.mkdir(parents=True, exist_ok=True)
        words = ["python", "-m", f"benchmarks.{where}", *([name] if name else [])]
        for key in ("provider", "seconds", "threads", "arch", "sizes", "columns"):
            words += [f"--{key}", shlex.quote(str(chosen[key]))] if chosen[key] != getattr(Setting, key) else []
        with quietly():
            text = page(benchmarks[name](), setting, " ".join(words) + " --quick" * setting.quick, to)
        if to is None:
            click.echo(text, nl=False)
        context.exit(int(f"| {WRONG}" in text))

    for field in reversed(dataclasses.fields(Setting)):
        run = click.option(f"--{field.name}", default=getattr(known, field.name), is_flag=field.type == "bool", **field.metadata)(
            run
        )
    return run if only is not None else click.argument("name", type=click.Choice(sorted(benchmarks)))(run)
