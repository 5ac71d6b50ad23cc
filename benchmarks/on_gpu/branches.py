"""Memory of the GPU that `If` nodes take in ONNX Runtime, by their number and by provider options; a process for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Bound, Race, Setting, child, model, one_line

PRODUCTS, SIZE = 24, 256
OPTIONS: dict[str, dict[str, str]] = {"default": {}, "use_ep_level_unified_stream=1": {"use_ep_level_unified_stream": "1"}}


def chain(ifs: int, kind: str) -> bytes:
    """A chain of products, of which so many are in both branches of an If."""
    shape, lines = f"{kind}[{SIZE}, {SIZE}]", list[str]()
    for place in range(PRODUCTS):
        branches = ", ".join(
            f"{side}: graph = {side}{place} () => ({shape} {side}_{place}) {{ {side}_{place} = MatMul(x{place}, w) }}"
            for side in ("then_branch", "else_branch")
        )
        lines.append(f"x{place + 1} = " + (f"If<{branches}>(test)" if place < ifs else f"MatMul(x{place}, w)"))
    return model(" ".join(lines), f"({shape} x0, {shape} w, bool test) => ({shape} x{PRODUCTS})", {})


def taken(ifs: int, options: Mapping[str, str], provider: str) -> float:
    """Megabytes less on the device after the first runs than before there was a session; 0 on a CPU."""
    setting = Setting(provider)
    ones = np.full((SIZE, SIZE), 1 / SIZE, setting.dtype)
    feeds = {"x0": ones, "w": ones, "test": np.asarray(True)}

    def free() -> float:
        import torch

        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] / 1e6

    before = free() if setting.cuda else 0.0
    choices = {"arena_extend_strategy": "kSameAsRequested", **options} if setting.cuda else {}
    bound = Bound(chain(ifs, setting.type), setting, feeds, choices)
    assert bound.output() is not None
    return before - free() if setting.cuda else 0.0


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """The megabytes of each variant."""
    found: dict[str, str] = {}
    for name, options in OPTIONS.items():
        try:
            found[name] = f"{child('benchmarks.on_gpu.branches', race.label, json.dumps(options), setting.provider):.0f}"
        except RuntimeError as error:  # noqa: PERF203
            found[name] = one_line(error)
    return found


def races(setting: Setting) -> Iterator[Race]:
    """A row for each number of branches."""
    for count in setting.some((24, 12, 6, 0, 1)):
        yield Race(str(count), dict[str, Any]())


BENCHMARK = Benchmark("Memory that branches take", races, "Megabytes, by the number of `If` nodes.", measure)

if __name__ == "__main__":
    print(json.dumps(taken(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])))
