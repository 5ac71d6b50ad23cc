"""What a step costs the host where the rest of a model runs eagerly: flex attention compiled to kernels that compute nothing.

Ours and by hand in turn, on the CPU, with small layers: what is left is what launches, guards and looks up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

from benchmarks.harness import Benchmark, Race, Setting
from benchmarks.on_torch import _models as models
from onnx_attnfuse.training import fuse
from onnx_attnfuse.training.pytorch import flex


def empty(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A graph compiled to results that nothing is written to."""
    (results,) = next(node.args for node in graph.graph.nodes if node.op == "output")

    def run(*given: Any) -> list[Any]:
        fakes = [item.meta["val"] if hasattr(item, "meta") else item for item in results]
        return [
            torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype) if isinstance(fake, torch.Tensor) else fake
            for fake in fakes
        ]

    return make_boxed_func(run)


def patches() -> list[Any]:
    """Compiles to nothing wherever flex attention is compiled by itself, on a CPU too."""
    library: Any = flex
    compiled = library._compiled

    def attend(*given: Any) -> Any:
        *operands, traced = given
        _, _, _, _, program, _, bias, _, scale, softcap, rows = operands
        assert not traced
        return compiled(library._attend, program, bias, scale, softcap, rows)(*operands)

    def made(program: Any, *given: Any) -> Any:
        return compiled(library._blocks, program)(program, *given)

    def taken(*tensors: Any) -> None:
        """Any device will do."""

    backend = aot_autograd(fw_compiler=empty, bw_compiler=empty)
    return [
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)),
        mock.patch.object(library, "_made", made),
        mock.patch.object(library, "attend", attend),
        mock.patch.object(flex_attention, "_validate_device", taken),
    ]


def step(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(**inputs).backward()

    return run


def races(setting: Setting) -> Iterator[Race]:
    """A row for each mask that goes to flex attention as a rule."""
    torch.set_num_threads(1)
    changes = patches()
    for change in changes:
        change.start()
    for mask in setting.some(("window", "padding", "documents")):
        case = models.Case(mask, mask, 1, 256, 64, 4, 4, 2, window=64, document=64)
        call = torch.compile(flex_attention.flex_attention, fullgraph=True)

        def by_hand(block: Any, query: Any, key: Any, value: Any, call: Any = call, **given: Any) -> Any:
            return call(query, key, value, block_mask=given["blocks"], enable_gqa=query.shape[1] != key.shape[1])

        hand = models.Model(case, by_hand, torch.compile(models.blocks, fullgraph=True))
        ours = fuse(models.Model(case, models.spelled, models.seen), rest="eager", flex=True)
        inputs = case.inputs("cpu", torch.float32)
        step(ours, inputs)()
        if any(report.fused != case.layers for report in ours.__dict__["attention_reports"]):
            raise RuntimeError(f"{mask}: not fused, so that there is nothing to compare")
        yield Race(mask, {"by hand": functools.partial(step, hand, inputs), "ours": functools.partial(step, ours, inputs)})
    for change in changes:
        change.stop()


BENCHMARK = Benchmark("What a step costs the host", races)
