"""Peak memory of one padded causal attention by its length: spelled out, by us and by onnxscript; a process for each."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping

import onnx_attnfuse
from benchmarks import exports
from benchmarks.harness import Benchmark, Bound, Race, Setting, child, one_line
from benchmarks.on_gpu.attention import inputs

LENGTHS = (2048, 4096, 8192, 16384, 32768, 64)


def taken(path: pathlib.Path, length: int, provider: str) -> float:
    """Megabytes that a session has taken from the GPU when the runs are over, inputs apart; 0 on a CPU."""
    import torch

    setting = Setting(provider)
    feeds = inputs((1, length, 1, 64), torch.float16 if setting.cuda else torch.float32, "right", setting)
    before = torch.cuda.mem_get_info()[0] if setting.cuda else 0
    bound = Bound(path, setting, feeds, {"arena_extend_strategy": "kSameAsRequested"} if setting.cuda else {})
    assert bound.output() is not None
    return (before - torch.cuda.mem_get_info()[0]) / 1e6 if setting.cuda else 0.0


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """The megabytes of each form."""
    path = exports.attention(setting.folder, "padding_causal", 1, 64, "float16" if setting.cuda else "float32")
    target = path.with_suffix(".guarded.onnx")
    onnx_attnfuse.optimize(path, ep=setting.provider, verify="none").save(target)
    found: dict[str, str] = {}
    for name, form in {"unfused": path, "ours": target, "onnxscript": path.with_suffix(".onnxscript.onnx")}.items():
        try:
            found[name] = f"{child('benchmarks.on_gpu.memory', form, race.label, setting.provider):.0f}"
        except RuntimeError as error:  # noqa: PERF203
            found[name] = one_line(error)
    return found


def races(setting: Setting) -> Iterator[Race]:
    """A row for each length."""
    exports.quiet()
    for length in setting.some(LENGTHS):
        yield Race(str(length), {})


BENCHMARK = Benchmark(
    "Memory of a padded causal attention",
    races,
    "Megabytes, by length; four attentions of one head of 64, half of the keys padding.",
    measure,
)

if __name__ == "__main__":
    print(json.dumps(taken(pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
