"""Training steps of ours and of the same model written by hand, in turn in one process: their ratio without the machine's drift.

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_pairs.py OUT_FOLDER [--only window] [--seconds 400]

Steps of a few milliseconds wait for launches, which one machine, and one minute, makes faster than another. Both models are
built first; then each round times some steps of either, and the round has one ratio. Beside it stands how long the kernels of a
step are busy, by the profiler: what is left when the host does not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import time
from typing import Any

import torch

from benchmarks.training_torch import VARIANTS, WARM, step, timed
from benchmarks.training_torch_models import Case, cases

PAIRS = (("ours", "by hand"), ("ours + inductor", "by hand + compile"))
ROUNDS, RUNS, PROFILED = 15, 8, 3
HEAD = """# Ours and by hand in turn

    PYTHONPATH=.:patterns:cli python benchmarks/training_torch_pairs.py OUT_FOLDER

{machine} A forward and a backward pass, milliseconds: the median of {rounds} rounds, in which either runs {runs} times; the ratio
of ours to by hand in a round, the median and the middle half; and how long the kernels of a step are busy.

| | type | rest | ours | by hand | ratio | middle half | kernels of ours | by hand | ratio |
|---|---|---|---:|---:|---:|---|---:|---:|---:|
"""


@dataclasses.dataclass
class Pair:
    """Both models of one case beside each other; times in milliseconds, ours first."""

    case: str
    dtype: str
    rest: str
    rounds: list[tuple[float, float]]
    busy: tuple[float, float]

    def line(self) -> str:
        """A line of the table."""
        ours, other = (statistics.median(item[place] for item in self.rounds) for place in (0, 1))
        ratios = [first / second for first, second in self.rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        busy = f"{self.busy[0]:.2f} | {self.busy[1]:.2f} | {self.busy[0] / self.busy[1]:.2f}" if self.busy[1] else " | | "
        times = f"{ours:.2f} | {other:.2f} | {middle:.2f} | {low:.2f} to {high:.2f}"
        return f"| {self.case} | {self.dtype} | {self.rest} | {times} | {busy} |\n"


def measure(case: Case, variants: tuple[str, str], device: str, dtype: torch.dtype) -> Pair:
    """Builds both models and times them in turn, the first of a round now one, now the other."""
    torch._dynamo.reset()
    inputs, modules = case.inputs(device, dtype), list[torch.nn.Module]()
    for variant in variants:
        torch.manual_seed(0)
        modules.append(VARIANTS[variant](case).to(device, dtype))
        for _ in range(WARM + 1):
            step(modules[-1], inputs)
    rounds = list[tuple[float, float]]()
    for number in range(ROUNDS):
        found = [0.0, 0.0]
        for place in (0, 1) if number % 2 else (1, 0):
            found[place] = statistics.median(timed(modules[place], inputs, device) for _ in range(RUNS))
            modules[place].zero_grad(set_to_none=True)
        rounds.append((found[0], found[1]))
    ours, other = (0.0, 0.0) if device == "cpu" else (busy(module, inputs) for module in modules)
    name = str(dtype).removeprefix("torch.")
    return Pair(case.name, name, "eager" if variants == PAIRS[0] else "compiled", rounds, (ours, other))


def busy(module: torch.nn.Module, inputs: dict[str, Any]) -> float:
    """Milliseconds of a step in which kernels run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            timed(module, inputs, "cuda")
    events = [event for event in profile.events() or () if str(event.device_type).endswith("CUDA")]
    return sum(event.self_device_time_total for event in events) / 1e3 / PROFILED


def main() -> None:
    """Measures what time allows, the cases as they are named, and writes after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--only", default="window,llama,gpt2-medium 1024,vit-l 196,documents", help="names of cases, with commas")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    chosen = parser.parse_args()
    gpu = torch.cuda.get_device_name() if chosen.device != "cpu" else "CPU"
    head = HEAD.format(machine=f"{gpu}, torch {torch.__version__}.", rounds=ROUNDS, runs=RUNS)
    known, start, pairs = cases(small=chosen.small), time.monotonic(), list[Pair]()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for part in chosen.only.split(","):
        for dtype in chosen.dtypes.split(","):
            for case in (case for case in known if case.name.startswith(part)):
                for variants in PAIRS:
                    if time.monotonic() - start > chosen.seconds:
                        print(f"not measured: {case.name}, {dtype}, {variants[0]}", flush=True)
                        continue
                    pairs.append(measure(case, variants, chosen.device, getattr(torch, dtype)))
                    print(f"{time.monotonic() - start:6.1f} s {pairs[-1].line()}", end="", flush=True)
                    gc.collect()
                    (chosen.folder / "training_torch_pairs.md").write_text(head + "".join(pair.line() for pair in pairs))
                    found = json.dumps([dataclasses.asdict(pair) for pair in pairs], indent=1)
                    (chosen.folder / "training_torch_pairs.json").write_text(found + "\n")


if __name__ == "__main__":
    main()
