"""WebAssembly, as onnxruntime-web runs models in a browser without WebGPU: the kernels of the CPU, on fewer threads."""

from __future__ import annotations

import dataclasses

from onnx_attnfuse.kernels.providers import cpu

PROVIDER = dataclasses.replace(
    cpu.PROVIDER,
    name="wasm",
    ort_name="wasm",
    distribution="onnxruntime-web",
    known_from=f"the CPU's kernels compiled to WebAssembly, tested with onnxruntime-web 1.30; {cpu.PROVIDER.known_from}",
    switching=None,
)
"""onnxruntime-web has a name of its own for it. A page cannot set environment variables, so no kernel is switched off."""
