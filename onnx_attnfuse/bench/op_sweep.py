"""MultiHeadAttention by itself, at the sizes and in the input formats by which ONNX Runtime's flash attention was first measured.

The sizes are those of its pull request of 2023: batch, queries and keys, heads, head size. A run is 4·b·n·s²·h operations.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx

from onnx_attnfuse.bench.compare import Contender, run
from onnx_attnfuse.bench.process import Sample
from onnx_attnfuse.graph.ops import CONTRIB
from onnx_attnfuse.kernels.conditions import MOST_SCORES
from onnx_attnfuse.kernels.execution_provider import Settings
from onnx_attnfuse.kernels.providers import provider
from onnx_attnfuse.kernels.support import support
from onnx_attnfuse.reasons import Reason

Format = Literal["Q,K,V", "Q,KV", "QKV"]
"""Separate (b, s, n·h); keys and values as (b, s, n, 2, h); all as (b, s, n, 3, h)."""
Size = tuple[int, int, int, int]
FORMATS: tuple[Format, ...] = ("Q,K,V", "Q,KV", "QKV")
SIZES: tuple[Size, ...] = (
    *((32, 512, 64, 32), (32, 512, 128, 16), (16, 1024, 64, 32), (8, 2048, 64, 32), (4, 4096, 64, 32), (2, 8192, 64, 32)),
    *((1, 16384, 64, 32), (1, 4096, 8, 40), (1, 4096, 8, 80), (1, 4096, 8, 160), (4, 4096, 8, 40), (4, 4096, 8, 80)),
    *((4, 4096, 8, 160), (1, 16384, 8, 40), (1, 16384, 8, 80), (1, 16384, 8, 160), (128, 128, 12, 64), (128, 384, 12, 64)),
    (128, 512, 12, 64),
)
PACKED_ONLY: tuple[Size, ...] = ((4, 2048, 32, 128), (8, 4096, 32, 128))
"""Measured as QKV only."""
SMALL: tuple[Size, ...] = (
    (1, 128, 12, 64),
    (4, 128, 12, 64),
    (1, 512, 12, 64),
    (1, 512, 8, 40),
    (1, 512, 8, 80),
    (1, 1024, 4, 32),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement."""

    size: Size
    format: Format
    kernel: str
    tflops: float | None = None
    failed: str | None = None


def kernels(ep: str, arch: int) -> dict[str, Settings]:
    """The kernels that a sweep compares on a device: the one that ONNX Runtime chooses, and each that can be asked for."""
    switching = provider(ep).switching
    return {"as chosen": Settings(), **({} if switching is None else switching.alone(arch))}


def table(*, small: bool, ep: str) -> list[tuple[Size, Format]]:
    """The rows: all, or few and small ones; in formats that the execution provider takes."""
    sizes = SMALL if small else SIZES
    known = support("MultiHeadAttention", provider(ep))
    takes_packed = not isinstance(known, Reason) and known.packed_inputs
    rows: list[tuple[Size, Format]] = [(size, form) for size in sizes for form in (FORMATS if takes_packed else FORMATS[:1])]
    packed: list[tuple[Size, Format]] = [(size, "QKV") for size in PACKED_ONLY]
    return rows if small or not takes_packed else rows + packed


def model(size: Size, form: Format, dtype: int) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """One MultiHeadAttention without a mask, and the shapes of its inputs."""
    batch, length, heads, head = size
    flat = (batch, length, heads * head)
    shapes: dict[Format, dict[str, tuple[int, ...]]] = {
        "Q,K,V": {"query": flat, "key": flat, "value": flat},
        "Q,KV": {"query": flat, "key": (batch, length, heads, 2, head)},
        "QKV": {"query": (batch, length, heads, 3, head)},
    }
    inputs = shapes[form]
    node = onnx.helper.make_node("MultiHeadAttention", list(inputs), ["out"], name="attention", domain=CONTRIB, num_heads=heads)
    given = [onnx.helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()]
    result = onnx.helper.make_tensor_value_info("out", dtype, flat)
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid(CONTRIB, 1)]
    graph = onnx.helper.make_graph([node], "seed", given, [result])
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), inputs


def operations(size: Size) -> int:
    """Operations of one run: two products of 2·b·n·s²·h each."""
    batch, length, heads, head = size
    return 4 * batch * heads * length * length * head


def measure(
    rows: Sequence[tuple[Size, Format]], columns: Mapping[str, Settings], *, ep: str, runs: int, seconds: float
) -> Iterator[Cell]:
    """Measures row by row, each cell in a process of its own: a kernel that cannot run may end it.

    Args:
        rows: Sizes and formats.
        columns: Kernels by name, with the settings for ONNX Runtime's choice.
        ep: Execution provider; measured in float16 where it computes in that, else in float32.
        runs: How often each is run, warm.
        seconds: How long each cell may take.
    """
    dtype = onnx.TensorProto.FLOAT16 if provider(ep).rounds_float16 else onnx.TensorProto.FLOAT
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    for size, form in rows:
        proto, shapes = model(size, form, dtype)
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal(shape, np.float32).astype(kind) for name, shape in shapes.items()}
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name, "model.onnx")
            path.write_bytes(proto.SerializeToString())
            contenders = [_contender(size, kernel, settings, path) for kernel, settings in columns.items()]
            for found in run(contenders, Sample({}, feeds), path.parent, ep=ep, runs=runs, seconds=seconds):
                tflops = None if found.ms is None else round(operations(size) / found.ms / 1e9, 4)
                yield Cell(size, form, found.name, tflops, found.failed)


def _contender(size: Size, kernel: str, settings: Settings, path: pathlib.Path) -> Contender:
    batch, length, heads, _ = size
    if kernel == "tensorrt" and batch * heads * length * length >= MOST_SCORES:
        return Contender(kernel, None, "not tried: where it does not take this, the math kernel ends the process")
    return Contender(kernel, path, None, settings.options, settings.environment)
