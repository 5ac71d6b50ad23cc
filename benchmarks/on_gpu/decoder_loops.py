"""Decoders in float16 whose cache is one buffer, judged in a loop under the CUDA provider, with and without padding.

The folder holds exports in float32 with a growing cache. Source and result both run on the GPU.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from benchmarks.harness import PROVIDERS, Benchmark, Race, Setting
from onnx_attnfuse.graph import io
from onnx_attnfuse.verify import decoder_loop
from onnx_attnfuse.verify.runtime import RuntimeRefusal


class Started:
    """A model in ONNX Runtime on the provider."""

    def __init__(self, path: pathlib.Path, provider: str) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        providers = [PROVIDERS[provider]] + [PROVIDERS["cpu"]] * (provider != "cpu")
        self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)

    def run(self, outputs: Any, feeds: Any) -> Any:
        """The outputs for some inputs.

        Raises:
            RuntimeRefusal: ONNX Runtime ends with an error.
        """
        try:
            return self._session.run(outputs, feeds)
        except Exception as error:
            raise RuntimeRefusal(str(error)) from error


def measure(race: Race, setting: Setting) -> Mapping[str, str]:
    """The attentions of a decoder, and how they were judged."""

    def started(model: ir.Model, path: pathlib.Path, operators: Any) -> Started:
        del operators
        io.save(model, path)
        return Started(path, setting.provider)

    def judged(before: Any, after: Any, loop: Any, operators: Any = ()) -> Any:
        return decoder_loop._judged(before, after, loop, operators)

    model: Any = race.truth
    if setting.cuda:
        model = onnx_attnfuse.convert(model, verify="none").model
    options = {"ep": setting.provider, "cache": "shared", **({"arch": "sm90"} if setting.cuda else {})}
    with mock.patch.object(decoder_loop, "started", started), mock.patch.object(decoder_loop, "check_decoder", judged):
        report = onnx_attnfuse.optimize(model, **options).report
    sites = [site for site in report.sites if site.status != "not-attention"]
    verified = next((site.verified for site in sites if site.verified is not None), None)
    told = "not judged" if verified is None else f"equal in {verified.cases} loops, {verified.max_abs_error:.1e}"
    return {
        "attentions": ", ".join(dict.fromkeys(f"{site.op} {site.mask_form}" for site in sites)),
        "judged": told if report.decoder is not None else f"as it was: {'; '.join(report.notes[:1])}",
    }


def races(setting: Setting) -> Iterator[Race]:
    """A row for each decoder."""
    bundled = pathlib.Path(__file__).parents[2] / "models" / "bundled"
    paths = sorted(bundled.glob("llama_past__*.onnx"))[:1] if setting.quick else sorted(setting.folder.glob("*.onnx"))
    for path in paths:
        yield Race(path.stem, {}, path)


BENCHMARK = Benchmark("Decoders whose cache is one buffer", races, "Judged in loops of prompts and steps.", measure)
