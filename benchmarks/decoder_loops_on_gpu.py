"""Decoders whose cache is one buffer, judged on a GPU: the loop of `verify/decoder_loop.py` under the CUDA provider, in float16.

    python benchmarks/decoder_loops_on_gpu.py OUT.md MODEL.onnx ...

MODEL is an export in float32 with a growing cache, and is converted first. Without a GPU such models are judged on the CPU, which
rotates the tokens of a prompt otherwise. Here source and result both run where they will: prompts and steps, without padding and
with padding left, right and in between. Exits 1 where one differs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import onnx_ir as ir
import onnxruntime

import onnx_attnfuse
from onnx_attnfuse.graph import io
from onnx_attnfuse.verify import decoder_loop
from onnx_attnfuse.verify.decoder_loop import Loop
from onnx_attnfuse.verify.runtime import RuntimeRefusal
from onnx_attnfuse.verify.verdict import Verdict

PROVIDERS = {"cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"], "cpu": ["CPUExecutionProvider"]}


class _OnGpu:
    """A model in ONNX Runtime on the provider."""

    def __init__(self, path: pathlib.Path, provider: str) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(str(path), options, providers=PROVIDERS[provider])

    def run(self, outputs: Any, feeds: Any) -> Any:
        """The outputs for some inputs.

        Raises:
            RuntimeRefusal: ONNX Runtime ends with an error.
        """
        try:
            return self._session.run(outputs, feeds)
        except Exception as error:
            raise RuntimeRefusal(str(error)) from error


def judged_on(provider: str) -> None:
    """Has decoders judged on an execution provider from now on."""

    def check(before: ir.Model, after: ir.Model, loop: Loop, operators: Any = ()) -> Verdict:
        return decoder_loop._judged(before, after, loop, operators)

    def started(model: ir.Model, path: pathlib.Path, operators: Any) -> Any:
        del operators
        io.save(model, path)
        return _OnGpu(path, provider)

    decoder_loop.check_decoder = check
    decoder_loop.started = started


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("models", type=pathlib.Path, nargs="+")
    parser.add_argument("--provider", choices=tuple(PROVIDERS), default="cuda")
    chosen = parser.parse_args()
    judged_on(chosen.provider)
    lines = ["| decoder | attentions | judged |", "|---|---|---|"]
    wrong = 0
    for path in chosen.models:
        model = onnx_attnfuse.convert(path, verify="none").model
        report = onnx_attnfuse.optimize(model, ep="cuda", arch="sm90", cache="shared").report
        sites = [site for site in report.sites if site.status != "not-attention"]
        forms = ", ".join(dict.fromkeys(f"{site.op} {site.mask_form}" for site in sites))
        verified = next((site.verified for site in sites if site.verified is not None), None)
        told = (
            "as it was"
            if report.decoder is None
            else "not judged"
            if verified is None
            else f"equal in {verified.cases} loops, {verified.max_abs_error:.1e}"
        )
        wrong += report.decoder is None
        lines.append(f"| {path.stem} | {forms} | {told} | {'; '.join(report.notes[:1]) if report.decoder is None else ''} |")
        print(lines[-1], flush=True)
    chosen.out.write_text("\n".join([f"onnxruntime {onnxruntime.__version__}, {chosen.provider}, float16", "", *lines]) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
