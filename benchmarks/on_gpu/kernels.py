"""The kernels that run beside those that were forecast, for every attention of a folder, as `attnfuse kernels --confirm` does."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping

import onnx_attnfuse
from benchmarks.harness import Benchmark, Race, Setting, one_line
from onnx_attnfuse import Policy
from onnx_attnfuse.bench.confirm_kernels import check_gpu, confirm_kernels
from onnx_attnfuse.errors import AttnFuseError
from onnx_attnfuse.fusion.forecast_model import sequence_symbols
from onnx_attnfuse.graph import io

POLICIES = {"none": Policy(), "flash": Policy(flash=True), "efficient": Policy(efficient=True)}
_POSITIONS = 300


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """Outcomes of a model by policy; without a GPU what was forecast."""
    found: dict[str, str] = {}
    dim = dict.fromkeys(sequence_symbols(io.load(race.truth)), _POSITIONS)
    arch = check_gpu() if setting.cuda else 90
    for name, policy in POLICIES.items():
        options = onnx_attnfuse.Options(ep="cuda", arch=f"sm{arch}", verify="none", dim=dim, policy=policy)
        result = onnx_attnfuse.optimize(race.truth, options)
        if not setting.cuda:
            found[name] = ", ".join(site.kernel.forecast if site.kernel else site.status for site in result.report.sites)
            continue
        try:
            confirmed = confirm_kernels(result, arch, dim)
        except AttnFuseError as error:
            found[name] = f"could not run: {one_line(error)}"
            continue
        counted = collections.Counter(item.outcome for item in confirmed)
        words = [
            f"{item.op}: {item.forecast}, ran {' '.join(item.ran)}" for item in confirmed if item.outcome == "another kernel"
        ]
        ran = sorted({kernel for item in confirmed for kernel in item.ran})
        found[name] = f"{', '.join(f'{count} {what}' for what, count in counted.items())}: {'; '.join(words) or ', '.join(ran)}"
    return found


def races(setting: Setting) -> Iterator[Race]:
    """A row for each model of the folder."""
    from benchmarks.on_gpu.capture import BUNDLED

    paths = sorted(BUNDLED.glob("*.onnx"))[:1] if setting.quick else sorted(setting.folder.glob("*.onnx"))
    for path in paths:
        yield Race(path.stem, {}, path)


BENCHMARK = Benchmark("Kernels: forecast and ran", races, f"By policy, at {_POSITIONS} positions.", measure)
